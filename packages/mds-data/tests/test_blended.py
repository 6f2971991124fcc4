import json

import numpy as np
import pytest
from store_material import case_folder, golden_datasets, write_small

from mds_data import BlendedDataset, GPTDataset, gpt_datasets, open_store
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


def test_a_blend_of_nothing_is_refused():
    with pytest.raises(ValueError, match="needs at least one dataset"):
        BlendedDataset([], [], num_samples=4)


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


def seen_of(blend, start, stop):
    return [int(blend[place]["number"][0]) for place in range(start, stop)]


@pytest.mark.parametrize("order", ["balanced", "megatron"])
def test_a_change_on_the_way_loses_and_repeats_no_sample(order):
    datasets = [numbered(600, 0), numbered(600, 1000), numbered(600, 2000)]
    blend = BlendedDataset(datasets[:2], [3, 1], num_samples=1000, order=order)
    before = seen_of(blend, 0, 217)

    changed = blend.changed([1, 1, 2], at=217, more=datasets[2:])
    again = changed.changed([0, 1, 0], at=500)

    assert seen_of(again, 0, 217) == seen_of(changed, 0, 217) == before
    assert seen_of(again, 217, 500) == seen_of(changed, 217, 500)
    for other, stop in ((changed, 1000), (again, 900)):
        numbers = seen_of(other, 0, stop)
        for source in range(3):
            mine = [number for number in numbers if number // 1000 == source]
            assert mine == list(range(1000 * source, 1000 * source + len(mine)))
            assert other.counts(stop)[source] == len(mine)
    last = [number // 1000 for number in seen_of(again, 500, 900)]
    # at a tie the original takes the first source, even one of weight 0
    assert last.count(1) >= (400 if order == "balanced" else 399)
    share = [
        blend_share - old
        for blend_share, old in zip(changed.counts(617), changed.counts(217), strict=True)
    ]
    assert np.abs(np.array(share) - [100, 100, 200]).max() <= (1 if order == "balanced" else 4)


def test_a_changed_blend_is_made_again_from_its_state():
    datasets = [numbered(600, 0), numbered(600, 1000)]
    blend = BlendedDataset(datasets, [3, 1], num_samples=900).changed([1, 5], at=333)

    state = json.loads(json.dumps(blend.state_dict()))

    twin = BlendedDataset.from_state_dict(datasets, state)
    assert seen_of(twin, 0, 900) == seen_of(blend, 0, 900)


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        ([(5, [1, 1])], "phases must start at 0"),
        ([(0, [1, 1]), (0, [1, 2])], "later and later"),
        ([(0, [1, 1]), (4, [1])], "2 datasets need as many weights, but 1 were given"),
    ],
)
def test_phases_out_of_order_are_named(phases, reason):
    with pytest.raises(ValueError, match=reason):
        BlendedDataset([numbered(5, 0), numbered(5, 0)], num_samples=9, phases=phases)


class Sized(list):
    """Samples of so many tokens each."""

    def __init__(self, samples, tokens_per_sample):
        super().__init__(samples)
        self.tokens_per_sample = tokens_per_sample


def test_shares_of_tokens_follow_the_size_of_samples():
    long, short = Sized(numbered(900, 0), 300.0), Sized(numbered(900, 1000), 100.0)
    blend = BlendedDataset([long, short], [0.75, 0.25], num_samples=1000, by="tokens")
    for place in range(1, 1000, 37):
        counts = blend.counts(place)
        tokens = [300 * counts[0], 100 * counts[1]]
        assert abs(tokens[0] - 0.75 * sum(tokens)) <= 300
    with pytest.raises(ValueError, match="dataset 1 does not know its tokens_per_sample"):
        BlendedDataset([long, numbered(5, 0)], [1, 1], by="tokens")


def test_a_source_of_this_package_goes_on_with_its_next_epoch(tmp_path):
    write_small(tmp_path / "s", [list(range(400))])
    dataset = GPTDataset(open_store(tmp_path / "s"), seq_length=10)
    longer = GPTDataset(open_store(tmp_path / "s"), seq_length=10, num_samples=100)
    blend = BlendedDataset([dataset], num_samples=100)
    assert len(dataset) == 39
    for place in range(100):
        np.testing.assert_array_equal(blend[place]["tokens"], longer[place]["tokens"])


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_a_run_s_datasets_come_from_one_blend_or_one_a_part(tmp_path, order):
    for number, name in enumerate("ab"):
        write_small(tmp_path / name, [[number * 100 + n] * 50 for n in range(40)])
    stores = [open_store(tmp_path / name) for name in "ab"]
    counts = {"train": 200, "valid": 20, "test": 0}
    joint = [(3, stores[0]), (1, stores[1])]

    one = gpt_datasets(joint, seq_length=9, num_samples=counts, split="80,20,0", order=order)
    own = gpt_datasets(
        {"train": joint, "valid": [(1, stores[1])]}, seq_length=9, num_samples=counts, order=order
    )

    assert list(one) == list(own) == ["train", "valid"]
    asked = megatron_counts([3, 1], num_samples=200)
    assert len(one["train"]) == (sum(asked) if order == "megatron" else 200)
    assert one["train"].counts(200) == own["train"].counts(200) == [150, 50]
    assert isinstance(own["valid"], GPTDataset)
    tokens = {int(t) for n in range(20) for t in one["valid"][n]["tokens"]}
    assert tokens <= {*range(32, 40), *range(132, 140)}
    train = {int(t) for n in range(200) for t in own["train"][n]["tokens"]}
    assert train >= {*range(40)}
    with pytest.raises(ValueError, match="parts are train, valid and test"):
        gpt_datasets({"holdout": joint}, seq_length=9, num_samples=counts)
