"""What one mds checkpoint of a running job holds: each rank its own fragments, nothing gathered.

A fragment is a flat range of a local tensor; `mds_core.sharding.flat_pieces` says which pieces of
the global tensor that is. Copies are written once: those of data parallelism are dealt out over its
ranks, those of tensor parallelism are written by its first rank.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mds_ckpt import commit
from mds_ckpt.formats.mds import LazyArray, Piece, RankFile, add_file, merge_rank_files
from mds_ckpt.formats.mds import write_rank_file as write_pieces
from mds_ckpt.manifest import CheckpointManifest, FileRecord, ModelRecord
from mds_ckpt.protection.sealed_save import SealedPlace, SealedSave, SealingOperations
from mds_ckpt.tensors.box import extents
from mds_ckpt.tensors.dtype import numpy_dtype
from mds_core.groups import ProcessGroups, group_rank, group_size
from mds_core.sharding import ParameterShard, flat_pieces
from mds_train.assembly import Parts
from mds_train.data.families import kind_of_samples
from mds_train.engines.interface import Fragment
from mds_train.provenance import provenance_record
from mds_train.state import TrainState

__all__ = [
    "SavedFile",
    "Snapshot",
    "check_masters",
    "pieces_of_rank",
    "publish_snapshot",
    "take_snapshot",
    "write_snapshot",
]

TOKENIZER = "tokenizer.json"
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One moment of a run: this rank's pieces, and what the manifest says of that moment."""

    state: TrainState
    pieces: tuple[Piece, ...]
    optimizer: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedFile:
    """What one rank wrote. Plain data: it can be pickled and gathered."""

    pieces: RankFile
    """The file as the manifest tells of it."""

    sealed: tuple[str, FileRecord] | None = None
    """Name, size and digest of what lies in the folder in its place, if it is encrypted."""


def take_snapshot(parts: Parts, state: TrainState, *, copied: bool) -> Snapshot:
    """This moment, right after a step. Every rank calls it; it communicates nothing.

    Args:
        parts: The run.
        state: Its counters.
        copied: Copy the numbers into the host's memory, so that training may go on meanwhile;
            otherwise they are read when they are written.

    Raises:
        RuntimeError: If the map of the optimizer's memory is wrong.
    """
    fragments = parts.engine.fragments()
    check_masters(fragments)
    groups = parts.groups
    pieces = pieces_of_rank(fragments, parts.shards, groups=groups)
    return Snapshot(
        state=state,
        pieces=tuple(_copy(piece) for piece in pieces) if copied else tuple(pieces),
        optimizer=dataclasses.asdict(parts.engine.optimizer_state()),
    )


def _copy(piece: Piece) -> Piece:
    assert isinstance(piece.array, LazyArray)
    array = piece.array.load()
    return piece._replace(array=array if array.base is None else array.copy())


def write_snapshot(
    snapshot: Snapshot, partial: Path, *, rank: int, place: SealedPlace | None = None
) -> SavedFile:
    """Write this rank's file into the partial folder and force it to the disk.

    Args:
        snapshot: This rank's.
        partial: The folder.
        rank: This rank.
        place: Where its encrypted file goes; None for a plain one.
    """
    if place is None:
        return SavedFile(pieces=write_pieces(partial, rank, snapshot.pieces))
    disk = SealingOperations(place)
    pieces = write_pieces(partial, rank, snapshot.pieces, operations=disk)
    return SavedFile(pieces=pieces, sealed=(place.name, disk.record))


def check_masters(fragments: Sequence[Fragment]) -> None:
    """Refuse to save weights that are not the rounded masters: the map of memory is wrong.

    Raises:
        RuntimeError: Naming the parameter.
    """
    for fragment in fragments:
        rounded = fragment.master.to(fragment.weight)
        if torch.equal(rounded, fragment.weight):
            continue
        # NaN never equals itself, and weights that are NaN are no fault of the map.
        same = (rounded == fragment.weight) | (rounded.isnan() & fragment.weight.isnan())
        if not bool(same.all()):
            raise RuntimeError(
                f"{fragment.name}: the optimizer's master weights do not belong to the model's, so "
                f"nothing was saved. This is a fault of mds-train; please report it."
            )


def pieces_of_rank(
    fragments: Sequence[Fragment],
    shards: Mapping[str, ParameterShard],
    *,
    groups: ProcessGroups,
) -> Iterator[Piece]:
    """What one rank writes, so that all ranks together write every element once.

    Args:
        fragments: Of the rank's engine.
        shards: The rank's part of every parameter.
        groups: Its process groups.
    """
    for index, fragment in enumerate(fragments):
        shard = shards[fragment.name]
        if fragment.copy or (shard.whole and groups.tp_rank != 0):
            continue
        holders = groups.expert_dp_ulysses if fragment.expert else groups.dp_ulysses
        if fragment.replicated and index % group_size(holders) != group_rank(holders):
            continue
        for state, tensor in _states(fragment).items():
            yield from _pieces(shard, fragment, state=state, tensor=tensor)


def _states(fragment: Fragment) -> dict[str, Tensor]:
    states = {"weight": fragment.weight}
    if fragment.weight.dtype != torch.float32:
        states["master"] = fragment.master
    return states | fragment.moments


def _pieces(
    shard: ParameterShard, fragment: Fragment, *, state: str, tensor: Tensor
) -> Iterator[Piece]:
    for piece in flat_pieces(shard, fragment.start, fragment.start + fragment.numel):
        shape = extents(piece.box) if piece.flat is None else (piece.flat[1] - piece.flat[0],)
        count = int(torch.Size(shape).numel())
        part = tensor.narrow(0, piece.offset, count).view(shape)
        array = LazyArray(shape, _DTYPE_NAMES[part.dtype], functools.partial(_to_numpy, part))
        yield Piece(shard.name, state, piece.box, piece.flat, array)


def _to_numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # unknown to numpy: the same bits under ml_dtypes' name
        return tensor.view(torch.int16).numpy().view(numpy_dtype("BF16"))
    return tensor.numpy()


def publish_snapshot(
    parts: Parts,
    snapshot: Snapshot,
    *,
    partial: Path,
    files: Sequence[SavedFile],
    parent: Mapping[str, Any] | None,
    sealing: SealedSave | None = None,
) -> Path:
    """Write the manifest and give the folder its name; for rank 0, with all ranks' files.

    Args:
        parts: The run.
        snapshot: Rank 0's.
        partial: The folder that the ranks have filled.
        files: What each of them wrote.
        parent: Path, uuid and datasets of the checkpoint that the run started from.
        sealing: What encrypts the checkpoint.

    Returns:
        The folder ``checkpoints/step-N``.
    """
    parameters, records = merge_rank_files(parts.shapes, [file.pieces for file in files])
    sealed = dict(file.sealed for file in files if file.sealed is not None)
    tokenizer = _add_tokenizer(parts, partial, records, sealing=sealing, sealed=sealed)
    manifest = CheckpointManifest(
        uuid=str(uuid.uuid4()),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        producer={"name": "mds-train", "version": importlib.metadata.version("mds-train")},
        step=snapshot.state.iteration,
        counters=snapshot.state.counters(),
        model=_model_record(parts),
        parameters=parameters,
        files=records,
        optimizer=dict(snapshot.optimizer),
        schedule=dataclasses.asdict(parts.schedule),
        # Every stream of numbers is a function of the seed, the sample and the place in the model,
        # so there is no state of generators to keep.
        rng={"seed": parts.config.train.seed, "ranks": []},
        data=_data_record(parts, snapshot.state),
        config=parts.config.as_dict(),
        parallel=parts.degrees,
        tokenizer=tokenizer,
        parent=None if parent is None else {key: parent[key] for key in ("path", "uuid")},
        provenance=provenance_record(parts, parent=parent),
    )
    root = parts.checkpoints
    if sealing is None:
        return commit.publish(partial, manifest, root=root, existing="replace")
    return sealing.publish(partial, manifest, sealed=sealed, root=root, existing="replace")


def _model_record(parts: Parts) -> ModelRecord:
    config = parts.config.model
    padded = None
    if config.legacy_vocab_softmax:
        padded = config.padded_vocab_size(parts.groups.tp_size)
    return ModelRecord(
        family=config.family,
        config=dataclasses.replace(config, legacy_vocab_softmax=False).core().record(),
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_embeddings,
        padded_vocab_size=padded,
    )


def _data_record(parts: Parts, state: TrainState) -> dict[str, Any]:
    data = parts.config.data
    return {
        "sampler": {
            "consumed_samples": state.consumed_samples,
            "seed": parts.config.train.seed,
            "seq_length": data.seq_length,
            "split": data.split,
            "order": data.order,
            "weights": list(data.weights),
            "fingerprints": parts.reader.fingerprints(),
            **kind_of_samples(parts.config),
        },
        "stores": [
            {
                "path": path,
                "uuid": store.manifest.uuid,
                "revision": store.manifest.revision,
            }
            for path, store in zip(data.paths, parts.stores.training, strict=True)
        ],
    }


def _add_tokenizer(
    parts: Parts,
    partial: Path,
    records: dict[str, FileRecord],
    *,
    sealing: SealedSave | None,
    sealed: dict[str, FileRecord],
) -> dict[str, str] | None:
    """Let the store's tokenizer travel with the weights, where it is one file of that kind."""
    store = parts.stores.training[0]
    record = store.manifest.tokenizer
    if record is None or Path(record.file).name != TOKENIZER:
        return None
    if store.is_encrypted:  # its plain copy would lie beside the weights
        return None
    data = (Path(store.path) / record.file).read_bytes()
    if sealing is None:
        records[TOKENIZER] = add_file(partial, TOKENIZER, data)
    else:
        place = sealing.place(TOKENIZER)
        disk = SealingOperations(place)
        records[TOKENIZER] = add_file(partial, TOKENIZER, data, operations=disk)
        sealed[place.name] = disk.record
    return {"kind": record.kind, "file": TOKENIZER, "sha256": records[TOKENIZER].sha256}
