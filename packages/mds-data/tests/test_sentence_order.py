"""Samples of whole sentences: the original's mapping, and the faster order."""

import numpy as np
import pytest
from sentence_material import sentence_store
from store_material import golden_datasets

from mds_data import open_store
from mds_data.datasets.sentences import (
    FastSentenceOrder,
    MegatronSentenceOrder,
    SentenceTable,
    sentence_table,
)
from mds_data.store.selection import document_range


@pytest.mark.parametrize(("target", "fewest"), [(61, 2), (62, 1)])
@pytest.mark.parametrize(("part", "count"), [("train", 40), ("valid", 4), ("test", 4)])
def test_the_mapping_is_the_original_s(part, count, target, fewest):
    folder = golden_datasets()
    store = open_store(folder / "pydocss_text_sentence")
    name = f"pydocss_text_sentence_{part}_indexmap_{count}mns_{target}msl_0.10ssp_1234s.npy"
    first, stop = document_range(store, ("90,5,5", part))

    order = MegatronSentenceOrder(
        sentence_table(store),
        first=first,
        stop=stop,
        num_samples=count,
        target=target,
        short_probability=0.1,
        fewest=fewest,
        seed=1234,
    )

    np.testing.assert_array_equal(order.mapping, np.load(folder / name))


def table_of(documents):
    lengths = np.array([length for document in documents for length in document], np.int64)
    first = np.concatenate([[0], np.cumsum([len(document) for document in documents])])
    return SentenceTable(np.cumsum(lengths) - lengths, lengths, first.astype(np.int64))


def plain_groups(documents, *, target, fewest):
    """The original's rule read sentence by sentence, without short samples."""
    rows, number = [], 0
    for document in documents:
        first, size, count = number, 0, 0
        long = len(document) > 1 and max(document) > 512
        for place, length in enumerate(document):
            size, count, left = size + length, count + 1, len(document) - place - 1
            if len(document) < fewest or long:
                continue
            if (size >= target and left > 1 and count >= fewest) or left == 0:
                rows.append((first, number + place + 1))
                first, size, count = number + place + 1, 0, 0
        number += len(document)
    return rows


@pytest.mark.parametrize("fewest", [1, 2])
@pytest.mark.parametrize("kind", [MegatronSentenceOrder, FastSentenceOrder])
def test_documents_are_grouped_as_the_plain_loop_does(kind, fewest):
    random = np.random.default_rng(3)
    documents = [random.integers(1, 30, random.integers(0, 12)).tolist() for _ in range(200)]
    documents[7], documents[9] = [4, 600, 3], [600]

    order = kind(
        table_of(documents),
        first=0,
        stop=len(documents),
        num_samples=None,
        target=40,
        short_probability=0.0,
        fewest=fewest,
        seed=5,
    )

    spans = [order.span(number) for number in range(len(order))]
    expected = plain_groups(documents, target=40, fewest=fewest)
    # a pass that is wanted again and again is laid out once here
    assert sorted((span.first, span.stop) for span in spans) == expected
    assert [(span.first, span.stop) for span in spans] != expected
    assert {span.target for span in spans} == {40}
    left_out = [d for d in documents if len(d) < fewest or (len(d) > 1 and max(d) > 512)]
    assert order.documents_left_out == len(left_out)


def test_the_fast_order_shows_every_sample_in_each_epoch_and_some_shorter(tmp_path):
    store = sentence_store(tmp_path, documents=400)
    table = sentence_table(store)
    settings = {"first": 0, "stop": 400, "target": 30, "fewest": 1, "seed": 1}
    once = FastSentenceOrder(table, num_samples=None, short_probability=0.0, **settings)
    size = len(once)
    order = FastSentenceOrder(table, num_samples=3 * size, short_probability=0.1, **settings)

    epochs = [[order.span(epoch * size + place) for place in range(size)] for epoch in range(3)]

    keys = [[(span.first, span.stop) for span in epoch] for epoch in epochs]
    assert sorted(keys[0]) == sorted(keys[1]) == sorted(keys[2])
    assert keys[0] != keys[1]
    short = [span.target for epoch in epochs for span in epoch if span.target != 30]
    assert 0.07 < len(short) / (3 * size) < 0.13
    assert min(short) >= 2
    assert max(short) < 31
