"""The manifest of an mds checkpoint as frozen dataclasses, to and from strict JSON.

``docs/formats/checkpoint.md`` is the law; this module is its first table in Python. Numbers, names
and ranges are checked here; what needs the data files is checked by the reader.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mds_ckpt.errors import RejectedError, SealedError, UnsupportedError
from mds_ckpt.escape import printable
from mds_ckpt.files import strict_json
from mds_ckpt.files.regular_file import name_fault
from mds_ckpt.tensors.box import Box, Range, coverage_fault
from mds_ckpt.tensors.dtype import ITEM_SIZES

FORMAT = "mds-checkpoint"
FORMAT_VERSION = "1.0"
MANIFEST_NAME = "manifest.json"
SIZE_LIMIT = 256 << 20
LARGEST = 2**63
_DIGEST_MEMBER = "manifest_sha256"
_NO_DIGEST = "0" * 64


def _new_uuid() -> str:
    # Imported late: reading a manifest makes none, and the module takes as long as json.
    from uuid import uuid4

    return str(uuid4())


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """Where one piece of a state lies: a box of the global tensor, and a tensor in a file."""

    box: Box
    flat: Range | None = None
    """Only these elements of the box, in row-major order; None for the whole box."""
    file: str
    key: str
    crc32c: str
    """Over the stored bytes, 8 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord:
    """One tensor of a parameter's shape (``weight``, ``master``, ``exp_avg``) and its pieces."""

    dtype: str
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRecord:
    """A parameter's global shape, with the true vocabulary, and its states."""

    shape: tuple[int, ...]
    states: Mapping[str, StateRecord]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and digest of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRecord:
    """What the tensors are a model of."""

    family: str
    """``"gpt"`` and others, as mds-core names them."""
    config: Mapping[str, Any]
    """The fields of the model's configuration, by mds-core's names."""
    vocab_size: int
    """The true vocabulary."""
    tied_embeddings: bool
    padded_vocab_size: int | None = None
    """Rows that are stored, if padding rows were trained and are kept; else None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    """All members of ``manifest.json``; objects whose content is the trainer's stay mappings."""

    producer: Mapping[str, str]
    """``name`` and ``version`` of the package that wrote it."""
    step: int
    counters: Mapping[str, int]
    model: ModelRecord
    parameters: Mapping[str, ParameterRecord]
    files: Mapping[str, FileRecord]
    optimizer: Mapping[str, Any] | None = None
    schedule: Mapping[str, Any] | None = None
    rng: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] | None = None
    parent: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    encryption: Mapping[str, Any] | None = None
    requires: tuple[str, ...] = ()
    format_version: str = FORMAT_VERSION
    uuid: str = field(default_factory=_new_uuid)
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    """RFC 3339, UTC."""
    has_digest: bool = False
    """Whether the file that this was read from carried a digest of itself."""


def to_json(manifest: CheckpointManifest) -> bytes:
    """The bytes of ``manifest.json``, with a digest of themselves as last member.

    ``manifest_sha256`` is over these very bytes with its own 64 digits written as zeros.
    """
    members: dict[str, Any] = {"format": FORMAT}
    for name in ("format_version", "requires", "uuid", "created", "producer", "step", "counters"):
        members[name] = getattr(manifest, name)
    model = manifest.model
    members["model"] = {name: getattr(model, name) for name in ModelRecord.__slots__}
    members["parameters"] = {
        name: {
            "shape": record.shape,
            "states": {state: _state_members(part) for state, part in record.states.items()},
        }
        for name, record in manifest.parameters.items()
    }
    for name in _OBJECTS_OR_NULL + _OBJECTS:
        members[name] = getattr(manifest, name)
    members["files"] = {
        name: {"size": record.size, "sha256": record.sha256}
        for name, record in manifest.files.items()
    }
    members[_DIGEST_MEMBER] = _NO_DIGEST
    text = json.dumps(members, ensure_ascii=False, allow_nan=False, indent=1, default=_plain)
    blank = text.encode()
    digest = hashlib.sha256(blank).hexdigest()
    at = blank.rindex(_NO_DIGEST.encode())
    return blank[:at] + digest.encode() + blank[at + 64 :]


_OBJECTS_OR_NULL = (
    "optimizer",
    "schedule",
    "rng",
    "data",
    "tokenizer",
    "parent",
    "encryption",
)
_OBJECTS = ("config", "parallel", "provenance")


def _state_members(state: StateRecord) -> dict[str, Any]:
    pieces = []
    for piece in state.pieces:
        members: dict[str, Any] = {"box": piece.box}
        if piece.flat is not None:
            members["flat"] = piece.flat
        pieces.append(members | {"file": piece.file, "key": piece.key, "crc32c": piece.crc32c})
    return {"dtype": state.dtype, "pieces": pieces}


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(
        f"the manifest holds a {type(value).__name__}, which is not JSON; "
        f"convert it to numbers, strings, lists and dictionaries"
    )


def from_json(data: bytes, *, path: str | Path) -> CheckpointManifest:
    """The manifest in ``data``, checked.

    Args:
        data: Content of ``manifest.json``.
        path: Where it was read, for messages.

    Raises:
        RejectedError: If the format's rules are broken.
        UnsupportedError: For another major version or a feature that we don't know.
    """
    if len(data) > SIZE_LIMIT:
        raise _rejected(path, f"it has {len(data)} bytes and at most {SIZE_LIMIT} are read")
    try:
        members = strict_json.parse(data)
        _check_version(members, path=path)
        manifest = _manifest(members, has_digest=_check_digest(members, data))
    except (strict_json.JsonError, _ManifestError) as fault:
        raise _rejected(path, str(fault)) from None
    return manifest


class _ManifestError(ValueError):
    """A member breaks the format; the message names it."""


def _rejected(path: str | Path, reason: str) -> RejectedError:
    return RejectedError(
        path,
        f"this is not a valid mds manifest, {reason}",
        remedy="use another checkpoint, or copy this one again from where it was written",
    )


def _check_version(members: Any, *, path: str | Path) -> None:
    if not isinstance(members, dict) or members.get("format") != FORMAT:
        raise _ManifestError(f"member 'format' is not {FORMAT!r}")
    version = _text(members, "format_version")
    major, _, _ = version.partition(".")
    requires = _strings(members, "requires")
    if "encryption/1" in requires:
        raise SealedError(
            path,
            "the checkpoint is encrypted, and no key was given",
            remedy="give it (--identity, --passphrase-file, --key-command; key= in Python) where "
            "the command takes one, or write a plain copy with mds-ckpt decrypt",
        )
    ours = FORMAT_VERSION.partition(".")[0]
    if not re.fullmatch(r"\d{1,4}\.\d{1,4}", version):
        raise _ManifestError(f"format_version {printable(version)!r} is not MAJOR.MINOR")
    if major != ours or requires:
        asked = f"version {version}" if major != ours else f"features {printable(str(requires))}"
        raise UnsupportedError(
            path,
            f"it asks for {asked} and this mds-ckpt reads version {ours} without features",
            remedy="read it with the mds-ckpt release that its producer names",
        )


def _check_digest(members: Mapping[str, Any], data: bytes) -> bool:
    if _DIGEST_MEMBER not in members:
        return False
    digest = _text(members, _DIGEST_MEMBER)
    at = data.rfind(digest.encode())
    blank = data[:at] + _NO_DIGEST.encode() + data[at + len(digest) :]
    if at < 0 or hashlib.sha256(blank).hexdigest() != digest:
        raise _ManifestError("its bytes don't have the digest that it names for itself")
    return True


def _manifest(members: Mapping[str, Any], *, has_digest: bool) -> CheckpointManifest:
    files = {
        _plain_name(name): _file(name, value) for name, value in _object(members, "files").items()
    }
    parameters = {
        name: _parameter(name, value, files=files)
        for name, value in _object(members, "parameters").items()
    }
    counters = _object(members, "counters")
    for name in counters:
        _integer(counters, name, what="counters.")
    objects = {
        name: _object(members, name) if members.get(name) is not None else None
        for name in _OBJECTS_OR_NULL
    }
    if objects["encryption"] is not None:
        raise _ManifestError("member 'encryption' stands there without being required")
    return CheckpointManifest(
        format_version=_text(members, "format_version"),
        uuid=_text(members, "uuid"),
        created=_text(members, "created"),
        producer=_producer(members),
        step=_integer(members, "step"),
        counters=counters,
        model=_model(_object(members, "model")),
        parameters=parameters,
        files=files,
        config=_object(members, "config"),
        parallel=_object(members, "parallel"),
        provenance=_object(members, "provenance"),
        optimizer=objects["optimizer"],
        schedule=objects["schedule"],
        rng=objects["rng"],
        data=objects["data"],
        tokenizer=objects["tokenizer"],
        parent=objects["parent"],
        has_digest=has_digest,
    )


def _producer(members: Mapping[str, Any]) -> dict[str, str]:
    producer = _object(members, "producer")
    return {name: _text(producer, name) for name in ("name", "version")}


def _model(members: Mapping[str, Any]) -> ModelRecord:
    padded = members.get("padded_vocab_size")
    tied = members.get("tied_embeddings")
    if not isinstance(tied, bool):
        raise _ManifestError("member 'model.tied_embeddings' is not true or false")
    return ModelRecord(
        family=_text(members, "family"),
        config=_object(members, "config"),
        vocab_size=_integer(members, "vocab_size", what="model."),
        tied_embeddings=tied,
        padded_vocab_size=None if padded is None else _integer(members, "padded_vocab_size"),
    )


def _file(name: str, value: Any) -> FileRecord:
    if not isinstance(value, dict):
        raise _ManifestError(f"file '{printable(name)}' is not an object")
    size = _integer(value, "size", what=f"files.{name}.")
    return FileRecord(size=size, sha256=_hex(value, "sha256", digits=64))


def _parameter(name: str, value: Any, *, files: Mapping[str, FileRecord]) -> ParameterRecord:
    try:
        if not isinstance(value, dict):
            raise _ManifestError("it is not an object")
        shape = tuple(_integers(value.get("shape"), what="shape"))
        if math.prod(extent for extent in shape if extent) >= LARGEST:
            raise _ManifestError(f"the product of its shape {list(shape)} overflows 2**63")
        states = {
            state: _state(part, shape=shape, files=files)
            for state, part in _object(value, "states").items()
        }
    except ValueError as fault:
        raise _ManifestError(f"parameter '{printable(name)}': {fault}") from None
    return ParameterRecord(shape=shape, states=states)


def _state(value: Any, *, shape: tuple[int, ...], files: Mapping[str, FileRecord]) -> StateRecord:
    if not isinstance(value, dict) or not isinstance(value.get("pieces"), list):
        raise _ManifestError("a state is not an object with a list 'pieces'")
    dtype = _text(value, "dtype")
    if dtype not in ITEM_SIZES:
        raise _ManifestError(f"dtype {printable(dtype)!r} is not known")
    pieces = tuple(_piece(piece) for piece in value["pieces"])
    for piece in pieces:
        if piece.file not in files:
            raise _ManifestError(f"file '{printable(piece.file)}' is not listed under 'files'")
    fault = coverage_fault(shape, [(piece.box, piece.flat) for piece in pieces])
    if fault is not None:
        raise _ManifestError(fault)
    return StateRecord(dtype=dtype, pieces=pieces)


def _piece(value: Any) -> PieceRecord:
    if not isinstance(value, dict) or not isinstance(value.get("box"), list):
        raise _ManifestError("a piece is not an object with a list 'box'")
    flat = value.get("flat")
    return PieceRecord(
        box=tuple(_range(pair, what="box") for pair in value["box"]),
        flat=None if flat is None else _range(flat, what="flat"),
        file=_plain_name(_text(value, "file")),
        key=_text(value, "key"),
        crc32c=_hex(value, "crc32c", digits=8),
    )


def _plain_name(name: str) -> str:
    fault = name_fault(name)
    if fault is not None or name == MANIFEST_NAME:
        raise _ManifestError(f"file name '{printable(name)}' {fault or 'is that of the manifest'}")
    return name


def _typed(kind: type, word: str) -> Callable[[Mapping[str, Any], str], Any]:
    def get(members: Mapping[str, Any], name: str) -> Any:
        value = members.get(name)
        if not isinstance(value, kind):
            raise _ManifestError(f"member '{printable(name)}' is not {word}")
        return value

    return get


_text: Callable[[Mapping[str, Any], str], str] = _typed(str, "a string")
_object: Callable[[Mapping[str, Any], str], dict[str, Any]] = _typed(dict, "an object")


def _strings(members: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = members.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _ManifestError(f"member '{name}' is not a list of strings")
    return tuple(value)


def _integer(members: Mapping[str, Any], name: str, *, what: str = "") -> int:
    value = members.get(name)
    if type(value) is not int or not 0 <= value < LARGEST:
        raise _ManifestError(
            f"member '{printable(what + name)}' is not a whole number from 0 to 2**63"
        )
    return value


def _integers(value: Any, *, what: str) -> list[int]:
    if not isinstance(value, list) or len(value) > 64:
        raise _ManifestError(f"'{what}' is not a list of at most 64 numbers")
    if not all(type(item) is int and 0 <= item < LARGEST for item in value):
        raise _ManifestError(f"'{what}' holds something else than whole numbers from 0 to 2**63")
    return value


def _range(value: Any, *, what: str) -> Range:
    if not isinstance(value, list) or len(value) != 2:
        raise _ManifestError(f"'{what}' is not made of pairs [start, stop]")
    start, stop = _integers(value, what=what)
    if start > stop:
        raise _ManifestError(f"'{what}' has a range that ends before it starts")
    return start, stop


def _hex(members: Mapping[str, Any], name: str, *, digits: int) -> str:
    value = _text(members, name)
    if not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise _ManifestError(f"member '{name}' is not {digits} lower-case hex digits")
    return value
