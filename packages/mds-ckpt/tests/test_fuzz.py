"""Damage of every kind, behind every layer of every format: refused in one sentence, or read.

Files are taken apart, one part is changed, and they are put together again with right sizes and
checksums, so that the fault reaches the reader behind. ``MDS_FUZZ=N`` tries N changes a format.
"""

from __future__ import annotations

import json
import os
import pickletools
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from ckpt_samples import arrays, model, save
from deepspeed_samples import Sample

from mds_ckpt import convert
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.zip_writer import ZipWriter
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.scan import scan_path

EXAMPLES = int(os.environ.get("MDS_FUZZ", "0")) or 15
FORMATS = (
    *("deepspeed", "stage3", "universal", "megatron", "torch_dist", "mds", "hf"),
    *("experts", "core_experts"),
)
NUMBERS = (0, 1, 2, 3, 255, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1)
WORDS = ("", "..", "/etc/passwd", "data.pkl", "os", "system", "\x00", "é" * 40, "weight", "F32")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small, right checkpoint of every format."""
    root = tmp_path_factory.mktemp("originals")
    small = {"layers": 1, "hidden": 4, "heads": 2, "groups": 1, "width": 4, "vocab": 5}
    source = Sample(**small, tp=1, dp=2).write(root / "deepspeed")
    for name, target, more in (
        ("stage3", "deepspeed", {"zero_stage": 3, "dp": 2}),
        ("universal", "universal", {}),
        ("megatron", "megatron", {}),
        ("torch_dist", "mcore", {}),
    ):
        convert(source, root / name, to=target, **more)
    record = model("llama", num_layers=1, vocab_size=5)
    save(root / "mds", record, arrays(record))
    convert(root / "mds", root / "hf", to="hf")
    record = model("mixtral", vocab_size=5, num_experts=2)
    save(root / "mixtral", record, arrays(record))
    convert(root / "mixtral", root / "experts", to="deepspeed", pp=2)
    convert(root / "mixtral", root / "core_experts", to="mcore")
    return root


def torch_parts(raw: bytes) -> dict[str, bytes] | None:
    """The members of a torch file, by name without the archive's folder; None for other files."""
    import zipfile

    if raw[:4] != b"PK\x03\x04":
        return None
    with zipfile.ZipFile(BytesIO(raw)) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def joined(parts: dict[str, bytes]) -> bytes:
    out = BytesIO()
    writer = ZipWriter(out, root="archive")
    for name, content in parts.items():
        writer.add(name, [content])
    writer.close()
    return out.getvalue()


def pieces(pickle: bytes) -> list[bytes]:
    """A pickle cut before every opcode."""
    places = [position for _, _, position in pickletools.genops(pickle)]
    return [pickle[a:b] for a, b in zip(places, [*places[1:], len(pickle)], strict=True)]


def changed_pickle(pickle: bytes, rng: random.Random) -> bytes:
    """Some opcodes replaced, dropped, doubled, swapped or made up."""
    ops = pieces(pickle)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(ops))
        match rng.randrange(6):
            case 0:
                del ops[at]
            case 1:
                ops.insert(at, ops[rng.randrange(len(ops))])
            case 2:
                other = rng.randrange(len(ops))
                ops[at], ops[other] = ops[other], ops[at]
            case 3:
                number = rng.choice(NUMBERS)
                raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
                ops[at] = b"\x8a" + bytes([len(raw)]) + raw
            case 4:
                word = rng.choice(WORDS).encode()
                ops[at] = b"X" + struct.pack("<I", len(word)) + word
            case _:
                ops[at] = bytes([rng.randrange(256)])
        if not ops:
            return b"."
    return b"".join(ops)


def changed_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Cut off, flipped, doubled or with a number written over some place."""
    if not raw:
        return b"\x00"
    data, at = bytearray(raw), rng.randrange(len(raw))
    match rng.randrange(5):
        case 0:
            del data[at:]
        case 1:
            data[at] ^= 1 << rng.randrange(8)
        case 2:
            data[at:at] = data[at : at + rng.randint(1, 64)]
        case 3:
            data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        case _:
            # Mostly where directories are: at either end.
            at = rng.choice(
                [rng.randrange(min(120, len(data))), -rng.randint(1, min(120, len(data)))]
            )
            data[at] = rng.randrange(256)
    return bytes(data)


def changed_json(raw: bytes, rng: random.Random) -> bytes:
    """One value of a JSON text replaced by another kind, or its key renamed or dropped."""
    tree = json.loads(raw)
    places = list(containers(tree))
    where = rng.choice(places)
    key: Any = rng.choice(list(where) if isinstance(where, dict) else range(len(where)))
    value = rng.choice([None, True, -1, 1.5, [], {}, "", [[]], *NUMBERS, *WORDS])
    if isinstance(where, dict) and rng.random() < 0.3:
        moved = where.pop(key)
        if rng.random() < 0.7:
            where[rng.choice(WORDS)] = moved
    else:
        where[key] = value
    return json.dumps(tree).encode()


def containers(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list) and tree:
        yield tree
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from containers(item)


def changed(name: str, raw: bytes, rng: random.Random) -> bytes:
    """A file with one fault behind one of its layers."""
    if rng.random() < 0.25:
        return changed_bytes(raw, rng)
    if name == ".metadata":
        return changed_pickle(raw, rng)
    if name.endswith(".json"):
        return changed_json(raw, rng)
    if name.endswith(".safetensors"):
        length = struct.unpack("<Q", raw[:8])[0]
        header = changed_json(raw[8 : 8 + length], rng)
        return struct.pack("<Q", len(header)) + header + raw[8 + length :]
    parts = torch_parts(raw) if name.endswith(".pt") else None
    if parts is None:
        return changed_bytes(raw, rng)
    member = rng.choice(["data.pkl", "data.pkl", *parts])
    alter: Callable[[bytes, random.Random], bytes] = (
        changed_pickle if member == "data.pkl" else changed_bytes
    )
    return joined({**parts, member: alter(parts[member], rng)})


@pytest.mark.parametrize("format", FORMATS)
def test_every_change_is_refused_in_a_sentence_or_read(
    originals: Path, tmp_path: Path, format: str
) -> None:
    files = [path for path in sorted((originals / format).rglob("*")) if path.is_file()]
    refused = 0
    for seed in range(EXAMPLES):
        rng = random.Random(f"{format} {seed}")
        folder = tmp_path / "copy"
        shutil.copytree(originals / format, folder)
        path = folder / rng.choice(files).relative_to(originals / format)
        path.write_bytes(changed(path.name, path.read_bytes(), rng))
        refused += not readable(folder, f"{format} {seed} {path.name}")
        shutil.rmtree(folder)
    assert refused > EXAMPLES // 4


def readable(folder: Path, what: str) -> bool:
    """Whether it opens and reads; fails on anything but a refusal that says what and why."""
    refusal: RejectedError | None = None
    try:
        scan_path(folder)
        checkpoint = open_checkpoint(folder)
        for tensors in checkpoint.states.values():
            for tensor in tensors.values():
                tensor.numpy()
    except RejectedError as error:
        refusal = error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    if refusal is not None:
        assert refusal.reason, what
        assert refusal.remedy, what
        assert len(str(refusal)) < 4000, what
    return refusal is None
