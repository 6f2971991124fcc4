"""Any checkpoint written as an mds checkpoint: whole tensors, every state, a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt import companions
from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.formats.mds import LazyArray, Piece, add_file, merge_rank_files, write_rank_file
from mds_ckpt.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    ModelRecord,
    ParameterRecord,
    to_json,
)
from mds_ckpt.plan import Loss, Options, Plan, cast, refuse_layout, target_dtype
from mds_ckpt.tensors.box import whole
from mds_ckpt.tensors.dtype import ITEM_SIZES

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

FILE_BYTES = 5_000_000_000
_VOCABULARY = frozenset(
    {"embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"}
)


def plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """What writing ``checkpoint`` in our format takes. Reads no tensor data."""
    refuse_layout(options, "mds")
    model = _model(checkpoint, options.vocab_size)
    states = {
        state: tensors
        for state, tensors in checkpoint.states.items()
        if state == "weight" or not options.weights_only
    }
    losses: list[Loss] = []
    pieces = [
        _piece(state, tensor, model, options, losses)
        for state, tensors in states.items()
        for tensor in tensors.values()
    ]
    groups = _groups(pieces, options.shard_bytes or FILE_BYTES)
    dropped = {
        (state, name): "only weights were asked for"
        for state, tensors in checkpoint.states.items()
        if state not in states
        for name in tensors
    }

    return Plan(
        used=[(state, name) for state, tensors in states.items() for name in tensors],
        dropped=dropped,
        num_targets=len(pieces),
        nbytes=sum(_nbytes(piece) for piece in pieces) + 4096 * len(pieces),
        write=partial(_write, checkpoint, model, options, groups, losses),
        notes=_notes(checkpoint),
    )


def _write(
    checkpoint: Checkpoint,
    model: ModelRecord,
    options: Options,
    groups: Sequence[Sequence[Piece]],
    losses: list[Loss],
    folder: Path,
    operations: FileOperations,
) -> Sequence[Loss]:
    """Fill the folder, one file a group of pieces; returns what casts lost, found by the pieces."""
    losses.clear()
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        jobs = [
            pool.submit(write_rank_file, folder, number, group, operations=operations)
            for number, group in enumerate(groups)
        ]
        rank_files = [job.result() for job in jobs]
    shapes = {
        piece.parameter: tuple(stop for _, stop in piece.box) for group in groups for piece in group
    }
    parameters, files = merge_rank_files(shapes, rank_files)
    for name, path in companions.beside(checkpoint.companions, checkpoint.sealed).items():
        if name in companions.NAMES:
            data = companions.read(path)
            files[name] = add_file(folder, name, data, operations=operations)
    manifest = _manifest(checkpoint, model, parameters, weights_only=options.weights_only)
    manifest = replace(manifest, files=files)
    write_file(folder / MANIFEST_NAME, to_json(manifest), operations=operations)
    return losses


def _model(checkpoint: Checkpoint, vocab_size: int | None) -> ModelRecord:
    model = checkpoint.model
    rows = model.padded_vocab_size or model.vocab_size
    if vocab_size is None:
        return model
    if not 1 <= vocab_size <= rows:
        raise RejectedError(
            checkpoint.path,
            f"the vocabulary was given as {vocab_size} and the embedding has {rows} rows",
            remedy=f"give --vocab-size from 1 to {rows}",
        )
    config = {**model.config, "vocab_size": vocab_size}
    return replace(model, vocab_size=vocab_size, padded_vocab_size=None, config=config)


def _piece(
    state: str, tensor: LazyTensor, model: ModelRecord, options: Options, losses: list[Loss]
) -> Piece:
    """A whole tensor as one piece, read and cast when it is written."""
    shape = tensor.shape
    if tensor.name in _VOCABULARY:
        rows = model.padded_vocab_size or model.vocab_size
        shape = (min(rows, shape[0]), *shape[1:])
    dtype = target_dtype(tensor.dtype, options.dtype) if state == "weight" else tensor.dtype

    def load() -> Array:
        return cast(tensor.read(whole(shape)), dtype, name=tensor.name, losses=losses)

    return Piece(tensor.name, state, whole(shape), None, LazyArray(shape, dtype, load))


def _nbytes(piece: Piece) -> int:
    count = ITEM_SIZES[piece.array.dtype] if isinstance(piece.array, LazyArray) else 0
    for _, stop in piece.box:
        count *= stop
    return count


def _groups(pieces: Sequence[Piece], file_bytes: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        if groups[-1] and filled + _nbytes(piece) > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(piece)
        filled += _nbytes(piece)
    return groups


def _manifest(
    checkpoint: Checkpoint,
    model: ModelRecord,
    parameters: Mapping[str, ParameterRecord],
    *,
    weights_only: bool,
) -> CheckpointManifest:
    source = checkpoint.manifest
    training: Mapping[str, Any] = {} if weights_only else checkpoint.training
    provenance = dict(source.provenance) if source is not None else {}
    provenance |= {"converted_from": checkpoint.format, "origin": dict(checkpoint.origin)}
    return CheckpointManifest(
        producer={"name": "mds-ckpt", "version": version("mds-ckpt")},
        step=0 if weights_only else checkpoint.step or 0,
        counters={} if weights_only else checkpoint.counters,
        model=model,
        parameters=parameters,
        files={},
        optimizer=training.get("optimizer"),
        schedule=training.get("schedule"),
        data=training.get("data"),
        config=training.get("config") or {},
        parallel=checkpoint.parallel,
        tokenizer=None if source is None else source.tokenizer,
        parent=None if source is None else {"path": str(checkpoint.path), "uuid": source.uuid},
        provenance=provenance,
    )


def _notes(checkpoint: Checkpoint) -> list[str]:
    if "rng" in checkpoint.training:
        return ["the state of random generators was left behind; it fits the writing ranks only"]
    return []
