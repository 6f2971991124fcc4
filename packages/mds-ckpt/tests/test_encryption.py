"""An encrypted checkpoint reads as the plain one does, and gives nothing to who lacks its key."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import BinaryIO

import ckpt_samples as samples
import numpy as np
import pytest
from ckpt_disks import BreakingDisk, Killed, refused

from mds_ckpt import (
    CheckpointError,
    KeySource,
    SealedError,
    convert,
    open_checkpoint,
    verify,
)
from mds_ckpt.cli import main
from mds_ckpt.encryption import keys, segments
from mds_ckpt.encryption.envelope import envelope_from_json, envelope_to_json
from mds_ckpt.encryption.segments import SEGMENT_SIZE
from mds_ckpt.files import sealed_folder
from mds_ckpt.files.file_operations import FileOperations
from mds_ckpt.files.sealed_folder import SealedFolder
from mds_ckpt.protection.encrypt import decrypt_checkpoint, encrypt_checkpoint, rotate_key

MODEL = samples.model("gpt2", num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=5)
WEIGHTS = samples.arrays(MODEL, seed=3)


@pytest.fixture(autouse=True)
def _cheap_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_SCRYPT_LOG_N", 10)


@pytest.fixture
def identity(tmp_path: Path) -> tuple[str, KeySource]:
    path = tmp_path / "key.txt"
    return keys.new_identity(path), KeySource(identity=path)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "run", MODEL, WEIGHTS, step=7)


@pytest.fixture
def sealed(plain: Path, identity: tuple[str, KeySource], tmp_path: Path) -> Path:
    encrypt_checkpoint(plain, tmp_path / "sealed", recipients=[identity[0]])
    return tmp_path / "sealed"


def tree(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def test_tensors_are_those_of_the_plain_checkpoint(plain, sealed, identity) -> None:
    one, other = open_checkpoint(plain), open_checkpoint(sealed, key=identity[1])

    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert np.array_equal(tensor.numpy(), other.tensors[name].numpy()), name
    assert (one.step, one.counters, one.config) == (other.step, other.counters, other.config)
    assert not verify(sealed, key=identity[1]).problems


def test_decrypting_gives_the_very_bytes_that_were_encrypted(
    plain, sealed, identity, tmp_path
) -> None:
    decrypt_checkpoint(sealed, tmp_path / "again", key=identity[1])

    assert tree(tmp_path / "again") == tree(plain)


def test_conversion_reads_an_encrypted_source(plain, sealed, identity, tmp_path) -> None:
    convert(plain, tmp_path / "hf-1", to="hf")
    convert(sealed, tmp_path / "hf-2", to="hf", key=identity[1])
    convert(sealed, tmp_path / "mds-2", to="mds", key=identity[1])

    assert tree(tmp_path / "hf-1") == tree(tmp_path / "hf-2")
    words = [str(tmp_path / "mds-2"), str(sealed), "--identity", str(identity[1].identity)]
    assert main(["diff", *words]) == 0


def test_a_slice_opens_only_the_segments_that_it_touches(
    tmp_path, identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = SEGMENT_SIZE // 4
    weights = {"w": np.arange(6 * rows, dtype=np.float32).reshape(6, rows)}
    plain = samples.save(tmp_path / "run", MODEL, weights, step=1)
    encrypt_checkpoint(plain, tmp_path / "sealed", recipients=[identity[0]])
    tensor = open_checkpoint(tmp_path / "sealed", key=identity[1]).tensors["w"]
    tensor.read(((0, 1), (0, 1)))  # reads the header, too
    opened: list[int] = []

    def spy(real):
        def spying(self, data, number, *rest):
            opened.append(number)
            return real(self, data, number, *rest)

        return spying

    for name in ("open", "open_into"):
        monkeypatch.setattr(segments._Cipher, name, spy(getattr(segments._Cipher, name)))

    part = tensor.read(((1, 2), (0, rows)))

    assert np.array_equal(part, weights["w"][1:2])
    assert len(opened) == 2  # a row has the size of a segment, behind a header


@pytest.mark.parametrize("words", [["inspect"], ["convert", "--to", "hf"], ["diff"]])
def test_no_key_is_refused_in_one_sentence(sealed, plain, words, capsys, tmp_path) -> None:
    rest = {"convert": [str(tmp_path / "out")], "diff": [str(plain)]}.get(words[0], [])

    code = main([words[0], str(sealed), *rest, *words[1:]])

    assert code == 3
    assert "encrypted, and no key was given" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_wrong_key_is_refused(sealed, tmp_path, capsys) -> None:
    keys.new_identity(tmp_path / "other.txt")

    assert main(["verify", str(sealed), "--identity", str(tmp_path / "other.txt")]) == 3
    assert "does not open with the key that was given" in capsys.readouterr().err
    assert main(["verify", str(sealed)]) == 0


def test_every_flipped_bit_is_found(sealed, identity) -> None:
    for path in sorted(sealed.iterdir()):
        good = path.read_bytes()
        for place in {0, len(good) // 3, len(good) // 2, len(good) - 1}:
            bad = bytearray(good)
            bad[place] ^= 8
            path.write_bytes(bad)
            assert main(["verify", str(sealed)]) in (1, 3), (path.name, place)
        path.write_bytes(good)
    assert not verify(sealed, key=identity[1]).problems


def test_forged_bytes_do_not_open_though_the_envelope_agrees(
    plain, sealed, identity, tmp_path
) -> None:
    recipient, key = identity
    encrypt_checkpoint(plain, tmp_path / "twin", recipients=[recipient])
    contents = SealedFolder(sealed, key).contents
    ranks = sorted(stored for name, (stored, _) in contents.files.items() if "rank" in name)
    good = (sealed / ranks[0]).read_bytes()
    flipped = bytearray(good)
    flipped[200] ^= 1
    forgeries = {
        "flip": bytes(flipped),
        "truncation": good[: len(good) // 2],
        "header only": good[:64],
        "another file": (sealed / ranks[1]).read_bytes(),
        "the same file of another checkpoint": (tmp_path / "twin" / ranks[0]).read_bytes(),
    }
    for what, data in forgeries.items():
        _forge(sealed, ranks[0], data)
        assert main(["verify", str(sealed)]) == 0, what  # the envelope agrees
        assert verify(sealed, key=key).problems, what
        with pytest.raises(CheckpointError):
            _read_all(sealed, key)


def _read_all(path: Path, key: KeySource) -> None:
    for tensor in open_checkpoint(path, key=key).tensors.values():
        tensor.numpy()


def _forge(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    path = folder / "manifest.json"
    envelope = envelope_from_json(path.read_bytes(), name="x")
    files = {**envelope.files, name: (len(data), hashlib.sha256(data).hexdigest())}
    path.write_bytes(envelope_to_json(replace(envelope, files=files)))


def test_an_older_checkpoint_put_back_is_refused_by_the_digest(identity, tmp_path) -> None:
    folders = [samples.save(tmp_path / "run", MODEL, WEIGHTS, step=step) for step in (1, 2)]
    found = [
        encrypt_checkpoint(folder, tmp_path / f"sealed-{folder.name}", recipients=[identity[0]])
        for folder in folders
    ]
    old = tmp_path / "sealed-step-1"

    assert (
        found[1].digest == hashlib.sha256((folders[1] / "manifest.json").read_bytes()).hexdigest()
    )
    open_checkpoint(folders[1], expect=found[1].digest)
    for path in (old, folders[0]):
        with pytest.raises(SealedError, match="expected"):
            open_checkpoint(path, key=identity[1], expect=found[1].digest)


def test_a_rotation_changes_the_envelope_only(sealed, identity, tmp_path) -> None:
    (tmp_path / "pw").write_text("correct horse\n")
    before = tree(sealed)

    words = ["--identity", str(identity[1].identity), "--new-passphrase-file", str(tmp_path / "pw")]
    assert main(["rotate-key", str(sealed), *words]) == 0

    after = tree(sealed)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"manifest.json", "key-1.age"}
    with pytest.raises(SealedError, match="opens by a passphrase"):
        open_checkpoint(sealed, key=identity[1])
    open_checkpoint(sealed, key=KeySource(passphrase_file=tmp_path / "pw"))


def test_a_checkpoint_can_be_opened_while_its_keys_change(
    sealed, identity, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipient = keys.new_identity(tmp_path / "new.txt")
    both = tmp_path / "both.txt"
    both.write_text((tmp_path / "key.txt").read_text() + (tmp_path / "new.txt").read_text())
    waiting = [lambda: rotate_key(sealed, old=identity[1], recipients=[recipient])]
    real = sealed_folder.unlock

    def slowly(*given, **options):
        if waiting:
            waiting.pop()()
        return real(*given, **options)

    monkeypatch.setattr(sealed_folder, "unlock", slowly)

    assert open_checkpoint(sealed, key=KeySource(identity=both)).step == 7
    assert not waiting


@pytest.mark.parametrize("make", [Killed, refused])
@pytest.mark.parametrize("step", ["encrypt", "decrypt", "rotate"])
def test_breaking_at_any_operation_leaves_the_old_or_the_new(
    tmp_path, plain, sealed, identity, step, make
) -> None:
    recipient, key = identity
    newer = keys.new_identity(tmp_path / "new.txt")
    new_key = KeySource(identity=tmp_path / "new.txt")

    def act(folder: Path, disk: FileOperations) -> None:
        if step == "encrypt":
            encrypt_checkpoint(plain, folder / "out", recipients=[recipient], operations=disk)
        elif step == "decrypt":
            decrypt_checkpoint(folder / "sealed", folder / "out", key=key, operations=disk)
        else:
            rotate_key(folder / "sealed", old=key, recipients=[newer], operations=disk)

    def opens(path: Path) -> bool:
        for each in (key, new_key):
            try:
                return not verify(path, key=each).problems
            except SealedError:
                continue
        return False

    for at in count():
        folder = tmp_path / f"at-{at}"
        folder.mkdir()
        shutil.copytree(sealed, folder / "sealed")
        try:
            act(folder, BreakingDisk(at=at, make=make))
            died = False
        except (Killed, OSError):
            died = True
        target = folder / ("sealed" if step == "rotate" else "out")
        if not target.exists():
            assert died
            act(folder, FileOperations())
        assert opens(target), at
        if not died:
            break
    assert at > 8
    assert not [each for each in folder.iterdir() if "partial" in each.name]


class Recorder(FileOperations):
    """Keeps all bytes that are written."""

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.written += data
        super().write(file, data)


def test_no_plain_byte_and_no_key_is_written(plain, tmp_path, identity, capfd) -> None:
    recorder = Recorder()

    encrypt_checkpoint(plain, tmp_path / "sealed", recipients=[identity[0]], operations=recorder)

    contents = SealedFolder(tmp_path / "sealed", identity[1]).contents
    said = "".join(capfd.readouterr()).encode() + repr(contents).encode()
    everything = bytes(recorder.written) + b"".join(tree(tmp_path / "sealed").values()) + said
    arrays = [array.tobytes()[:16] for array in WEIGHTS.values() if array.any()]
    for secret in (*arrays, contents.data_key, contents.data_key.hex().encode(), b"embedding"):
        assert secret not in everything
    assert arrays[0] in b"".join(tree(plain).values())


def test_a_missing_library_names_the_extra(sealed, identity, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)

    assert main(["inspect", str(sealed), "--identity", str(identity[1].identity)]) == 4
    assert "mds-ckpt[encrypt]" in capsys.readouterr().err


def test_the_modules_of_the_commands_stay_light() -> None:
    """Naming a key must not make every command load a cipher."""
    code = "import sys, mds_ckpt.cli; sys.exit('cryptography' in sys.modules)"

    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
