"""What signing asks of keys and folders; the sessions with peers meet the library that signs."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from mds_ckpt.cli import main
from mds_ckpt.protection.signature import new_signing_key, signature_beside


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w" * 100)
    return folder


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_a_new_private_key_is_its_owners_alone_and_never_replaces_one(tmp_path: Path) -> None:
    public = new_signing_key(tmp_path / "key.pem")

    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    assert b"PRIVATE" not in public.read_bytes()
    before = (tmp_path / "key.pem").read_bytes(), public.read_bytes()
    with pytest.raises(FileExistsError):
        new_signing_key(tmp_path / "key.pem")
    public.unlink()
    with pytest.raises(FileExistsError):
        new_signing_key(tmp_path / "key.pem")
    assert not public.exists()
    assert (tmp_path / "key.pem").read_bytes() == before[0]


def test_without_the_extra_signing_names_it_and_leaves_no_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model_signing", "model_signing.signing"):
        monkeypatch.setitem(sys.modules, name, None)

    code = main(["sign", str(folder), "--new-private-key", str(folder.parent / "key.pem")])

    assert code == 4
    assert "pip install 'mds-ckpt[signing]'" in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sign", "F"], "--new-private-key"),
        (["sign", "F", "--private-key", "a", "--new-private-key", "b"], "--new-private-key"),
        (["verify", "F", "--signature", "F.sig"], "--public-key"),
    ],
)
def test_a_request_that_lacks_a_key_is_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder) if word == "F" else word for word in words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [".", "step-1", "step-1/", "step-1/../step-1"])
def test_a_signature_lies_beside_what_it_signs(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder if name == "." else folder.parent)

    found = signature_beside(Path(name))

    assert found.resolve() == folder.parent / "step-1.sig"
