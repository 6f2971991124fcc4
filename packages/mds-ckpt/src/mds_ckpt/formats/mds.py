"""The mds format: our own checkpoints, written piece by piece by ranks and read on any layout.

``docs/formats/checkpoint.md`` is the law. Writing a checkpoint takes four steps::

    partial = commit.stage(root, step)                         # rank 0, tells the others
    rank_file = write_rank_file(partial, rank, pieces)         # every rank
    parameters, files = merge_rank_files(shapes, rank_files)   # rank 0, after gathering
    commit.publish(partial, CheckpointManifest(...), root=root)
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mds_ckpt.checkpoint import Checkpoint, LazyTensor, PiecedTensor, StoredPiece
from mds_ckpt.checks import Problem
from mds_ckpt.commit import digest, find_latest, read_manifest, step_folders
from mds_ckpt.errors import RejectedError, SealedError
from mds_ckpt.files.file_operations import REAL, FileOperations, write_file
from mds_ckpt.files.regular_file import RegularFile
from mds_ckpt.files.safetensors_file import (
    SafetensorsFile,
    SafetensorsWriter,
    StoredTensor,
    TensorSpec,
    WrittenFile,
)
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileRecord,
    ParameterRecord,
    PieceRecord,
    StateRecord,
    from_json,
)
from mds_ckpt.plan import Options, Plan
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.tensors.box import Box, Range, coverage_fault, extents
from mds_ckpt.tensors.dtype import ITEM_SIZES, dtype_name

if TYPE_CHECKING:
    import numpy as np

    from mds_ckpt.encryption.keys import KeySource

    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class LazyArray:
    """An array that is fetched when it is written, such as one that lies on an accelerator."""

    shape: tuple[int, ...]
    dtype: str
    """By safetensors' name."""
    load: Callable[[], Array]


class Piece(NamedTuple):
    """What one rank writes of one state of one parameter.

    A plain tuple in this order does as well.
    """

    parameter: str
    state: str
    box: Box
    flat: Range | None
    array: Array | LazyArray
    """Extents of ``box``, or 1-D with the elements of ``flat``."""


class RankPiece(NamedTuple):
    """A piece that was written, and what of."""

    parameter: str
    state: str
    dtype: str
    record: PieceRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """What one rank wrote. Plain data: it can be pickled and gathered."""

    name: str
    record: FileRecord
    pieces: tuple[RankPiece, ...]
    extra_keys: tuple[str, ...] = field(default=())


def rank_file_name(rank: int) -> str:
    """What the file of a rank is called."""
    return f"rank-{rank:05d}.safetensors"


def write_rank_file(
    folder: Path,
    rank: int,
    pieces: Iterable[Piece | tuple[str, str, Box, Range | None, Any]],
    *,
    extra: Mapping[str, Array] | None = None,
    operations: FileOperations = REAL,
) -> RankFile:
    """Write and fsync ``rank-NNNNN.safetensors`` with this rank's pieces.

    Args:
        folder: The partial folder from ``commit.stage``.
        rank: This rank's number.
        pieces: Each with the box of the global tensor that it covers, and its array. Ranks together
            cover each state exactly once; replicas are written by one of them.
        extra: Tensors that belong to no parameter, such as the state of a generator.
        operations: The disk.

    Returns:
        What was written, for :func:`merge_rank_files`.
    """
    listed = [Piece(*piece) for piece in pieces]
    counts: Counter[tuple[str, str]] = Counter()
    keyed: list[tuple[TensorSpec, Piece | None, Array | LazyArray]] = []
    for piece in listed:
        number = counts[piece.parameter, piece.state]
        counts[piece.parameter, piece.state] += 1
        keyed.append((_spec(piece, number), piece, piece.array))
    for key, array in (extra or {}).items():
        keyed.append((TensorSpec(key, dtype_name(array.dtype), array.shape), None, array))
    # Wide types first, so that every tensor is aligned to its element size.
    keyed.sort(key=lambda item: -ITEM_SIZES[item[0].dtype])
    name = rank_file_name(rank)
    with SafetensorsWriter(
        folder / name, [spec for spec, _, _ in keyed], operations=operations
    ) as writer:
        for spec, _, source in keyed:
            writer.write(spec.name, source.load() if isinstance(source, LazyArray) else source)
    written = writer.result
    return RankFile(
        name=name,
        record=FileRecord(size=written.size, sha256=written.sha256),
        pieces=tuple(
            RankPiece(piece.parameter, piece.state, spec.dtype, _record(piece, spec, name, written))
            for spec, piece, _ in keyed
            if piece is not None
        ),
        extra_keys=tuple(extra or {}),
    )


def _spec(piece: Piece, number: int) -> TensorSpec:
    array = piece.array
    dtype = array.dtype if isinstance(array, LazyArray) else dtype_name(array.dtype)
    expected = extents(piece.box) if piece.flat is None else (piece.flat[1] - piece.flat[0],)
    if tuple(array.shape) != expected:
        raise ValueError(
            f"{piece.state} of '{piece.parameter}': box {piece.box} with flat range {piece.flat} "
            f"needs an array of shape {list(expected)} and {list(array.shape)} was given"
        )
    return TensorSpec(f"{piece.parameter}/{piece.state}/{number}", dtype, expected)


def _record(piece: Piece, spec: TensorSpec, name: str, written: WrittenFile) -> PieceRecord:
    return PieceRecord(
        box=tuple((int(start), int(stop)) for start, stop in piece.box),
        flat=None if piece.flat is None else (int(piece.flat[0]), int(piece.flat[1])),
        file=name,
        key=spec.name,
        crc32c=written.crc32c[spec.name],
    )


def merge_rank_files(
    shapes: Mapping[str, Sequence[int]], rank_files: Iterable[RankFile]
) -> tuple[dict[str, ParameterRecord], dict[str, FileRecord]]:
    """The manifest's ``parameters`` and ``files`` from what the ranks wrote.

    Args:
        shapes: Global shape of every parameter, with the true vocabulary, in the model's order.
        rank_files: From :func:`write_rank_file`, of all ranks.

    Raises:
        ValueError: If the pieces of a state don't cover it exactly once, or types differ.
    """
    found: dict[str, dict[str, list[RankPiece]]] = {name: defaultdict(list) for name in shapes}
    files: dict[str, FileRecord] = {}
    for rank_file in rank_files:
        if rank_file.name in files:
            raise ValueError(f"two ranks wrote {rank_file.name}; give each its own number")
        files[rank_file.name] = rank_file.record
        for piece in rank_file.pieces:
            if piece.parameter not in found:
                raise ValueError(f"{rank_file.name} has '{piece.parameter}', which has no shape")
            found[piece.parameter][piece.state].append(piece)
    parameters = {
        name: ParameterRecord(
            shape=tuple(int(extent) for extent in shapes[name]),
            states={
                state: _merged(name, state, tuple(shapes[name]), pieces)
                for state, pieces in states.items()
            },
        )
        for name, states in found.items()
    }
    return parameters, files


def _merged(
    name: str, state: str, shape: tuple[int, ...], pieces: Sequence[RankPiece]
) -> StateRecord:
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) != 1:
        raise ValueError(f"{state} of '{name}' was written as {' and '.join(sorted(dtypes))}")
    fault = coverage_fault(shape, [(piece.record.box, piece.record.flat) for piece in pieces])
    if fault is not None:
        raise ValueError(f"{state} of '{name}' is not covered exactly once: {fault}")
    return StateRecord(dtype=dtypes.pop(), pieces=tuple(piece.record for piece in pieces))


def add_file(
    folder: Path, name: str, data: bytes, *, operations: FileOperations = REAL
) -> FileRecord:
    """Write and fsync a small file beside the rank files, such as ``tokenizer.json``."""
    write_file(folder / name, data, operations=operations)
    return FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())


# Reading -----------------------------------------------------------------------------------------

_SUFFIX = ".safetensors"


def detect(path: Path) -> bool:
    """Whether ``path`` is a checkpoint of ours, or a folder of them."""
    return _is_step(path) or (path.is_dir() and any(map(_is_step, step_folders(path))))


def _is_step(folder: Path) -> bool:
    """A folder with our manifest, or with ranks' files and a manifest that may be damaged."""
    manifest = folder / MANIFEST_NAME
    if manifest.is_symlink() or not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return b"mds-checkpoint" in file.read(4096) or any(folder.glob("rank-*.safetensors"))


def open_mds(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a checkpoint of ours; of a folder of checkpoints, the newest complete one."""
    refuse_read_options(options, "mds")
    options = options or ReadOptions()
    notes: list[str] = []
    folder = path
    if not (path / MANIFEST_NAME).exists():
        latest = find_latest(path, digests=False)
        reasons = [skipped.reason for skipped in latest.skipped]
        if latest.folder is None:
            raise RejectedError(
                path,
                f"it holds no complete checkpoint ({' '.join(reasons) or 'no step folder'})",
                remedy="name the folder of checkpoints or one step folder",
            )
        notes = [f"passed over: {reason}" for reason in reasons]
        folder = latest.folder
    if options.key is not None:
        from mds_ckpt.files.sealed_folder import is_sealed

        if is_sealed(folder):
            return _open_sealed(folder, options.key, options.expect, notes)
    manifest = read_manifest(folder)
    if options.expect is not None:
        _check_expected(folder / MANIFEST_NAME, options.expect)
    return _checkpoint(folder, manifest, notes)


def _check_expected(path: Path, expect: str) -> None:
    with RegularFile(path).open() as file:
        found = digest(file)
    if found != expect.lower():
        raise SealedError(
            path,
            f"it has the digest {found[:16]}..., and {expect[:16]}... was expected",
            remedy="restore the right one from a copy",
        )


def _open_sealed(folder: Path, key: KeySource, expect: str | None, notes: list[str]) -> Checkpoint:
    from mds_ckpt.files.sealed_folder import SealedFolder

    opened = SealedFolder(folder, key, expect=expect)
    path = folder / f"{MANIFEST_NAME} (sealed)"
    manifest = from_json(opened.contents.manifest, path=path)
    if manifest.files.keys() != opened.contents.files.keys():
        raise SealedError(
            folder,
            "the sealed files are not those that the manifest names",
            remedy="restore the checkpoint from a copy",
        )
    sealed = {name: opened.file(name, record.size) for name, record in manifest.files.items()}
    return _checkpoint(folder, manifest, notes, sealed=sealed)


def _checkpoint(
    folder: Path,
    manifest: CheckpointManifest,
    notes: list[str],
    *,
    sealed: Mapping[str, RegularFile] | None = None,
) -> Checkpoint:
    sealed = sealed or {}
    files = {name: SafetensorsFile(folder / name, file=sealed.get(name)) for name in manifest.files}
    states: dict[str, dict[str, LazyTensor]] = {"weight": {}}
    for name, parameter in manifest.parameters.items():
        for state, record in parameter.states.items():
            pieces = [
                StoredPiece(
                    piece.box,
                    piece.flat,
                    _stored(files[piece.file], piece, record.dtype, sealed=bool(sealed)),
                )
                for piece in record.pieces
            ]
            states.setdefault(state, {})[name] = PiecedTensor(
                name, parameter.shape, record.dtype, pieces=pieces
            )
    training = ("optimizer", "schedule", "rng", "data", "config")
    return Checkpoint(
        path=folder,
        format="mds",
        model=manifest.model,
        states=states,
        step=manifest.step,
        counters=manifest.counters,
        parallel=manifest.parallel,
        training={
            name: value for name in training if (value := getattr(manifest, name)) is not None
        },
        companions={
            name: folder / name
            for name in manifest.files
            if not name.endswith(_SUFFIX) and name not in sealed
        },
        sealed=sealed,
        origin=manifest.provenance.get("origin") or {},
        notes=tuple(notes),
        manifest=manifest,
    )


def _stored(
    file: SafetensorsFile, piece: PieceRecord, dtype: str, *, sealed: bool = False
) -> StoredTensor:
    """Where a piece lies. A sealed one needs no checksum, for which all of it would be read."""
    checksum = None if sealed else piece.crc32c
    shape = extents(piece.box) if piece.flat is None else (piece.flat[1] - piece.flat[0],)
    return StoredTensor(file, piece.key, dtype=dtype, shape=shape, checksum=checksum)


def check(checkpoint: Checkpoint, data: bool) -> Iterator[Problem]:  # noqa: FBT001
    """What is wrong with a checkpoint of ours: missing, truncated or changed files and tensors."""
    manifest, folder = checkpoint.manifest, checkpoint.path
    assert manifest is not None
    if checkpoint.sealed:
        yield from check_sealed(folder, checkpoint.sealed, manifest.files, data=data)
        return
    for name, record in manifest.files.items():
        fault = _file_fault(RegularFile(folder / name), record, data=data)
        if fault is None and not data:
            continue
        hurt = list(_hurt_tensors(folder, manifest, name, read=fault is not None)) if data else []
        yield from hurt or ([] if fault is None else [Problem(file=name, reason=fault)])
    if data and not manifest.has_digest and manifest.producer["name"].startswith("mds-"):
        yield Problem(file=MANIFEST_NAME, reason="it lost the digest of itself that it was given")


def check_sealed(
    folder: Path,
    sealed: Mapping[str, RegularFile],
    files: Mapping[str, FileRecord],
    *,
    data: bool,
) -> Iterator[Problem]:
    """What is wrong with an encrypted checkpoint: its sealed bytes, then what is in them."""
    problems = list(check_envelope(folder, data=data))
    yield from problems
    hurt = {problem.file for problem in problems}
    for name, file in sealed.items():
        if file.path.name not in hurt:
            fault = _file_fault(file, files[name], data=data)
            if fault is not None:
                yield Problem(file=f"{file.path.name} ({name})", reason=fault)


def check_envelope(folder: Path, *, data: bool) -> Iterator[Problem]:
    """What is wrong with the sealed bytes of an encrypted checkpoint; takes no key."""
    from mds_ckpt.files.sealed_folder import read_envelope

    for name, (size, sha256) in read_envelope(folder).files.items():
        record = FileRecord(size=size, sha256=sha256)
        fault = _file_fault(RegularFile(folder / name), record, data=data)
        if fault is not None:
            yield Problem(file=name, reason=fault)


def _file_fault(regular: RegularFile, record: FileRecord, *, data: bool) -> str | None:
    try:
        with regular.open() as file:
            if file.size != record.size:
                return f"it has {file.size} bytes where the manifest says {record.size}"
            if data and digest(file) != record.sha256:
                return "its bytes don't have the digest that the manifest names"
    except RejectedError as error:
        return error.reason
    return None


def _hurt_tensors(
    folder: Path, manifest: CheckpointManifest, name: str, *, read: bool
) -> Iterator[Problem]:
    """The tensors that a file does not hold as promised; with ``read``, checksums are compared."""
    file = SafetensorsFile(folder / name)
    for parameter, record in manifest.parameters.items():
        for state, part in record.states.items():
            for piece in part.pieces:
                if piece.file != name:
                    continue
                try:
                    stored = _stored(file, piece, part.dtype)
                    stored.check() if read else stored.entry()
                except RejectedError as error:
                    if error.tensor is None:
                        return  # the header is damaged: the fault is the file's
                    yield Problem(file=name, tensor=f"{parameter} ({state})", reason=error.reason)


def _plan(checkpoint: Checkpoint, options: Options) -> Plan:
    from mds_ckpt.writers.mds import plan

    return plan(checkpoint, options)


FORMAT = Format(
    name="mds", title="mds checkpoint", detect=detect, open=open_mds, plan=_plan, check=check
)
