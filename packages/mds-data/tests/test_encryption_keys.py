"""Whoever has a key opens the store, nobody else does, and no key or plain byte gets out."""

from __future__ import annotations

import pickle
import stat
import sys

import numpy as np
import pytest
from encryption_material import DOCUMENTS, tree
from store_material import assert_holds, write_small

from mds_data import (
    KeySource,
    SealedError,
    open_store,
)
from mds_data.cli import main
from mds_data.encryption import keys
from mds_data.store import sealed_folder
from mds_data.store.commit import FileOperations
from mds_data.store.encrypt import encrypt_store, rotate_key

CANARY = np.frombuffer(b"THIS-IS-A-SECRET", np.uint16)

FLIP = (
    f"{sys.executable} -c 'import sys; sys.stdout.buffer.write("
    f"bytes(byte ^ 7 for byte in sys.stdin.buffer.read()))'"
)


@pytest.fixture(autouse=True)
def _cheap_passphrases(monkeypatch):
    monkeypatch.setattr(keys, "_SCRYPT_LOG_N", 10)


def test_no_key_and_a_wrong_key_are_refused(sealed, tmp_path, capsys):
    keys.new_identity(tmp_path / "other.txt")

    with pytest.raises(SealedError, match="no key was given"):
        open_store(sealed)
    with pytest.raises(SealedError, match="does not open with the key that was given"):
        open_store(sealed, key=KeySource(identity=tmp_path / "other.txt"))
    assert main(["verify", str(sealed), "--identity", str(tmp_path / "other.txt")]) == 3
    assert main(["inspect", str(sealed)]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_manifest_says_nothing_of_names_shapes_and_sources(tmp_path, identity):
    from mds_data.store.writer import StoreWriter

    with StoreWriter(
        tmp_path / "plain",
        vocab_size=31337,
        columns={"patient_name": np.dtype("<u2")},
        provenance={"inputs": [{"path": "hospital.jsonl", "sha256": "0" * 64, "size": 1}]},
    ) as writer:
        writer.add(np.arange(10, dtype=np.uint16), columns={"patient_name": 3})
        writer.commit()
    encrypt_store(tmp_path / "plain", tmp_path / "sealed", recipients=[identity[0]])

    said = b"".join(tree(tmp_path / "sealed").values())
    names = " ".join(tree(tmp_path / "sealed"))

    for word in ("patient_name", "hospital", "31337", "doc_start", "tokens", "zarr"):
        assert word.encode() not in said
        assert word not in names


def _ways(tmp_path):
    (tmp_path / "pw").write_text("correct horse\n")
    return {
        "file": KeySource(passphrase_file=tmp_path / "pw"),
        "variable": KeySource(passphrase_variable="MDS_TEST_PASSPHRASE"),
        "command": KeySource(key_command=FLIP),
    }


@pytest.mark.parametrize("way", ["file", "variable", "command"])
def test_passphrase_and_command_open_too(plain, tmp_path, monkeypatch, way):
    monkeypatch.setenv("MDS_TEST_PASSPHRASE", "battery staple")
    key = _ways(tmp_path)[way]

    encrypt_store(plain, tmp_path / "sealed", key=key)

    assert_holds(open_store(tmp_path / "sealed", key=key), DOCUMENTS)
    (tmp_path / "pw").write_text("wrong")
    if way == "file":
        with pytest.raises(SealedError, match="does not open"):
            open_store(tmp_path / "sealed", key=key)


def test_the_identity_file_may_be_named_by_the_environment(sealed, identity, monkeypatch):
    monkeypatch.setenv("MDS_TEST_IDENTITY", str(identity[1].identity))

    assert main(["verify", str(sealed), "--identity-env", "MDS_TEST_IDENTITY"]) == 0


def test_a_passphrase_may_be_typed(plain, tmp_path, monkeypatch):
    typed = iter(["one", "other", "one", "one", "one"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    key = KeySource(ask=True)

    with pytest.raises(SealedError, match="two different passphrases"):
        encrypt_store(plain, tmp_path / "sealed", key=key)
    encrypt_store(plain, tmp_path / "sealed", key=key)

    assert_holds(open_store(tmp_path / "sealed", key=key), DOCUMENTS)


def test_a_rotation_changes_the_envelope_only(sealed, identity, tmp_path):
    recipient = keys.new_identity(tmp_path / "new.txt")
    before = tree(sealed)

    rotate_key(sealed, old=identity[1], recipients=[recipient])

    after = tree(sealed)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"manifest.json", "key-1.age", "key-2.age"}
    with pytest.raises(SealedError, match="does not open"):
        open_store(sealed, key=identity[1])
    assert_holds(open_store(sealed, key=KeySource(identity=tmp_path / "new.txt")), DOCUMENTS)


def test_a_store_can_be_opened_while_its_keys_change(sealed, identity, tmp_path, monkeypatch):
    """The old key file goes between the reader's look at the envelope and at the key."""
    recipient = keys.new_identity(tmp_path / "new.txt")
    both = tmp_path / "both.txt"
    both.write_text((tmp_path / "key.txt").read_text() + (tmp_path / "new.txt").read_text())
    waiting = [lambda: rotate_key(sealed, old=identity[1], recipients=[recipient])]
    real = sealed_folder.envelope_from_json

    def slowly(data, *, name):
        found = real(data, name=name)
        if waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(sealed_folder, "envelope_from_json", slowly)

    assert_holds(open_store(sealed, key=KeySource(identity=both)), DOCUMENTS)
    assert not waiting


def test_key_files_are_their_owners_only(identity):
    path = identity[1].identity

    assert stat.S_IMODE(path.stat().st_mode) == 0o600 or sys.platform == "win32"
    with pytest.raises(FileExistsError):
        keys.new_identity(path)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("victim", ["victim", "nowhere"])
def test_a_new_key_follows_no_link(plain, tmp_path, capsys, victim):
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / "link").symlink_to(tmp_path / victim)
    words = ["--new-identity", str(tmp_path / "link"), "--output", str(tmp_path / "out")]

    assert main(["encrypt", str(plain), *words]) == 3

    assert "is there already, and nothing is written over; name another" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "untouched"
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "out").exists()


class Recorder(FileOperations):
    """Keeps all bytes that are written."""

    def __init__(self):
        self.written = bytearray()

    def write(self, handle, data):
        self.written += data
        super().write(handle, data)


def test_no_plain_byte_and_no_key_is_written(tmp_path, identity, capfd):
    tokens = np.tile(CANARY, 40)
    write_small(tmp_path / "plain", [tokens], vocab_size=65536)
    assert CANARY.tobytes() in b"".join(tree(tmp_path / "plain").values())
    recorder = Recorder()

    encrypt_store(
        tmp_path / "plain", tmp_path / "sealed", recipients=[identity[0]], operations=recorder
    )

    opened = open_store(tmp_path / "sealed", key=identity[1])
    key = opened.parts[0].folder.contents.data_key
    everything = [bytes(recorder.written), *tree(tmp_path / "sealed").values()]
    everything += [text.encode() for text in capfd.readouterr()]
    everything += [repr(opened.parts[0].folder.contents).encode(), pickle.dumps(opened)]
    for secret in (CANARY.tobytes(), key, key.hex().encode()):
        assert not any(secret in each for each in everything)


def test_secrets_are_on_no_command_line(plain, tmp_path):
    """The key command sees the key on its input; its arguments, and ours, hold none."""
    script = tmp_path / "kms.py"
    script.write_text(
        "import pathlib, sys\n"
        "line = pathlib.Path('/proc/self/cmdline')\n"
        "parent = pathlib.Path(f'/proc/{__import__(\"os\").getppid()}/cmdline')\n"
        "data = sys.stdin.buffer.read()\n"
        "seen = b''.join(p.read_bytes() for p in (line, parent) if p.exists())\n"
        "key = data.split()[2] if data.startswith(b'mds-data-key') else b'-none-'\n"
        "sys.exit(9 if key in seen else sys.stdout.buffer.write(data) and 0)\n"
    )
    command = f"{sys.executable} {script}"
    assert (
        main(
            ["encrypt", str(plain), "--key-command", command, "--output", str(tmp_path / "sealed")]
        )
        == 0
    )


def test_a_missing_library_names_the_extra(sealed, identity, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrage", None)

    with pytest.raises(ImportError, match=r"mds-data\[encrypt\]"):
        open_store(sealed, key=identity[1])
