"""The command line: exit codes, messages, and that nothing hostile gets through any command."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import pytest
import safetensors_attacks as attacks

from mds_ckpt import cli

MODEL = samples.model("llama")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "ckpt", MODEL, samples.arrays(MODEL))


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_main_way_works(folder: Path, tmp_path: Path, capsys: Any) -> None:
    hf = tmp_path / "hf"

    assert run(capsys, "inspect", folder)[0] == 0
    code, out, _ = run(capsys, "verify", folder)
    assert (code, "all as written" in out) == (0, True)
    code, out, _ = run(capsys, "convert", folder, hf, "--to", "hf", "--dry-run")
    assert (code, "would write 21 to hf" in out, hf.exists()) == (0, True, False)
    code, out, _ = run(capsys, "convert", folder, hf, "--to", "hf", "--jobs", 2)
    assert (code, "15 tensors used, each once; wrote 21 to hf" in out) == (0, True)
    code, out, _ = run(capsys, "diff", folder, hf)
    assert (code, "15 tensors compared, 0 differences" in out) == (0, True)
    code, out, _ = run(capsys, "scan", hf)
    assert (code, "0 of them dangerous" in out) == (0, True)


def test_json_is_printed_alone(folder: Path, capsys: Any) -> None:
    code, out, err = run(capsys, "inspect", folder, "--json", "--stats", "--tensor", "*final*")

    assert (code, err) == (0, "")
    (tensor,) = json.loads(out)["tensors"]
    assert tensor["stats"]["weight"]["nan"] == 0


def test_statistics_are_printed_as_a_table(folder: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, "inspect", folder, "--stats", "--tensor", "*final*")

    assert code == 0
    assert "norm" in out.splitlines()[-2]
    assert out.splitlines()[-1].startswith("decoder.final_layernorm.weight")


def test_a_difference_ends_with_1(folder: Path, tmp_path: Path, capsys: Any) -> None:
    hf = tmp_path / "hf"
    run(capsys, "convert", folder, hf, "--to", "hf", "--dtype", "bf16")

    assert run(capsys, "diff", folder, hf)[0] == 1
    assert run(capsys, "diff", folder, hf, "--atol", "1e-2")[0] == 0
    path = folder / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out, _ = run(capsys, "verify", folder)
    assert code == 1
    assert "rank-00001.safetensors, tensor '" in out


def test_wrong_usage_ends_with_2(folder: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments in (
        ["frobnicate"],
        ["inspect"],
        ["convert", folder, tmp_path / "x"],
        ["convert", folder, tmp_path / "x", "--to", "hf", "--dtype", "int3"],
        ["diff", folder, folder, "--atol", "-1"],
        ["diff", folder, folder, "--atol", "nan"],
    ):
        with pytest.raises(SystemExit) as caught:
            run(capsys, *arguments)
        assert caught.value.code == 2
    code, _, err = run(capsys, "convert", folder, tmp_path / "x", "--to", "gguf")
    assert (code, "mds-ckpt: 'gguf' can't be written" in err) == (2, True)
    assert run(capsys, "convert", folder, folder / "x", "--to", "hf")[0] == 2


def test_a_pattern_that_no_name_matches_is_said(folder: Path, capsys: Any) -> None:
    code, out, _ = run(capsys, "inspect", folder, "--tensor", "*nothing*")

    assert code == 0
    assert out.splitlines()[-1] == "no tensor has a name like '*nothing*'"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "out: it failed; free some space, then run it again"),
        (
            errno.EACCES,
            "out: it failed; change its permissions or name another place, then run it again",
        ),
        (errno.EIO, "out: it failed; look at that place, then run it again"),
    ],
)
def test_an_environment_that_refuses_ends_with_4(
    folder: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    message: str,
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "it failed", "out")

    monkeypatch.setattr("mds_ckpt.files.file_operations.FileOperations.write", full)

    code, _, err = run(capsys, "convert", folder, tmp_path / "hf", "--to", "hf")

    assert code == 4
    assert err == f"mds-ckpt: {message}\n"
    assert not list(tmp_path.glob("hf*"))


def test_a_fault_of_our_own_shows_a_traceback_only_on_request(
    folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("mds_ckpt.inspection.summary", broken)

    code, _, err = run(capsys, "inspect", folder)
    assert code == 4
    assert "please report it: KeyError: 'oops'" in err
    with pytest.raises(KeyError):
        run(capsys, "inspect", folder, "--debug")


def every_command(path: Path, other: Path, tmp_path: Path) -> list[list[object]]:
    out = tmp_path / "out"
    return [
        ["inspect", path],
        ["inspect", path, "--json", "--stats"],
        ["verify", path],
        ["convert", path, out, "--to", "mds"],
        ["convert", path, out, "--to", "hf"],
        ["diff", path, other],
        ["diff", other, path],
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [name for name in attacks.REFUSED if "100 MB" not in name])
def test_a_hostile_file_gets_through_no_command(
    name: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """As a file with and without its suffix, and as the weights of a model folder."""
    content = attacks.REFUSED[name][1]()
    alone, plain = tmp_path / "x.safetensors", tmp_path / "x"
    alone.write_bytes(content)
    plain.write_bytes(content)
    hf = tmp_path / "hf"
    run(capsys, "convert", folder, hf, "--to", "hf")
    (hf / "model.safetensors").write_bytes(content)
    big = len(content) > 1_000_000

    for path in (alone, hf) if big else (alone, plain, hf):
        for arguments in every_command(path, folder, tmp_path)[: 1 if big else None]:
            code, out, err = run(capsys, *arguments)
            assert code == 3, (arguments, out, err)
            assert err.count("\n") == 1
            assert err[:-1].isprintable()
            assert "; " in err
            assert not (tmp_path / "out").exists()


@pytest.mark.timeout(60)
def test_pipes_devices_links_and_folders_in_the_way_never_hang(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (pipe, Path("/dev/zero"), loop):
        for arguments in every_command(path, folder, tmp_path):
            assert run(capsys, *arguments)[0] == 3, arguments
    for name in ("manifest.json", "rank-00000.safetensors", "tokenizer.json"):
        for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero"), lambda p: p.mkdir()):
            saved = (folder / name).read_bytes()
            (folder / name).unlink()
            make(folder / name)
            assert run(capsys, "verify", folder)[0] in {1, 3}
            assert run(capsys, "convert", folder, tmp_path / "out", "--to", "hf")[0] == 3
            assert not (tmp_path / "out").exists()
            (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
            (folder / name).write_bytes(saved)
    assert run(capsys, "verify", folder)[0] == 0


def test_the_same_file_linked_twice_is_still_covered_once(folder: Path, capsys: Any) -> None:
    """A hard link is a file like any other; the manifest says what it must hold."""
    path = folder / "rank-00001.safetensors"
    path.unlink()
    os.link(folder / "rank-00000.safetensors", path)

    assert run(capsys, "verify", folder)[0] == 1


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_the_module_runs_and_imports_neither_torch_nor_numpy_to_inspect(folder: Path) -> None:
    code = (
        "import sys\nfrom mds_ckpt.cli import main\n"
        f"assert main(['inspect', {str(folder)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy', 'ml_dtypes'} & set(sys.modules)\n"
        "sys.stderr.write(str(heavy))\n"
    )

    assert python("-c", code).stderr == "set()"
    assert python("-m", "mds_ckpt", "--version").stdout.startswith("mds-ckpt 0.")


def test_converting_never_imports_torch_or_unpickles(folder: Path, tmp_path: Path) -> None:
    """numpy imports pickle itself; what is forbidden is calling it."""
    code = (
        "import pickle, sys\n"
        "def forbidden(*a, **k): raise SystemExit('pickle was used')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = forbidden\n"
        "from mds_ckpt.cli import main\n"
        f"for arguments in (['convert', {str(folder)!r}, {str(tmp_path / 'hf')!r}, '--to', 'hf'],\n"
        f"                  ['diff', {str(folder)!r}, {str(tmp_path / 'hf')!r}]):\n"
        "    assert main(arguments) == 0\n"
        "sys.stderr.write(str({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))\n"
    )

    assert (
        python("-c", code, env={**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}).stderr
        == "set()"
    )


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m mds_ckpt inspect {folder} --json | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, text=True
    )

    assert done.stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pipe that its reader closes")
def test_a_reader_that_has_gone_before_the_tree_is_no_error(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "mds_ckpt", "inspect", str(folder)]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)

    assert (done.returncode, done.stderr) == (0, b"")
