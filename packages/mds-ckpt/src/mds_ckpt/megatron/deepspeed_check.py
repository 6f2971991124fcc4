"""What is wrong with a DeepSpeed checkpoint: missing ranks, damage, copies that differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.checks import Problem, read_every_tensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.megatron.deepspeed_folder import Listing, list_folder
from mds_ckpt.pickles.archive import open_torch_file

__all__ = ["check_deepspeed", "damaged_members", "missing_files"]


def check_deepspeed(checkpoint: Checkpoint, *, data: bool) -> Iterator[Problem]:
    """Missing files, damaged members, tensors that can't be read or whose copies differ."""
    listing = list_folder(checkpoint.path)
    parallel = checkpoint.parallel
    yield from missing_files(listing, parallel["tp"], parallel["pp"], parallel.get("dp"))
    for path in _paths(listing) if data else ():  # without data, opening has read all there is
        yield from damaged_members(path, data=data)
    yield from read_every_tensor(checkpoint, data)


def missing_files(listing: Listing, tp: int, pp: int, dp: int | None) -> Iterator[Problem]:
    """Files that the degrees call for and that are not there."""
    names = _expected_models(listing, tp, pp, dp) | _expected_optimizers(listing, tp, pp, dp)
    for layer in sorted({layer for layer, _ in listing.layers}):
        for rank in range(tp):
            if (layer, rank) not in listing.layers:
                names[f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"] = None
    for name in names:
        yield Problem(file=name, reason=f"it is missing (tp {tp}, pp {pp}, dp {dp or 'unknown'})")


def _expected_models(listing: Listing, tp: int, pp: int, dp: int | None) -> dict[str, None]:
    if listing.stage_3_models:
        return {
            f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt": None
            for mp in range(tp * pp)
            for rank in range(dp or 1)
            if (rank, mp) not in listing.stage_3_models
        }
    return {
        f"mp_rank_{mp:02d}_model_states.pt": None
        for mp in range(tp * pp)
        if (mp,) not in listing.models
    }


def _expected_optimizers(listing: Listing, tp: int, pp: int, dp: int | None) -> dict[str, None]:
    if not listing.optimizers:
        return {}
    prefix = next(iter(listing.optimizers.values())).name.partition("zero_pp_rank")[0]
    return {
        f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt": None
        for mp in range(tp * pp)
        for rank in range(dp or 1)
        if (rank, mp) not in listing.optimizers
    }


def _paths(listing: Listing) -> Iterator[Path]:
    for files in (
        listing.layers,
        listing.models,
        listing.stage_3_models,
        listing.optimizers,
        listing.experts,
    ):
        yield from files.values()


def damaged_members(path: Path, *, data: bool) -> Iterator[Problem]:
    """Why a torch file can't be opened, or, with data, which members' checksums differ."""
    try:
        file = open_torch_file(path)
        for name in file.damaged_members() if data else ():
            yield Problem(file=path.name, reason=f"member '{name}' differs from its checksum")
    except RejectedError as error:
        yield Problem(file=path.name, tensor=error.tensor, reason=error.reason)
