"""Megatron's order, against what the original wrote and a plain reading of its rule."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_material import golden_datasets

from mds_data import GPTDataset, open_store
from mds_data.datasets.megatron_order import MegatronOrder, sample_borders
from mds_data.store.megatron import import_megatron

SETS = (
    "A_single_lt1epoch",
    "B_single_2.4epochs_separate_last",
    "D_seq1024_seed42",
    "F_separate_paths",
)
PARTS = ("train", "valid", "test")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("as_store", [False, True])
def test_indices_and_samples_are_those_of_the_original(tmp_path, name, part, as_store):
    folder = golden_datasets()
    facts = json.loads((folder / "golden_meta.json").read_text())[name]
    if facts["lens"].get(part) is None:
        pytest.skip("the original made no such part")
    joint = facts["data_prefix"] is not None
    prefix = folder / (facts["data_prefix"] if joint else facts[part])[0]
    if as_store:
        import_megatron(prefix, tmp_path / "s")
    golden = np.load(folder / f"golden_{name}.npz")

    dataset = GPTDataset(
        open_store(tmp_path / "s" if as_store else prefix),
        seq_length=facts["seq"],
        num_samples=facts["n"][PARTS.index(part)],
        seed=facts["seed"],
        split=(facts["splits"], part) if joint else None,
        order="megatron",
    )

    order = dataset.megatron_order
    assert len(dataset) == facts["lens"][part]
    for index, array in (
        ("doc", order.doc_index),
        ("sample", order.sample_index),
        ("shuffle", order.shuffle_index),
    ):
        expected = golden[f"{part}_0_{index}_idx"]
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    samples = np.stack([dataset.window(number) for number in range(len(dataset))])
    np.testing.assert_array_equal(samples[:50], golden[f"{part}_samples"])
    digest = hashlib.sha256(samples.astype(np.int64).tobytes()).hexdigest()
    assert digest == facts[f"{part}_all_samples_sha256_int64"]


def plain_sample_index(lengths, documents, seq_length, samples):
    """The original's loop, token by token."""
    row = [
        (place, offset)
        for place, number in enumerate(documents)
        for offset in range(lengths[number])
    ]
    return [(0, 0)] + [row[sample * seq_length] for sample in range(1, samples + 1)]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda x: sum(x) > 1),
    seq_length=st.integers(1, 9),
    num_samples=st.integers(0, 30),
    seed=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_the_sample_index_is_the_plain_loop_s(lengths, seq_length, num_samples, seed):
    order = MegatronOrder(
        np.array(lengths),
        first=0,
        stop=len(lengths),
        seq_length=seq_length,
        num_samples=num_samples,
        seed=seed,
    )

    expected = plain_sample_index(lengths, order.doc_index.tolist(), seq_length, len(order))
    assert [tuple(row) for row in order.sample_index.tolist()] == expected
    row = [(number, at) for number in order.doc_index.tolist() for at in range(lengths[number])]
    for number in range(len(order)):
        start = int(order.shuffle_index[number]) * seq_length
        pieces = [
            (document, at)
            for document, first, stop in order.pieces(number)
            for at in range(first, stop)
        ]
        assert pieces == row[start : start + seq_length + 1]
    assert len(order) >= num_samples
    assert sorted(order.shuffle_index.tolist()) == list(range(len(order)))


@pytest.mark.parametrize("longest", [3, 400, 2**29])
@pytest.mark.parametrize("count", [1, 31, 131_072, 300_003])
def test_borders_of_many_documents_are_those_of_a_running_sum(longest, count):
    random = np.random.default_rng(count)
    lengths = random.integers(0, longest, 5000)
    documents = random.integers(0, len(lengths), count).astype(np.int32)
    documents[0] = lengths.argmax()
    ends = np.concatenate([[0], np.cumsum(lengths[documents])])
    seq_length = int(ends[-1]) // 997 + 1
    samples = (int(ends[-1]) - 1) // seq_length

    index = sample_borders(lengths, documents, samples=samples, seq_length=seq_length)

    borders = np.arange(samples + 1) * seq_length
    places = np.searchsorted(ends, borders, side="right") - 1
    np.testing.assert_array_equal(index[:, 0], places)
    np.testing.assert_array_equal(index[:, 1], borders - ends[places])
