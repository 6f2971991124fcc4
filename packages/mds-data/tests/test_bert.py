"""BERT's samples: the original's bit for bit, and what every sample must be."""

import pickle

import numpy as np
import pytest
from sentence_material import golden_samples, golden_vocabulary, sentence_store
from store_material import golden_datasets, random_documents, write_small

from mds_data import BertDataset, MaskingStyle, Vocabulary, open_store

NAMES = {
    "text": "tokens",
    "types": "token_types",
    "labels": "labels",
    "loss_mask": "loss_mask",
    "padding_mask": "padding_mask",
    "is_random": "is_random",
    "truncated": "truncated",
}
CLS, SEP, MASK, PAD = 2, 3, 4, 0


def test_samples_are_the_original_s():
    golden = golden_samples("bert")
    dataset = BertDataset(
        open_store(golden_datasets() / "pydocss_text_sentence"),
        seq_length=64,
        num_samples=40,
        split=("90,5,5", "train"),
        order="megatron",
        vocabulary=golden_vocabulary(),
    )

    samples = [dataset[number] for number in range(len(golden["text"]))]

    assert len(dataset) == 1360
    for theirs, ours in NAMES.items():
        np.testing.assert_array_equal(
            np.stack([sample[ours] for sample in samples]), golden[theirs]
        )


@pytest.fixture
def store(tmp_path):
    return sentence_store(tmp_path, documents=200)


@pytest.mark.parametrize("order", ["fast", "megatron"])
@pytest.mark.parametrize("segments", ["order", "next", "one"])
def test_every_sample_is_well_formed(store, order, segments):
    dataset = BertDataset(
        store,
        seq_length=40,
        order=order,
        segments=segments,
        num_samples=150,
        short_probability=0.0,
    )
    for number in range(150):
        sample = dataset[number]
        size = int(sample["padding_mask"].sum())
        tokens, labels = sample["tokens"], sample["labels"]
        assert all(values.dtype == np.int64 for values in sample.values())
        original = np.where(labels >= 0, labels, tokens)[:size]
        assert tokens[0] == CLS
        assert tokens[size - 1] == SEP
        assert np.count_nonzero(original == SEP) == (1 if segments == "one" else 2)
        assert set(tokens[size:].tolist()) <= {PAD}
        assert ((labels >= 0) == (sample["loss_mask"] == 1)).all()
        first = int(np.flatnonzero(original == SEP)[0])
        types = sample["token_types"]
        assert types[: first + 1].tolist() == [0] * (first + 1)
        assert set(types[first + 1 : size].tolist()) <= {1}
        assert sample["loss_mask"].sum() <= 0.15 * 37 + 1  # none where each word is too long


def test_segments_of_the_text_come_in_order_or_swapped(store):
    dataset = BertDataset(
        store, seq_length=200, masking=MaskingStyle(probability=0.0), short_probability=0.0
    )
    text = [row.tolist() for row in store]
    swapped = 0
    for number in range(len(dataset)):
        sample = dataset[number]
        ids = sample["tokens"][: int(sample["padding_mask"].sum())].tolist()
        middle = ids.index(SEP)
        first, second = ids[1:middle], ids[middle + 1 : -1]
        whole = second + first if sample["is_random"] else first + second
        assert any(contains(document, whole) for document in text)
        swapped += int(sample["is_random"])
    assert 0.3 < swapped / len(dataset) < 0.7


def contains(row, part):
    return any(row[place : place + len(part)] == part for place in range(len(row)))


def test_a_next_sentence_is_from_another_document(store):
    dataset = BertDataset(
        store,
        seq_length=200,
        segments="next",
        masking=MaskingStyle(probability=0.0),
        short_probability=0.0,
    )
    text = [row.tolist() for row in store]
    elsewhere = 0
    for number in range(len(dataset)):
        sample = dataset[number]
        ids = sample["tokens"][: int(sample["padding_mask"].sum())].tolist()
        middle = ids.index(SEP)
        joined = any(contains(document, ids[1:middle] + ids[middle + 1 : -1]) for document in text)
        assert joined != bool(sample["is_random"])
        elsewhere += int(sample["is_random"])
    assert 0.3 < elsewhere / len(dataset) < 0.7


def test_of_ten_masked_tokens_eight_are_masks_and_one_stays(tmp_path):
    dataset = BertDataset(sentence_store(tmp_path, documents=1500), seq_length=40)
    masked = same = total = 0
    for number in range(len(dataset)):
        sample = dataset[number]
        chosen = sample["labels"] >= 0
        read, true = sample["tokens"][chosen], sample["labels"][chosen]
        total += len(true)
        masked += int((read == MASK).sum())
        same += int((read == true).sum())
    assert total > 5000
    assert abs(masked / total - 0.8) < 0.02
    assert abs(same / total - 0.1) < 0.02


def test_whole_words_are_masked_together(store):
    dataset = BertDataset(store, seq_length=40)
    goes_on = dataset.vocabulary.continues_word
    apart = BertDataset(store, seq_length=40, masking=MaskingStyle(whole_words=False))
    assert broken_words(dataset, goes_on) == 0
    assert broken_words(apart, goes_on) > 20


def broken_words(dataset, goes_on):
    """Places where a word goes on and only one of the two tokens is predicted."""
    count = 0
    for number in range(len(dataset)):
        sample = dataset[number]
        chosen = sample["labels"] >= 0
        original = np.where(chosen, sample["labels"], sample["tokens"])
        inside = goes_on[original[1:]] & (original[:-1] > 4)
        count += int((inside & (chosen[1:] != chosen[:-1])).sum())
    return count


def test_a_sample_depends_on_its_number_alone(store):
    dataset = BertDataset(store, seq_length=40, num_samples=500)
    twin = pickle.loads(pickle.dumps(dataset))
    for number in (499, 3, 250, 3):
        for name, values in dataset[number].items():
            np.testing.assert_array_equal(values, twin[number][name])
    assert (dataset[1]["tokens"] != dataset[2]["tokens"]).any()
    np.testing.assert_array_equal(dataset[-1]["tokens"], dataset[499]["tokens"])
    with pytest.raises(IndexError, match="sample 500 of 500"):
        dataset[500]


def test_samples_past_the_end_are_those_of_a_longer_dataset(store):
    short, long = (BertDataset(store, seq_length=40, num_samples=count) for count in (3, 900))
    for number in (0, 2, 3, 899):
        np.testing.assert_array_equal(short.beyond(number)["tokens"], long[number]["tokens"])
    again = BertDataset(store, seq_length=40, order="megatron")
    np.testing.assert_array_equal(again.beyond(len(again))["tokens"], again[0]["tokens"])
    with pytest.raises(ValueError, match=r"seq_length \(4\) leaves no room"):
        BertDataset(store, seq_length=4)


def test_stores_without_sentences_or_marks_are_named(tmp_path):
    path = tmp_path / "plain"
    write_small(path, random_documents(5))
    with pytest.raises(ValueError, match="none of the 5 documents has 2 sentences"):
        BertDataset(open_store(path), seq_length=40)
    with pytest.raises(ValueError, match="keeps no tokenizer"):
        BertDataset(open_store(path), seq_length=40, segments="one")
    words = Vocabulary([f"w{number}" for number in range(1000)])
    with pytest.raises(ValueError, match="has no cls token"):
        BertDataset(open_store(path), seq_length=40, segments="one", vocabulary=words)
    few = Vocabulary([f"w{number}" for number in range(9)])
    with pytest.raises(ValueError, match=r"has a vocabulary of 1000, and the tokenizer has 9"):
        BertDataset(open_store(path), seq_length=40, segments="one", vocabulary=few)
