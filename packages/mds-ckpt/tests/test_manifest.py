"""The manifest: what is written is read back, and what breaks the format is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import pytest

from mds_ckpt import manifest
from mds_ckpt.commit import read_manifest
from mds_ckpt.errors import RejectedError, UnsupportedError

W = "decoder.final_layernorm.weight"


@pytest.fixture
def text(tmp_path: Path) -> bytes:
    """Bytes of a good manifest."""
    model = samples.model("gpt2", num_layers=1)
    folder = samples.save(tmp_path, model, samples.arrays(model))
    return (folder / "manifest.json").read_bytes()


def changed(text: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest with a change and no digest of itself."""
    members = json.loads(text)
    del members["manifest_sha256"]
    change(members)
    return json.dumps(members).encode()


def test_what_is_written_is_read_back(text: bytes) -> None:
    found = manifest.from_json(text, path="m")

    assert manifest.to_json(found) == text
    assert found.has_digest
    assert found.counters == {"iteration": 1, "consumed_samples": 8}
    assert found.parameters[W].shape == (16,)


def test_every_flipped_bit_is_noticed(text: bytes) -> None:
    for at in range(0, len(text), 7):
        for bit in (0, 3, 6):
            flipped = bytearray(text)
            flipped[at] ^= 1 << bit
            try:
                found = manifest.from_json(bytes(flipped), path="m")
            except RejectedError:
                continue
            # Only the name of the digest itself can change unseen, and verify reports its loss.
            assert not found.has_digest


def test_members_that_are_not_known_are_ignored(text: bytes) -> None:
    data = changed(text, lambda m: m.update(future={"x": 1}, format_version="1.7"))

    assert manifest.from_json(data, path="m").step == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format_version="2.0"),
        lambda m: m.update(requires=["holograms/1"]),
    ],
)
def test_a_newer_major_version_or_an_unknown_feature_is_refused(text: bytes, change: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"asks for .*; read it with the mds-ckpt release"):
        manifest.from_json(changed(text, change), path="m")


def piece(members: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = members["parameters"][W]["states"]["weight"]["pieces"][number]
    return found


BROKEN: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "other format": ("'format' is not", lambda m: m.update(format="x")),
    "version": ("MAJOR.MINOR", lambda m: m.update(format_version="one")),
    "step is a float": ("'step' is not a whole", lambda m: m.update(step=1.5)),
    "step is true": ("'step' is not a whole", lambda m: m.update(step=True)),
    "negative counter": ("counters.iteration", lambda m: m["counters"].update(iteration=-1)),
    "huge counter": ("counters.iteration", lambda m: m["counters"].update(iteration=2**63)),
    "files is a list": ("'files' is not an object", lambda m: m.update(files=[])),
    "path upwards": (
        "path separator",
        lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}),
    ),
    "path absolute": (
        "path separator",
        lambda m: m["files"].update({"/etc/passwd": {"size": 1, "sha256": "0" * 64}}),
    ),
    "path of Windows": (
        "path separator",
        lambda m: m["files"].update({"..\\x": {"size": 1, "sha256": "0" * 64}}),
    ),
    "drive": ("portable", lambda m: m["files"].update({"C:x": {"size": 1, "sha256": "0" * 64}})),
    "dots": ("folder", lambda m: m["files"].update({"..": {"size": 1, "sha256": "0" * 64}})),
    "digest": ("64 lower-case", lambda m: m["files"]["tokenizer.json"].update(sha256="xyz")),
    "unlisted file": ("not listed", lambda m: piece(m).update(file="other.safetensors")),
    "checksum": ("8 lower-case", lambda m: piece(m).update(crc32c="12345678 ")),
    "overlap": ("overlap", lambda m: piece(m).update(flat=[0, 16])),
    "gap": ("cover", lambda m: piece(m).update(flat=[0, 4])),
    "outside": ("outside", lambda m: piece(m).update(box=[[0, 99]])),
    "backwards": ("ends before", lambda m: piece(m).update(box=[[9, 2]])),
    "rank of a box": ("outside", lambda m: piece(m).update(box=[])),
    "overflow": ("overflows", lambda m: m["parameters"][W].update(shape=[2**40, 2**40])),
    "dtype": ("dtype", lambda m: m["parameters"][W]["states"]["weight"].update(dtype="F99")),
    "no pieces": ("cover 0", lambda m: m["parameters"][W]["states"]["weight"].update(pieces=[])),
    "encrypted": ("encryption", lambda m: m.update(encryption={"a": 1})),
    "tied": ("tied_embeddings", lambda m: m["model"].update(tied_embeddings="yes")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_format_is_refused_by_name(text: bytes, name: str) -> None:
    words, change = BROKEN[name]

    with pytest.raises(RejectedError) as caught:
        manifest.from_json(changed(text, change), path="m.json")

    assert words in str(caught.value)
    assert str(caught.value).startswith("m.json: this is not a valid mds manifest, ")
    assert "; use another checkpoint" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "UTF-8"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "nested"),
        (b"[]", "'format'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(RejectedError, match=words):
        manifest.from_json(data, path="m")


def test_a_manifest_that_is_a_link_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "secret").write_bytes(text)
    folder = tmp_path / "step-8"
    folder.mkdir()
    (folder / "manifest.json").symlink_to(tmp_path / "secret")

    with pytest.raises(RejectedError, match="link"):
        read_manifest(folder)


def test_what_is_not_json_can_not_be_written(text: bytes) -> None:
    good = manifest.from_json(text, path="m")

    with pytest.raises(TypeError, match="holds a set"):
        manifest.to_json(replace(good, config={"x": {1, 2}}))
    with pytest.raises(ValueError, match="JSON"):
        manifest.to_json(replace(good, config={"x": float("nan")}))
