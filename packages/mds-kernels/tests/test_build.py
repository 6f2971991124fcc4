"""Builds with pretended compilers: what is cached, who waits for whom, what failures say."""

import json
import multiprocessing
import os
import signal
import sys

import pytest
import torch

from mds_kernels import why
from mds_kernels.build import library
from mds_kernels.build.compiler import BuildError, build, find_compiler, find_nvcc, read_build
from mds_kernels.build.lock import build_lock, owner_of
from mds_kernels.build.recipe import Recipe, cache_folder, recipe_for
from mds_kernels.build.resources import KernelUsage, beyond_limits, read_usage
from mds_kernels.cli import main

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is built on Windows")

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3mds12norm_forwardI13__nv_bfloat16Li256ELi8EEEvPKT_' \
for 'sm_90'
ptxas info    : Function properties for _ZN3mds12norm_forwardI13__nv_bfloat16Li256ELi8EEEvPKT_S4_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 32 bytes smem
ptxas info    : Compiling entry function '_ZN3mds9sum_partsIfLi256EEEvPKfPT_ii' for 'sm_80'
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 200 registers, used 0 barriers
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A C++ compiler that writes a file and counts its calls."""
    monkeypatch.setattr("mds_kernels.build.compiler.too_old_torch", lambda: None)
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    calls = tmp_path / "calls"
    program.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "pretend 1.0"; exit; fi\n'
        f"echo call >> {calls}\n"
        'while [ "$1" != -o ]; do shift; done\n'
        'echo library > "$2"\n'
    )
    program.chmod(0o755)
    return {"CXX": str(program), "calls": calls}


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def calls(compiler):
    return len(compiler["calls"].read_text().splitlines())


# ---- the cache ---------------------------------------------------------------------------------


def test_a_library_is_built_once(compiler, tmp_path):
    recipe = recipe_for("cpu")

    first = build(recipe, folder=tmp_path / "cache", environment=compiler, force=False)
    again = build(recipe, folder=tmp_path / "cache", environment=compiler, force=False)

    assert first == again
    assert calls(compiler) == 1
    assert first.compiler.endswith("g++: pretend 1.0")
    assert names_in(tmp_path / "cache") == [recipe.name]


def test_force_builds_again(compiler, tmp_path):
    for _ in range(2):
        build(recipe_for("cpu"), folder=tmp_path / "cache", environment=compiler, force=True)

    assert calls(compiler) == 2


def test_other_architectures_are_another_library():
    one, other = (Recipe(device="cuda", architectures=(a,)) for a in ("80", "90"))

    assert one.name != other.name
    assert one.prefix == other.prefix
    assert "arch=compute_90,code=compute_90" in " ".join(
        other.command(compiler="nvcc", output=other.library)
    )


def test_what_a_killed_build_left_is_removed_by_the_next(compiler, tmp_path):
    recipe = recipe_for("cpu")
    left = tmp_path / "cache" / f"{recipe.name}.partial-123"
    left.mkdir(parents=True)
    (left / recipe.library).write_text("half")
    lock = tmp_path / "cache" / f"{recipe.name}.lock"
    lock.write_text('{"pid": 123, "host": "h", "since": 0}')

    build(recipe, folder=tmp_path / "cache", environment=compiler, force=False)

    assert names_in(tmp_path / "cache") == [recipe.name]


def test_a_folder_without_its_library_is_no_build(tmp_path):
    (tmp_path / "report.json").write_text("{")
    assert read_build(tmp_path) is None
    (tmp_path / "report.json").write_text('{"library": "gone.so"}')
    assert read_build(tmp_path) is None


def test_the_folder_is_the_users_cache_or_the_given_one():
    assert str(cache_folder({"MDS_KERNELS_BUILD_DIR": "/b", "XDG_CACHE_HOME": "/c"})) == "/b"
    assert str(cache_folder({"XDG_CACHE_HOME": "/c"})) == "/c/mds-kernels"


# ---- the lock ----------------------------------------------------------------------------------


def test_the_lock_names_its_owner_and_goes_with_it(tmp_path):
    path = tmp_path / "a.lock"

    with build_lock(path):
        owner = owner_of(path)

    assert owner.pid == os.getpid()
    assert str(owner).startswith(f"process {os.getpid()} on ")
    assert not path.exists()


def hold(path, connection):
    with build_lock(path):
        connection.send("held")
        connection.recv()  # for ever


def test_a_killed_owner_holds_nobody_up(tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=hold, args=(tmp_path / "a.lock", theirs))
    other.start()
    assert ours.recv() == "held"
    assert owner_of(tmp_path / "a.lock").pid == other.pid

    os.kill(other.pid, signal.SIGKILL)
    other.join()

    with build_lock(tmp_path / "a.lock"):
        assert owner_of(tmp_path / "a.lock").pid == os.getpid()


def take(path, connection):
    connection.recv()
    with build_lock(path):
        connection.send(owner_of(path).pid)


def test_a_second_builder_waits_and_says_for_whom(tmp_path, caplog, monkeypatch):
    from mds_kernels.build import lock

    path = tmp_path / "a.lock"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=take, args=(path, theirs))
    other.start()  # before the lock is taken: a fork would inherit it
    with build_lock(path):
        ours.send("go")
        assert not ours.poll(0.2)
        assert owner_of(path).pid == os.getpid()
    assert ours.recv() == other.pid
    other.join()

    told = []
    monkeypatch.setattr(lock.logger, "warning", lambda text, *rest: told.append(text % rest))

    def busy(file, flags, state={"asked": 0}):  # noqa: B006
        state["asked"] += 1
        if state["asked"] == 1:
            raise BlockingIOError

    path.write_text('{"pid": 7, "host": "far", "since": 0}')
    with lock._acquired(path, busy, 2, 4):
        pass
    assert told[0].startswith("waiting for the build of process 7 on far")


# ---- failures ----------------------------------------------------------------------------------


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\necho 'library.cpp:1: too hard' >&2\nexit 3\n")
    bad.chmod(0o755)
    monkeypatch.setattr("mds_kernels.build.compiler.too_old_torch", lambda: None)
    monkeypatch.setenv("CXX", str(bad))
    monkeypatch.setenv("MDS_KERNELS_BUILD_DIR", str(tmp_path / "cache"))

    assert main(["build", "--device", "cpu"]) == 4

    assert "ended with 3: library.cpp:1: too hard" in capsys.readouterr().err
    assert names_in(tmp_path / "cache") == []


def test_no_compiler_says_what_to_do(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    monkeypatch.setattr("mds_kernels.build.compiler._nvcc_of_wheels", lambda: None)

    with pytest.raises(BuildError, match="there is no nvcc: set CUDA_HOME"):
        find_compiler("cuda", {"CUDA_HOME": "/nowhere"})
    with pytest.raises(BuildError, match=r"install g\+\+ or clang\+\+, or set CXX"):
        find_compiler("cpu", {})


def test_nvcc_is_found_in_the_wheels_of_nvidia(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)

    assert find_nvcc({}) == str(nvcc)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_is_an_environment_error(tmp_path, monkeypatch, compiler, capsys):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("CXX", compiler["CXX"])
    monkeypatch.setenv("MDS_KERNELS_BUILD_DIR", str(tmp_path / "cache"))

    assert main(["build", "--device", "cpu"]) == 4
    assert "Permission denied" in capsys.readouterr().err


def test_a_cache_that_is_a_file_is_an_environment_error(tmp_path, monkeypatch, compiler, capsys):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("CXX", compiler["CXX"])
    monkeypatch.setenv("MDS_KERNELS_BUILD_DIR", str(tmp_path / "cache"))

    assert main(["build", "--device", "cpu"]) == 4
    assert str(tmp_path / "cache") in capsys.readouterr().err


def test_an_old_torch_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")

    with pytest.raises(BuildError, match=r"need torch 2\.13 or newer; this is 2\.9\.1"):
        build(recipe_for("cpu"), folder=tmp_path, environment={}, force=False)
    assert "need torch 2.13" in library.why_no_library("cpu", {})


def test_an_unknown_architecture_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["build", "--arch", "80,seventy"])

    assert caught.value.code == 2
    assert "'seventy' is no architecture from 80" in capsys.readouterr().err


# ---- registers ---------------------------------------------------------------------------------


def test_registers_and_spills_are_read_from_what_ptxas_says():
    assert read_usage(PTXAS) == (
        KernelUsage("norm_forward<bfloat16, 8 at a time>", "sm_90", 40, 0),
        KernelUsage("sum_parts<float32>", "sm_80", 200, 28),
    )


def test_a_kernel_that_spills_or_is_not_in_the_table_is_beyond_the_limits():
    fine = KernelUsage("norm_forward<float32, 4 at a time>", "sm_90", 48, 0)
    unknown = KernelUsage("new_kernel<float32>", "sm_90", 1, 0)

    assert beyond_limits([fine]) == []
    assert len(beyond_limits([*read_usage(PTXAS), unknown])) == 2


def test_build_prints_the_table_and_fails_on_a_spill(compiler, tmp_path, monkeypatch, capsys):
    usage = read_usage(PTXAS)
    monkeypatch.setattr("mds_kernels.build.compiler.read_usage", lambda log: usage)
    monkeypatch.setenv("CXX", compiler["CXX"])
    monkeypatch.setenv("MDS_KERNELS_BUILD_DIR", str(tmp_path / "cache"))

    assert main(["build", "--device", "cpu"]) == 1

    told = capsys.readouterr().out
    assert "norm_forward<bfloat16, 8 at a time>  40" in told
    assert "PROBLEM: sum_parts<float32> on sm_80 spills" in told
    assert main(["build", "--device", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["beyond_limits"][0]["registers"] == 200


# ---- which library runs here -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "fits"),
    [((8, 0), True), ((8, 6), True), ((9, 0), True), ((12, 0), True), ((7, 5), False)],
)
def test_a_gpu_runs_its_own_code_or_newer_ones_the_ptx(
    compiler, tmp_path, monkeypatch, capability, fits
):
    monkeypatch.setattr("mds_kernels.build.compiler.find_compiler", lambda *_: compiler["CXX"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    place = {"MDS_KERNELS_BUILD_DIR": str(tmp_path / "cache")}
    recipe = recipe_for("cuda", architectures=("80", "90"))
    assert "mds-kernels build" in library.why_no_library("cuda", place)

    build(recipe, folder=tmp_path / "cache", environment={}, force=False)

    told = library.why_no_library("cuda", place)
    assert told is None if fits else "built for 80.90, which does not run here" in told


def test_a_library_that_can_not_be_loaded_is_a_reason_and_no_error(compiler, tmp_path, monkeypatch):
    from mds_kernels.backends.cuda.library import why_not

    monkeypatch.setattr("mds_kernels.build.compiler.find_compiler", lambda *_: compiler["CXX"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    build(recipe_for("cuda"), folder=tmp_path, environment={}, force=False)

    told = why_not("cuda", {"MDS_KERNELS_BUILD_DIR": str(tmp_path)})

    assert "can't be loaded" in told
    assert told.endswith("mds-kernels build --force")


def test_without_a_gpu_the_reason_is_just_that():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")

    assert dict(why("add_rms_norm").others)["cuda"] == "torch sees no CUDA device"
