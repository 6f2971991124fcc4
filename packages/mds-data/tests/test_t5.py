"""T5's samples: the original's bit for bit, and that nothing of the text is lost."""

import numpy as np
import pytest
from sentence_material import golden_samples, golden_vocabulary, sentence_store
from store_material import golden_datasets

from mds_data import T5Dataset, open_store


def test_samples_are_the_original_s():
    golden = golden_samples("t5")
    dataset = T5Dataset(
        open_store(golden_datasets() / "pydocss_text_sentence"),
        seq_length=64,
        decoder_seq_length=32,
        num_samples=40,
        split=("90,5,5", "train"),
        order="megatron",
        vocabulary=golden_vocabulary(20),
    )

    for number in range(len(golden["text_enc"])):
        sample = dataset[number]
        np.testing.assert_array_equal(sample["encoder_tokens"], golden["text_enc"][number])
        np.testing.assert_array_equal(sample["decoder_tokens"], golden["text_dec"][number])
        np.testing.assert_array_equal(sample["labels"], golden["labels"][number])
        np.testing.assert_array_equal(sample["loss_mask"], golden["loss_mask"][number])
        assert sample["truncated"] == golden["truncated"][number]
        encoder, decoder = sample["encoder_padding_mask"], sample["decoder_padding_mask"]
        np.testing.assert_array_equal(np.outer(encoder, encoder), golden["enc_mask"][number])
        np.testing.assert_array_equal(np.outer(decoder, encoder), golden["enc_dec_mask"][number])
        causal = np.tril(np.outer(decoder, decoder))
        np.testing.assert_array_equal(causal, golden["dec_mask"][number])


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_the_spans_put_back_give_the_text(tmp_path, order):
    store = sentence_store(tmp_path, documents=150, extra_ids=30)
    dataset = T5Dataset(store, seq_length=50, decoder_seq_length=30, order=order)
    sentinels = dataset.vocabulary.sentinels
    assert len(sentinels) == 30
    text = [row.tolist() for row in store]

    for number in range(len(dataset)):
        sample = dataset[number]
        encoder = sample["encoder_tokens"][sample["encoder_padding_mask"] == 1].tolist()
        labels = sample["labels"][sample["loss_mask"] == 1].tolist()
        read = sample["decoder_tokens"][sample["decoder_padding_mask"] == 1].tolist()
        assert read[1:] == labels[:-1]
        spans = spans_of(labels[:-1], sentinels)
        assert [token for token in encoder if token in sentinels] == list(spans)
        whole = [part for token in encoder for part in spans.get(token, [token])]
        assert any(contains(document, whole) for document in text)
        assert len(whole) <= 48


def spans_of(ids, sentinels):
    spans = {}
    for token in ids:
        if token in sentinels:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return spans


def contains(row, part):
    return any(row[place : place + len(part)] == part for place in range(len(row)))


def test_too_few_sentinels_are_named(tmp_path):
    none = sentence_store(tmp_path)
    with pytest.raises(ValueError, match="has no sentinels"):
        T5Dataset(none, seq_length=50, decoder_seq_length=30)


def test_a_decoder_too_short_for_the_spans_is_named(tmp_path):
    store = sentence_store(tmp_path, extra_ids=30)
    dataset = T5Dataset(store, seq_length=50, decoder_seq_length=2)
    with pytest.raises(ValueError, match="decoder_seq_length 2; make the lengths larger"):
        [dataset[number] for number in range(len(dataset))]
