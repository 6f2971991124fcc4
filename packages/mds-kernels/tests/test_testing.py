import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist

from mds_kernels.testing import TOLERANCES, RanksFailedError, relative_error, run_ranks


def add_up(first, second):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return {
        "total": total,
        "sum": first + second,
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")},
        "extensions": os.environ["TORCH_EXTENSIONS_DIR"],
    }


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()  # without an end, unless somebody kills this rank


def wait_for_ever():
    while True:
        pass


def test_ranks_return_their_results_in_order():
    results = run_ranks(add_up, 2, 3, 4)

    assert [result["total"].item() for result in results] == [1.0, 1.0]
    assert [result["sum"] for result in results] == [7, 7]
    assert [result["threads"] for result in results] == [1, 1]
    assert results[1]["environment"] == {"RANK": "1", "WORLD_SIZE": "2"}
    assert results[0]["extensions"] != results[1]["extensions"]


def test_a_rank_that_raises_ends_all_and_shows_its_traceback():
    with pytest.raises(RanksFailedError, match="rank one has had enough") as caught:
        run_ranks(fail_on_rank_one, 2, timeout=60)

    assert "--- rank 0" in str(caught.value)
    assert "Traceback" in str(caught.value)


def test_ranks_that_do_not_end_are_killed():
    with pytest.raises(RanksFailedError, match="1 of 1 ranks still ran after 2 s"):
        run_ranks(wait_for_ever, 1, timeout=2)

    assert not multiprocessing.active_children()


def test_the_error_is_relative_to_the_reference():
    assert relative_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)


def test_the_error_against_zero_is_absolute():
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0


def test_nan_is_within_no_tolerance():
    error = relative_error(torch.tensor([torch.nan]), torch.ones(1))

    assert not any(error <= tolerance for tolerance in TOLERANCES.values())


def test_an_error_between_shapes_that_differ_is_refused():
    with pytest.raises(ValueError, match=r"actual \(2,\), reference \(1,\)"):
        relative_error(torch.ones(2), torch.ones(1))


def test_the_table_of_tolerances_cannot_be_changed():
    with pytest.raises(TypeError):
        TOLERANCES["layout_float64"] = 1.0
