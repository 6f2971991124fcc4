"""Signatures in OpenSSF's format: its library reads ours, we read its, no changed bit passes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mds_ckpt.cli import main
from mds_data import write_store

pytest.importorskip("model_signing", reason="runs in nox -s interop")


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """A store, which is signed like any other folder, with its key and signature beside it."""
    documents = [np.arange(40) % 9 for _ in range(5)]
    write_store(tmp_path / "store", documents, vocab_size=9, eod_id=0)
    key = str(tmp_path / "key.pem")
    assert main(["sign", str(tmp_path / "store"), "--new-private-key", key]) == 0
    return tmp_path


def verify(folder: Path, *, key: str = "key.pem.pub") -> int:
    return main(["verify", str(folder / "store"), "--public-key", str(folder / key)])


def its_own_tool(*words: object) -> int:
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode


def test_what_was_signed_is_verified_by_us_and_by_its_own_tool(signed: Path) -> None:
    theirs = ["--signature", signed / "store.sig", "--public_key", signed / "key.pem.pub"]

    assert verify(signed) == 0
    assert its_own_tool("verify", "key", signed / "store", *theirs) == 0


def test_what_its_own_tool_signed_is_verified(signed: Path) -> None:
    words = ["--private_key", signed / "key.pem", "--signature", signed / "store.sig"]

    assert its_own_tool("sign", "key", signed / "store", *words) == 0
    assert verify(signed) == 0


def flip_a_bit(store: Path) -> None:
    path = max(
        (path for path in store.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def add_a_file(store: Path) -> None:
    (store / "more.py").write_text("pass")


def remove_a_file(store: Path) -> None:
    (store / "manifest.json").unlink()


def put_a_link(store: Path) -> None:
    (store / "link").symlink_to("manifest.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_a_bit, "changed since it was signed"),
        (add_a_file, "more.py: is there, and was not signed"),
        (remove_a_file, "manifest.json: is missing"),
        (put_a_link, "is a link"),
    ],
)
def test_a_folder_that_changed_is_no_longer_signed(
    signed: Path,
    change: Callable[[Path], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(signed / "store")

    assert verify(signed) == 1
    assert message in capsys.readouterr().out


def test_neither_another_key_nor_a_changed_signature_passes(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["--new-private-key", str(signed / "other.pem"), "--signature", str(signed / "o.sig")]
    assert main(["sign", str(signed / "store"), *other]) == 0
    assert verify(signed, key="other.pem.pub") == 1
    assert "made by another key" in capsys.readouterr().out

    bundle = json.loads((signed / "store.sig").read_text())
    payload = bundle["dsseEnvelope"]["payload"]
    bundle["dsseEnvelope"]["payload"] = payload[:40] + payload[44:]
    (signed / "store.sig").write_text(json.dumps(bundle))
    assert verify(signed) == 1
    assert "the signature itself was changed" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"[" * 200_000, b"\xff\xfe", b'{"a":1}'])
def test_a_file_that_is_no_signature_is_refused_in_one_sentence(
    signed: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (signed / "store.sig").write_bytes(data)

    assert verify(signed) == 3
    message = capsys.readouterr().err
    assert "it is no signature that can be read" in message
    assert message.count("\n") == 1


def test_a_private_key_is_refused_where_others_can_read_it_or_where_it_would_be_handed_on(
    signed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = signed / "key.pem"
    inside = signed / "store" / "key.pem"
    inside.write_bytes(key.read_bytes())
    assert main(["sign", str(signed / "store"), "--private-key", str(inside)]) == 3
    assert "handed on" in capsys.readouterr().err

    key.chmod(0o640)
    assert main(["sign", str(signed / "store"), "--private-key", str(key)]) == 3
    assert "chmod 600" in capsys.readouterr().err


def test_an_encrypted_private_key_opens_by_its_passphrase_only(
    signed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PASSPHRASE", "correct horse")
    key, words = signed / "locked.pem", ["--passphrase-env", "PASSPHRASE"]
    store = str(signed / "store")
    assert main(["sign", store, "--new-private-key", str(key), *words]) == 0
    assert b"ENCRYPTED" in key.read_bytes()

    assert main(["sign", store, "--private-key", str(key), *words]) == 0
    assert verify(signed, key="locked.pem.pub") == 0
    monkeypatch.setenv("PASSPHRASE", "wrong")
    assert main(["sign", store, "--private-key", str(key), *words]) == 3
    assert main(["sign", store, "--private-key", str(key)]) == 3
    printed = capsys.readouterr()
    assert "horse" not in printed.out + printed.err
