"""Megatron-core's ``torch_dist`` checkpoints, and plain ones of torch's distributed checkpointing.

A folder with ``.metadata``, ``__R_I.distcp`` files, and with Megatron ``metadata.json`` and
``common.pt``. The parts: ``metadata`` reads what is where, ``record`` the data files, ``model``
finds the configuration, ``reader`` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.checks import Problem
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.formats import Format
from mds_ckpt.plan import Options, Plan, refuse_layout
from mds_ckpt.read_options import ReadOptions

TRACKER = "latest_checkpointed_iteration.txt"
MARKER = "metadata.json"
INTEGRITY = "integrity.json"


def _is_folder(path: Path) -> bool:
    return (path / ".metadata").is_file() or (path / ".metadata").is_symlink()


def find(path: Path) -> Path | None:
    """The folder with ``.metadata``, at ``path`` or where the tracker file points."""
    from mds_ckpt.files.regular_file import read_whole

    if not path.is_dir():
        return None
    if _is_folder(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file() or tracker.is_symlink():
        return None
    text = read_whole(tracker, limit=4096).decode("utf-8", "replace").strip()
    if text != "release" and not (text.isascii() and text.isdecimal() and len(text) <= 15):
        return None
    folder = path / ("release" if text == "release" else f"iter_{int(text):07d}")
    return folder if not folder.is_symlink() and _is_folder(folder) else None


def detect(path: Path) -> bool:
    """Whether ``path`` holds a distributed checkpoint of torch."""
    from mds_ckpt.formats import torchtitan

    try:
        return find(path) is not None and not torchtitan.detect(path)
    except RejectedError:
        return False


def open_torch_dist(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a distributed checkpoint, or the one that the tracker file names."""
    from mds_ckpt.companions import read_json
    from mds_ckpt.formats.torch_dist.reader import read_torch_dist

    folder = find(path)
    if folder is None:
        raise RejectedError(
            path, "it holds no .metadata", remedy="name the folder with the .distcp files"
        )
    marker = folder / MARKER
    if marker.exists() or marker.is_symlink():
        backend = read_json(marker).get("sharded_backend")
        if backend != "torch_dist":
            raise UnsupportedError(
                marker,
                f"its backend is {str(backend)[:80]!r}",
                remedy="save it with --dist-ckpt-format torch_dist",
            )
    return read_torch_dist(folder, options)


def check(checkpoint: Checkpoint, data: bool) -> Iterator[Problem]:  # noqa: FBT001
    """Digests where they are stored; with data also every record and every object."""
    if not data:
        return
    yield from _differing_files(checkpoint.path)
    yield from _damaged_records(checkpoint.path)


def _differing_files(folder: Path) -> Iterator[Problem]:
    from mds_ckpt.companions import read_json
    from mds_ckpt.files.regular_file import name_fault

    path = folder / INTEGRITY
    if not path.exists() and not path.is_symlink():
        return
    members = read_json(path)
    files = members.get("files")
    if members.get("algorithm") != "sha256" or not isinstance(files, dict):
        yield Problem(file=INTEGRITY, reason="it does not hold SHA-256 digests of files")
        return
    for name, digest in files.items():
        if name_fault(name) is not None:
            yield Problem(file=INTEGRITY, reason=f"it names '{name[:200]}', which is not a file")
        elif (fault := _digest_fault(folder / name, digest)) is not None:
            yield Problem(file=name, reason=fault)


def _digest_fault(path: Path, expected: object) -> str | None:
    import hashlib

    from mds_ckpt.files.regular_file import RegularFile

    found, at = hashlib.sha256(), 0
    try:
        with RegularFile(path, cache_links=True).open() as file:
            while at < file.size:
                block = file.read(at, min(1 << 22, file.size - at))
                found.update(block)
                at += len(block)
    except RejectedError as error:
        return error.reason
    return None if found.hexdigest() == expected else f"it differs from its digest in {INTEGRITY}"


def _damaged_records(folder: Path) -> Iterator[Problem]:
    from mds_ckpt.formats.torch_dist.metadata import read_metadata
    from mds_ckpt.formats.torch_dist.reader import Sources
    from mds_ckpt.formats.torch_dist.record import read_object

    metadata, sources = read_metadata(folder), Sources()
    for tensor in metadata.tensors.values():
        for source in sources.of(tensor):
            try:
                source.check()
            except RejectedError as error:
                yield Problem(file=Path(error.path).name, tensor=tensor.name, reason=error.reason)
    for name, place in metadata.objects.items():
        try:
            read_object(place, name)
        except RejectedError as error:
            yield Problem(file=place.path.name, tensor=name, reason=error.reason)


def plan_torch_dist(checkpoint: Checkpoint, options: Options) -> Plan:
    """How to write a checkpoint's weights; it has no layout."""
    from mds_ckpt.writers.torch_dist import plan

    refuse_layout(replace(options, divisible_by=None), "torch_dist")
    return plan(checkpoint, options)


FORMAT = Format(
    name="torch_dist",
    title="Megatron-core distributed checkpoint",
    detect=detect,
    open=open_torch_dist,
    plan=plan_torch_dist,
    check=check,
    answers=(
        "num_attention_heads",
        "activation",
        "position_embedding",
        "rope_theta",
        "rope_percent",
        "max_position_embeddings",
        "norm_epsilon",
        "init_std",
        "moe_topk",
    ),
)
