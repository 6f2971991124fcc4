import json

import numpy as np
import pytest
from store_material import case_folder, golden_datasets, write_small

from mds_data import BlendedDataset, GPTDataset, open_store
from mds_data.sampling.blend import megatron_blend, megatron_counts


def numbered(count, base):
    return [{"number": np.array([base + number])} for number in range(count)]


def numbers_of(blend):
    return [int(blend[place]["number"][0]) for place in range(len(blend))]


def test_weights_like_the_sizes_show_each_sample_once():
    for weights in ([10, 20], [1, 2], [0.3333, 0.6667], None):
        blend = BlendedDataset([numbered(10, 0), numbered(20, 100)], weights, num_samples=30)
        assert sorted(numbers_of(blend)) == [*range(10), *range(100, 120)]


def test_a_source_that_is_too_short_begins_again():
    blend = BlendedDataset([numbered(10, 0), numbered(20, 100)], [1, 1], num_samples=30)
    numbers = [number for number in numbers_of(blend) if number < 100]
    assert numbers == [*range(10), *range(5)]


@pytest.mark.parametrize("order", ["balanced", "megatron"])
@pytest.mark.parametrize(
    ("weights", "count", "most"), [([0.001, 0.999], 1000, 2), ([0.0001, 0.9999], 100, 1)]
)
def test_small_weights_do_no_harm(order, weights, count, most):
    datasets = [numbered(10, 0), numbered(20, 100)]
    blend = BlendedDataset(datasets, weights, num_samples=count, order=order)
    assert sum(number < 100 for number in numbers_of(blend)) <= most


def test_a_weight_of_zero_leaves_a_source_out():
    blend = BlendedDataset([numbered(0, 0), numbered(5, 100)], [0, 1], num_samples=12)
    assert min(numbers_of(blend)) == 100


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1], "2 datasets need as many weights, but 1 were given"),
        ([1, 2, 3], "2 datasets need as many weights"),
        ([1, -2], "weight 1 is -2"),
        ([float("nan"), 1], "weight 0 is nan"),
        ([0, 0], "at least one above 0"),
    ],
)
def test_wrong_weights_are_named(weights, reason):
    with pytest.raises(ValueError, match=reason):
        BlendedDataset([numbered(2, 0), numbered(2, 0)], weights, num_samples=4)


def test_an_empty_source_with_a_weight_is_named():
    with pytest.raises(ValueError, match="dataset 1 has weight 1 and no sample"):
        BlendedDataset([numbered(2, 0), []], [1, 1], num_samples=4)


def test_samples_outside_are_an_index_error():
    blend = BlendedDataset([numbered(2, 0)], num_samples=4)
    assert blend.source(-1) == (0, 1)
    for place in (4, -5):
        with pytest.raises(IndexError, match=f"sample {place} of 4"):
            blend[place]


def test_the_original_s_blend_of_golden_datasets():
    folder = golden_datasets()
    names = ("pydoc_text_document", "licenses_text_document")
    counts = megatron_counts([0.3, 0.7], num_samples=500)
    datasets = [
        GPTDataset(
            open_store(folder / name),
            seq_length=64,
            num_samples=count,
            split=("90,5,5", "train"),
            order="megatron",
        )
        for name, count in zip(names, counts, strict=True)
    ]
    blend = BlendedDataset(datasets, [0.3, 0.7], num_samples=sum(counts), order="megatron")
    sources, numbers = megatron_blend([0.3, 0.7], count=sum(counts))
    for place in range(0, len(blend), 17):
        expected = datasets[sources[place]][int(numbers[place])]
        np.testing.assert_array_equal(blend[place]["tokens"], expected["tokens"])


def test_the_blend_of_a_bug_report(tmp_path):
    folder = case_folder("B06")
    datasets = []
    for name in ("A", "B"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines()
        documents = [[*json.loads(line)["text"].encode(), 256] for line in lines]
        write_small(tmp_path / name, documents)
        datasets.append(GPTDataset(open_store(tmp_path / name), seq_length=8))
    assert [len(dataset) for dataset in datasets] == [9, 19]

    blend = BlendedDataset(datasets, [9, 19])

    seen = {tuple(blend[place]["tokens"]) for place in range(28)}
    assert len(blend) == 28
    assert len(seen) == 28
