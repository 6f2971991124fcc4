"""Writers that no command runs by themselves, for the processes that trace commands.

main(["append", STORE]), main(["sealed-save", ROOT, RECIPIENT]), main(["adapter", MODEL, FOLDER]),
main(["unfinished", STORE])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mds_ckpt import commit, open_checkpoint
from mds_ckpt.adapter import Factors, WrittenAdapter
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_ckpt.protection.sealed_save import SealedSave, SealingOperations
from mds_data import StoreWriter
from mds_data.store.append import append_documents

SHAPE = (64, 32)
MODEL = ModelRecord(family="gpt", config={}, vocab_size=5, tied_embeddings=True)


def append(store: str) -> None:
    """Five documents more."""
    chance = np.random.default_rng(9)
    append_documents(store, [chance.integers(0, 64, 40) for _ in range(5)])


def begun(store: str, *, resume: bool = False) -> StoreWriter:
    """A writer of a store in small chunks."""
    return StoreWriter(store, vocab_size=64, eod_id=0, chunk_tokens=64, resume=resume)


def documents_of_unfinished() -> NDArray[np.int64]:
    """Eight documents of forty tokens."""
    return np.random.default_rng(9).integers(0, 64, (8, 40))


def unfinished(store: str) -> None:
    """Begin a store, and keep what is there for a later process."""
    with begun(store) as writer:
        for document in documents_of_unfinished():
            writer.add(document)
        writer.checkpoint({"reached": 8})


def sealed_save(root: str, recipient: str) -> None:
    """The next step, encrypted."""
    place, step = Path(root), 2 if (Path(root) / "step-1").exists() else 1
    sealing = SealedSave(recipients=[recipient])
    with commit.lock(place):
        partial_folder = commit.stage(place, step)
        own = sealing.place("rank-00000.safetensors")
        disk = SealingOperations(own)
        array = np.random.default_rng(step).normal(size=SHAPE).astype("<f4")
        box = tuple((0, extent) for extent in SHAPE)
        pieces = [("w", "weight", box, None, array)]
        written = write_rank_file(partial_folder, 0, pieces, operations=disk)
        parameters, files = merge_rank_files({"w": SHAPE}, [written])
        manifest = CheckpointManifest(
            producer={"name": "mds-train", "version": "0"},
            step=step,
            counters={"iteration": step},
            model=MODEL,
            parameters=parameters,
            files=files,
        )
        sealing.publish(partial_folder, manifest, sealed={own.name: disk.record}, root=place)


def adapter(checkpoint: str, folder: str, scale: float = 2.0) -> None:
    """Low-rank factors of the attention's weights."""
    base = open_checkpoint(checkpoint)
    assert base.model is not None
    factors = {
        name: Factors(
            partial(np.full, (2, tensor.shape[1]), scale, "<f4"),
            partial(np.ones, (tensor.shape[0], 2), "<f4"),
            scale / 2,
        )
        for name, tensor in base.tensors.items()
        if name.endswith("linear_qkv.weight")
    }
    WrittenAdapter(
        model=base.model, factors=factors, rank=2, alpha=scale, dropout=0.0, base="somewhere"
    ).write(Path(folder))


WRITERS: Mapping[str, Callable[..., None]] = {
    "append": append,
    "unfinished": unfinished,
    "sealed-save": sealed_save,
    "adapter": adapter,
}


def main(argv: Sequence[str]) -> int:
    """Run a writer as a command would be run."""
    WRITERS[argv[0]](*argv[1:])
    return 0
