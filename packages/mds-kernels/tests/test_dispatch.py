from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import mds_kernels
from mds_kernels import dispatch
from mds_kernels.dispatch import BackendError, check_ranks_agree, implementation, why
from mds_kernels.preference import unknown_variables, use_backend
from mds_kernels.registry import BACKENDS, OPS, Implementation
from mds_kernels.testing import run_ranks


@pytest.mark.parametrize("op", OPS)
def test_every_op_of_the_registry_is_public_and_runs_on_a_cpu(op):
    assert callable(getattr(mds_kernels, op))
    assert why(op).backend == "torch"
    for one in OPS[op]:
        assert one.target.startswith(f"mds_kernels.backends.{one.backend}.")
        assert one.backend in BACKENDS


def test_the_choice_names_the_others_and_why_not():
    choice = why("layer_norm")

    assert [backend for backend, _ in choice.others] == ["apex"]
    assert str(choice).startswith("layer_norm on cpu in float32: torch")
    assert "not apex: " in str(choice)


def test_an_argument_that_cannot_be_met_raises_with_the_reason():
    with pytest.raises(BackendError, match="the argument backend asks for apex, which can't run"):
        mds_kernels.layer_norm(torch.ones(2, 4), torch.ones(4), backend="apex")


def test_an_argument_for_a_backend_the_op_lacks_raises():
    with pytest.raises(BackendError, match="which this op does not have; it has torch"):
        why("bias_gelu", backend="apex")


def test_a_wish_for_all_ops_passes_over_those_without_that_backend(monkeypatch):
    monkeypatch.setenv("MDS_KERNELS", "apex")

    choice = why("bias_gelu")

    assert choice.backend == "torch"
    assert choice.reason == "MDS_KERNELS asks for apex, not had; the only one"
    with pytest.raises(BackendError, match="MDS_KERNELS asks for apex"):
        why("layer_norm")


def test_argument_beats_context_beats_environment(monkeypatch):
    monkeypatch.setenv("MDS_KERNELS_RMS_NORM", "apex")

    with pytest.raises(BackendError, match="MDS_KERNELS_RMS_NORM asks"):
        why("rms_norm")
    with use_backend("torch"):
        assert why("rms_norm").reason == "asked for by use_backend"
    with use_backend("apex", op="rms_norm"), pytest.raises(BackendError, match="use_backend"):
        why("rms_norm")
    assert why("rms_norm", backend="torch").reason == "asked for by the argument backend"


def test_a_context_ends():
    with use_backend("torch", op="bias_gelu"):
        pass

    assert why("bias_gelu").reason == "the only one"


@pytest.mark.parametrize("variable", ["MDS_KERNELS", "MDS_KERNELS_ROPE"])
def test_a_misspelt_backend_in_the_environment_is_an_error(monkeypatch, variable):
    monkeypatch.setenv(variable, "tritn")

    with pytest.raises(BackendError, match=f"{variable} asks for backend 'tritn'.*auto, torch"):
        why("rope")


def test_a_misspelt_op_is_an_error_and_a_misspelt_variable_is_found(monkeypatch):
    monkeypatch.setenv("MDS_KERNELS_ROEP", "torch")

    assert unknown_variables() == ["MDS_KERNELS_ROEP"]
    with pytest.raises(BackendError, match="no op 'roep'"), use_backend("torch", op="roep"):
        pass
    with pytest.raises(BackendError, match="no op 'roep'"):
        why("roep")


def test_auto_asks_for_nothing(monkeypatch):
    monkeypatch.setenv("MDS_KERNELS", "auto")

    run = implementation("rope", device="cpu", dtype=torch.float32, backend=None)

    assert run.__module__ == "mds_kernels.backends.torch.rope"


def test_inside_a_compiled_graph_auto_takes_plain_torch_for_what_the_compiler_fuses(monkeypatch):
    other = Implementation(backend="cpu", target="mds_kernels.backends.torch.glu:swiglu")
    monkeypatch.setattr(dispatch, "OPS", {**OPS, "swiglu": (other, *OPS["swiglu"])})
    dispatch._choose.cache_clear()

    eager, compiling = why("swiglu"), why("swiglu", compiling=True)
    wished = why("swiglu", compiling=True, backend="cpu")
    dispatch._choose.cache_clear()

    assert eager.backend == "cpu"
    assert compiling.backend == "torch"
    assert compiling.reason == "which torch.compile fuses"
    assert wished.backend == "cpu"


def test_what_runs_on_request_only_is_passed_over(monkeypatch):
    other = replace(OPS["rope"][-1], backend="cpu", automatic_on=frozenset())
    monkeypatch.setattr(dispatch, "OPS", {**OPS, "rope": (other, *OPS["rope"])})
    dispatch._choose.cache_clear()

    assert ("cpu", "usable, on request only") in why("rope").others
    assert why("rope", backend="cpu").backend == "cpu"
    dispatch._choose.cache_clear()


def told_by_real_ranks():
    """Return what a rank is told when all are equal, and when rank 1 is odd."""
    told = [complaint()]
    if dist.get_rank() == 1:
        dispatch.OPS = {**OPS, "rope": (replace(OPS["rope"][-1], backend="cpu"),)}
        dispatch._choose.cache_clear()
    return [*told, complaint()]


def complaint():
    try:
        check_ranks_agree(device="cpu", dtype=torch.float32, group=dist.group.WORLD)
    except BackendError as error:
        return str(error)
    return None


def test_real_ranks_are_all_told_when_one_is_odd():
    first, second = run_ranks(told_by_real_ranks, 2)

    assert first == second
    assert first[0] is None
    assert "different backends of rope (rank 0 torch, rank 1 cpu)" in first[1]


class _Group:
    def size(self):
        return 2


@pytest.fixture
def other_rank(monkeypatch):
    """Let rank 1 of two answer with what the test puts here on top of rank 0's choices."""
    answer = {}

    def gather(everyone, mine, *, group):
        for row in everyone:
            row.copy_(mine)
        for op, backend in answer.items():
            everyone[1][list(OPS).index(op)] = BACKENDS.index(backend)

    monkeypatch.setattr(dist, "all_gather", gather)
    return answer


def test_ranks_that_run_the_same_backends_agree(other_rank):
    check_ranks_agree(device="cpu", dtype=torch.float32, group=_Group())

    assert other_rank == {}


def test_ranks_that_would_run_different_backends_are_told_so(other_rank):
    other_rank["rms_norm"] = "apex"

    with pytest.raises(BackendError, match=r"rms_norm \(rank 0 torch, rank 1 apex\); set MDS_KERN"):
        check_ranks_agree(device="cpu", dtype=torch.float32, group=_Group())
