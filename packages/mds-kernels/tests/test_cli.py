import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from mds_kernels import bench, cli
from mds_kernels.apex_state import inspect_apex
from mds_kernels.cli import main


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    inspect_apex.cache_clear()
    return tmp_path


def test_doctor_tells_versions_apex_and_every_choice(capsys):
    code = main(["doctor", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {"torch", "triton", "nvcc", "NVIDIA driver"} <= told["versions"].keys()
    assert told["apex"]["state"] == "absent"
    assert {choice["op"] for choice in told["ops"]} >= {"linear_cross_entropy", "rope"}
    assert told["problems"] == []


def test_doctor_says_it_in_text_too(capsys):
    assert main(["doctor"]) == 0

    told = capsys.readouterr().out
    assert "bias_gelu on cpu in float32: torch (the only one)" in told
    assert "  not apex: no apex is installed" in told


def test_a_wish_that_cannot_be_met_is_a_finding(capsys, monkeypatch):
    monkeypatch.setenv("MDS_KERNELS", "apex")

    assert main(["doctor"]) == 1
    assert "PROBLEM: layer_norm: MDS_KERNELS asks for apex" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "told"),
    [("MDS_KERNELS", "asks for backend 'tritn'"), ("MDS_KERNELS_ROEP", "names no op")],
)
def test_a_misspelt_wish_is_one_finding(capsys, monkeypatch, variable, told):
    monkeypatch.setenv(variable, "tritn")

    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.count(told) == 1


def test_a_stale_lock_is_found_then_cleared(capsys, own_folder):
    lock = own_folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))

    assert main(["doctor"]) == 1
    assert "build lock that no process holds" in capsys.readouterr().out
    assert main(["doctor", "--clear-stale-locks"]) == 0
    assert f"removed the stale build lock {lock}" in capsys.readouterr().out
    assert not lock.exists()


def test_verify_passes_here_and_prints_a_table(capsys):
    assert main(["verify", "--op", "rope"]) == 0

    told = capsys.readouterr().out
    assert told.startswith("op")
    assert "12 of 12 checks passed" in told


def test_verify_fails_on_a_wrong_op(capsys, monkeypatch):
    check = cli.CASES[0]
    wrong = replace(check, run=lambda **inputs: [1.1 * x for x in check.run(**inputs)])
    monkeypatch.setattr(cli, "CASES", (wrong,))

    assert main(["verify", "--json"]) == 1
    assert [row["passed"] for row in json.loads(capsys.readouterr().out)] == [False] * 4


def test_verify_goes_on_behind_an_op_that_raises(capsys, monkeypatch):
    def broken(**_):
        raise RuntimeError("no kernel image\nfor this device")

    check = cli.CASES[0]
    monkeypatch.setattr(cli, "CASES", (replace(check, run=broken), check))

    assert main(["verify"]) == 1
    told = capsys.readouterr().out
    assert told.count("RuntimeError: no kernel image ") == 4
    assert "4 of 8 checks passed" in told


def test_a_device_that_is_not_here_is_an_environment_error(capsys):
    if cli.torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    assert main(["verify", "--device", "cuda"]) == 4
    assert "sees no CUDA device" in capsys.readouterr().err


def test_verify_of_a_backend_that_can_not_run_says_why_instead_of_nothing(capsys):
    assert main(["verify", "--backend", "apex"]) == 4
    assert "no apex is installed" in capsys.readouterr().err

    assert main(["verify", "--op", "rope", "--backend", "apex"]) == 4
    assert "rope has no backend apex" in capsys.readouterr().err


def test_verify_names_the_backend_of_every_check(capsys):
    assert main(["verify", "--op", "bias_gelu", "--backend", "torch", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert {row["backend"] for row in told} == {"torch"}


def test_bench_measures_time_memory_and_error(capsys, monkeypatch):
    # One contestant, as each is measured once more in a process of its own.
    ours = {"mds_kernels": bench.CONTESTANTS["mds_kernels"]}
    monkeypatch.setattr(bench, "CONTESTANTS", ours)
    size = ["--tokens", "512", "--hidden-size", "64", "--vocab-size", "8192", "--repeats", "1"]

    assert main(["bench", "--json", *size]) == 0

    told = json.loads(capsys.readouterr().out)
    (figure,) = told["figures"]
    assert told["workload"]["vocab_size"] == 8192
    assert figure["contestant"] == "mds_kernels"
    assert figure["seconds"] > 0
    assert figure["loss_error"] < 1e-5
    if sys.platform == "linux":  # whole fp32 logits and their gradient would be 32 MiB
        assert 0 < figure["peak_mebibytes"] < 32


def test_all_contestants_compute_the_same_loss():
    inputs = bench.Workload(tokens=16, hidden_size=8, vocab_size=32).inputs()

    losses = [float(contestant(*inputs).detach()) for contestant in bench.CONTESTANTS.values()]

    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["bench", "--tokens", "0"]])
def test_wrong_usage_exits_with_two(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pipe that its reader closes")
def test_a_reader_that_has_gone_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "mds_kernels", "doctor"]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)

    assert done.returncode == 0, done.stderr
    # torch itself may warn there that numpy is absent.
    assert b"mds-kernels:" not in done.stderr
    assert b"Error" not in done.stderr
