"""Easy samples first, every sample in the end, and the same order after any stop."""

import numpy as np
import pytest
from store_material import random_documents, write_small

from mds_data import (
    CurriculumOrder,
    Difficulty,
    DiscretePacing,
    GPTDataset,
    LengthCurriculum,
    ResumableSampler,
    RootPacing,
    open_store,
)
from mds_data.datasets.curriculum import reshaped, truncated

hardness = np.random.default_rng(0).permutation(1000).astype(float)
GROWING = RootPacing(minimum=100, maximum=1000, total=5000, step=100)


def test_no_sample_comes_before_its_time_and_none_is_forgotten():
    order = CurriculumOrder([Difficulty(values=hardness, pacing=GROWING)], seed=3)
    numbers = order.indices(0, 20_000)

    for start in range(0, 6000, 10):
        allowed = np.flatnonzero(hardness <= GROWING.at(start))
        assert order.allowed(start) == len(allowed)
        assert set(numbers[start : start + 10].tolist()) <= set(
            np.flatnonzero(hardness <= GROWING.at(start + 10)).tolist()
        )
    assert set(numbers.tolist()) == set(range(1000))
    assert order.left_out == 0


def test_a_sample_comes_again_only_after_its_cluster_was_shown():
    pacing = DiscretePacing(difficulties=(299, 999), ends=(149,))
    order = CurriculumOrder([Difficulty(values=hardness, pacing=pacing)], seed=3)
    numbers = order.indices(0, 1150)

    first = set(np.flatnonzero(hardness <= 299).tolist())
    easy = [number for number in numbers.tolist() if number in first]
    hard = [number for number in numbers.tolist() if number not in first]
    assert len(easy[:300]) == len(set(easy[:300])) == 300
    assert len(hard) == len(set(hard))
    late = numbers[150:1150]
    assert abs(np.isin(late, list(first)).sum() - 300) <= 1  # by their share from then on


def test_parts_of_the_order_are_the_order():
    order = CurriculumOrder([Difficulty(values=hardness, pacing=GROWING)], seed=3)
    whole = order.indices(0, 8000)
    twin = CurriculumOrder([Difficulty(values=hardness, pacing=GROWING)], seed=3)
    for start, count in ((7990, 10), (0, 1), (495, 20), (4000, 3000), (3, 0)):
        np.testing.assert_array_equal(twin.indices(start, count), whole[start : start + count])
    other = CurriculumOrder([Difficulty(values=hardness, pacing=GROWING)], seed=4)
    assert (other.indices(0, 100) != whole[:100]).any()
    far = twin.indices(10**12, 5)
    np.testing.assert_array_equal(far, order.indices(10**12 - 3, 8)[3:])


def test_percentiles_compare_ranks():
    skewed = np.exp(hardness / 50)
    pacing = RootPacing(minimum=10, maximum=100, total=900, step=10)
    order = CurriculumOrder([Difficulty(values=skewed, pacing=pacing, by="percentile")])
    assert order.allowed(0) == 100
    assert order.allowed(450) == 500
    assert order.allowed(900) == 1000


def test_all_difficulties_must_allow_a_sample():
    other = np.random.default_rng(1).permutation(1000).astype(float)
    slow = RootPacing(minimum=200, maximum=1000, total=8000, step=100)
    order = CurriculumOrder(
        [Difficulty(values=hardness, pacing=GROWING), Difficulty(values=other, pacing=slow)]
    )
    for place in (0, 1000, 4000, 7999, 8000):
        both = (hardness <= GROWING.at(place)) & (other <= slow.at(place))
        assert order.allowed(place) == both.sum()


def test_harder_samples_than_the_maximum_never_come():
    pacing = DiscretePacing.constant(499)
    order = CurriculumOrder([Difficulty(values=hardness, pacing=pacing)])
    assert order.left_out == 500
    assert sorted(order.indices(0, 500).tolist()) == np.flatnonzero(hardness < 500).tolist()


def test_a_beginning_without_samples_is_named():
    pacing = DiscretePacing(difficulties=(-1, 9), ends=(5,))
    with pytest.raises(ValueError, match="the easiest come from sample 6 on"):
        CurriculumOrder([Difficulty(values=hardness, pacing=pacing)])
    both = [Difficulty(values=values, pacing=GROWING) for values in (hardness, hardness[:5])]
    with pytest.raises(ValueError, match="needs a value for every sample"):
        CurriculumOrder(both)


def test_a_sampler_deals_the_curriculum_out_to_any_ranks():
    order = CurriculumOrder([Difficulty(values=hardness, pacing=GROWING)])
    for ranks in (1, 2, 4):
        samplers = [
            ResumableSampler(1000, global_batch_size=8, rank=rank, num_ranks=ranks, order=order)
            for rank in range(ranks)
        ]
        for step in (0, 100, 1000):
            batch = np.concatenate([sampler.batch(step) for sampler in samplers], axis=1)
            np.testing.assert_array_equal(batch.ravel(), order.indices(8 * step, 8))


def test_short_samples_come_first(tmp_path):
    documents = [np.append(d % 900, 999) for d in random_documents(60, longest=60)]
    write_small(tmp_path / "s", documents, eod_id=999)
    dataset = GPTDataset(open_store(tmp_path / "s"), seq_length=64, reset_attention_mask=True)
    pacing = RootPacing(minimum=16, maximum=64, total=3, step=16)
    curriculum = LengthCurriculum(dataset, pacing, global_batch_size=4)

    lengths = [len(curriculum[number]["tokens"]) for number in range(len(dataset))]

    assert lengths[:13] == [16] * 4 + [32] * 4 + [48] * 4 + [64]
    assert len(curriculum) == len(dataset)
    for number in range(len(dataset)):
        short, whole = curriculum[number], dataset[number]
        size = len(short["tokens"])
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(short[name], whole[name][:size])
        borders = short["cumulative_lengths"]
        assert borders[-1] == size
        assert set(borders[:-1].tolist()) <= set(whole["cumulative_lengths"].tolist())
        assert (np.diff(borders) > 0).all()


def test_single_numbers_of_a_sample_are_left_alone():
    sample = {"tokens": np.arange(9), "truncated": np.array(1)}
    assert truncated(sample, 4)["tokens"].tolist() == [0, 1, 2, 3]
    assert truncated(sample, 4)["truncated"] == 1


def test_a_batch_is_reshaped_to_more_and_shorter_samples():
    tokens = np.arange(20).reshape(2, 10)
    batch = {"tokens": tokens, "position_ids": np.tile(np.arange(10), (2, 1))}
    short = reshaped(batch, 3)
    assert short["tokens"].tolist()[:3] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert short["position_ids"].tolist() == [[0, 1, 2]] * 6
    with pytest.raises(ValueError, match="cumulative_lengths has 1 dimensions"):
        reshaped({"cumulative_lengths": np.arange(4)}, 3)
