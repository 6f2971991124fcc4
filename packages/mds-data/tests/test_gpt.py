import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_material import golden_datasets, random_documents, write_small

from mds_data import GPTDataset, StoreWriter, open_store, write_store


@pytest.fixture
def documents():
    return random_documents(60)


@pytest.fixture
def store(tmp_path, documents):
    write_small(tmp_path / "s", documents, split="80,20,0")
    return open_store(tmp_path / "s")


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_a_sample_is_a_window_and_its_labels_are_one_further(store, order):
    dataset = GPTDataset(store, seq_length=32, order=order)
    for number in range(0, len(dataset), 11):
        window, sample = dataset.window(number), dataset[number]
        assert window.shape == (33,)
        np.testing.assert_array_equal(sample["tokens"], window[:-1])
        np.testing.assert_array_equal(sample["labels"], window[1:])
        assert sample["tokens"].dtype == sample["labels"].dtype == np.int64
        assert sample["loss_mask"].dtype == np.float32
        assert sample["loss_mask"].tolist() == [1.0] * 32
        assert sample["position_ids"].tolist() == list(range(32))


def test_samples_may_be_written_into(store):
    dataset = GPTDataset(store, seq_length=32)
    before = dataset[3]["tokens"].copy()
    dataset[3]["tokens"][:] = 0
    dataset[3]["position_ids"][:] = 0
    np.testing.assert_array_equal(dataset[3]["tokens"], before)
    assert dataset[3]["position_ids"][5] == 5


def test_samples_are_the_same_where_places_are_too_many_to_be_kept(store, documents, monkeypatch):
    options = {"seq_length": 32, "num_samples": 300, "order": "megatron"}
    kept = GPTDataset(store, **options)
    monkeypatch.setattr("mds_data.datasets.gpt._ROWS_KEPT", 0)
    taken = GPTDataset(store, **options)

    for number in range(len(kept)):
        pieces = kept.megatron_order.pieces(number)
        expected = np.concatenate([documents[place][low:high] for place, low, high in pieces])
        np.testing.assert_array_equal(kept.window(number), expected)
        np.testing.assert_array_equal(taken.window(number), expected)


def test_an_epoch_of_the_fast_order_shows_every_token_once(store, documents):
    row = np.concatenate(documents)
    dataset = GPTDataset(store, seq_length=7)

    windows = {tuple(dataset.window(number).tolist()) for number in range(len(dataset))}

    assert len(dataset) == (len(row) - 1) // 7
    expected = {tuple(row[7 * place : 7 * place + 8].tolist()) for place in range(len(dataset))}
    assert windows == expected


def test_the_fast_order_is_shuffled_anew_in_each_epoch(store):
    one = GPTDataset(store, seq_length=32)
    per_epoch = len(one)
    dataset = GPTDataset(store, seq_length=32, num_samples=3 * per_epoch + 5)
    epochs = [
        [tuple(dataset.window(epoch * per_epoch + place)) for place in range(per_epoch)]
        for epoch in range(3)
    ]
    assert len(dataset) == 3 * per_epoch + 5
    assert epochs[0] == [tuple(one.window(place)) for place in range(per_epoch)]
    assert epochs[0] != sorted(epochs[0])
    assert len({tuple(map(tuple, epoch)) for epoch in epochs}) == 3
    for epoch in epochs:
        assert len(set(epoch)) == per_epoch
    tokens = [np.bincount(np.concatenate(epoch), minlength=1000) for epoch in epochs]
    assert np.abs(tokens[0] - tokens[1]).sum() < 2 * per_epoch


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_the_seed_decides_the_order(store, order):
    def windows(seed):
        dataset = GPTDataset(store, seq_length=16, seed=seed, order=order)
        return [tuple(dataset.window(number)) for number in range(50)]

    assert windows(1) == windows(1)
    assert windows(1) != windows(2)


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_the_order_of_access_does_not_show(store, order):
    dataset = GPTDataset(store, seq_length=16, order=order, num_samples=20_000)
    numbers = np.random.default_rng(0).integers(0, 20_000, 200).tolist()
    alone = {number: dataset.window(number).tolist() for number in numbers}
    fresh = GPTDataset(store, seq_length=16, order=order, num_samples=20_000)
    for number in sorted(numbers):
        assert fresh.window(number).tolist() == alone[number]


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_a_dataset_can_be_sent_to_a_worker(store, order):
    dataset = GPTDataset(store, seq_length=16, order=order)
    twin = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(twin.window(17), dataset.window(17))


def test_parts_of_a_split_share_no_document(store, documents):
    train = GPTDataset(store, seq_length=5, split="train")
    valid = GPTDataset(store, seq_length=5, split=("80,20,0", "valid"))
    assert len(train) == (sum(map(len, documents[:48])) - 1) // 5
    assert len(valid) == (sum(map(len, documents[48:])) - 1) // 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seq_length": 0}, "seq_length"),
        ({"seq_length": 4, "num_samples": -1}, "num_samples"),
        ({"seq_length": 4, "order": "random"}, "order must be"),
        ({"seq_length": 4, "split": "holdout"}, "has the parts train, valid, test"),
        ({"seq_length": 4, "split": ("1,1,1", "holdout")}, "train, valid and test, not 'holdout'"),
        ({"seq_length": 4, "split": "test"}, "holds 0 tokens in 0 documents in split 'test'"),
        (
            {"seq_length": 4, "split": ("100,0,0", "valid")},
            "in 0 documents in part 'valid' of the split 100,0,0",
        ),
        ({"seq_length": 4, "eod_mask_loss": True}, "has no end-of-document id"),
    ],
)
def test_impossible_settings_are_refused(store, options, reason):
    with pytest.raises(ValueError, match=reason):
        GPTDataset(store, **options)


def test_a_store_without_a_split_says_what_to_give(tmp_path):
    write_small(tmp_path / "t", [[1, 2, 3]])
    with pytest.raises(ValueError, match=r"keeps no split.*give the shares"):
        GPTDataset(open_store(tmp_path / "t"), seq_length=2, split="train")


@pytest.mark.parametrize("number", [-10_000, 10_000])
def test_a_sample_that_is_not_there_is_an_index_error(store, number):
    with pytest.raises(IndexError, match=f"sample {number} of"):
        GPTDataset(store, seq_length=64)[number]


@pytest.mark.parametrize("order", ["fast", "megatron"])
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda x: sum(x) > 1))
@settings(max_examples=30, deadline=None)
def test_a_part_that_is_shorter_than_a_sample_is_repeated(tmp_path_factory, order, lengths):
    path = tmp_path_factory.mktemp("g") / "s"
    write_small(path, [np.arange(length) for length in lengths])
    dataset = GPTDataset(open_store(path), seq_length=20, num_samples=12, order=order)
    assert len(dataset) >= 12
    assert all(len(dataset.window(number)) == 21 for number in range(len(dataset)))


def test_documents_in_a_sample_can_be_told_apart(tmp_path):
    write_store(tmp_path / "s", [[1, 2, 9], [3, 9], [4, 5, 6, 7, 9]], vocab_size=10, eod_id=9)
    dataset = GPTDataset(
        open_store(tmp_path / "s"),
        seq_length=9,
        eod_mask_loss=True,
        reset_position_ids=True,
        reset_attention_mask=True,
    )
    sample = dataset[0]
    assert sample["tokens"].tolist() == [1, 2, 9, 3, 9, 4, 5, 6, 7]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1, 1]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert sample["cumulative_lengths"].tolist() == [0, 3, 5, 9]


def test_an_end_token_at_the_end_of_a_sample_begins_nothing(tmp_path):
    write_store(tmp_path / "s", [[1, 2, 9], [3, 9]], vocab_size=10, eod_id=9)
    sample = GPTDataset(
        open_store(tmp_path / "s"),
        seq_length=3,
        reset_position_ids=True,
        reset_attention_mask=True,
    )[0]
    assert sample["position_ids"].tolist() == [0, 1, 2]
    assert sample["cumulative_lengths"].tolist() == [0, 3]


def test_sentences_count_as_documents_in_the_original_s_order(tmp_path):
    """The original shuffles the entries of its index, sentences after --split-sentences."""
    pair = open_store(golden_datasets() / "pydocss_text_sentence")
    with StoreWriter(tmp_path / "s", vocab_size=65536) as writer:
        ends = np.cumsum(pair.sentence_length)
        for end, length in zip(ends.tolist(), pair.sentence_length.tolist(), strict=True):
            writer.add(pair.tokens(end - length, end))
        writer.commit()
    options = {"seq_length": 50, "order": "megatron", "split": ("90,10,0", "train")}
    sentences = GPTDataset(pair, **options)
    flat = GPTDataset(open_store(tmp_path / "s"), **options)
    assert len(sentences) == len(flat)
    for number in range(0, len(flat), 97):
        np.testing.assert_array_equal(sentences.window(number), flat.window(number))


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_who_masks_tokens_leaves_labels_and_the_store_alone(tmp_path, order) -> None:
    documents = random_documents(20, seed=2)
    write_small(tmp_path / "s", documents)
    dataset = GPTDataset(open_store(tmp_path / "s"), seq_length=16, order=order)
    before = dataset[3]["labels"].copy()

    sample = dataset[3]
    sample["tokens"][:] = 0

    np.testing.assert_array_equal(sample["labels"], before)
    np.testing.assert_array_equal(dataset[3]["labels"], before)
