"""Fill in the middle: the marks tell how to put a document together again."""

import numpy as np
import pytest
from store_material import random_documents, write_small

from mds_data import FillInTheMiddle, GPTDataset, Vocabulary, open_store

PREFIX, MIDDLE, SUFFIX, EOD = 996, 997, 998, 999
ALL = {"prefix_id": PREFIX, "middle_id": MIDDLE, "suffix_id": SUFFIX}


@pytest.fixture
def dataset_of(tmp_path):
    documents = [np.append(document % 900, EOD) for document in random_documents(60, longest=60)]
    write_small(tmp_path / "s", documents, eod_id=EOD)

    def make(**options):
        return GPTDataset(
            open_store(tmp_path / "s"),
            seq_length=100,
            fill_in_the_middle=FillInTheMiddle(**ALL, **options),
        )

    return make


def put_together(ids):
    """The document that was taken apart, without its last three tokens."""
    assert ids[0] == PREFIX
    if ids[1] == SUFFIX:  # the suffix comes first
        middle = ids.index(MIDDLE)
        return ids[middle + 1 :], ids[2:middle]
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    return ids[1:suffix] + ids[middle + 1 :], ids[suffix + 1 : middle]


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_documents_can_be_put_together_again(dataset_of, spm_rate):
    dataset = dataset_of(rate=1.0, spm_rate=spm_rate)
    seen = 0
    for number in range(len(dataset)):
        plain = dataset.window(number).tolist()
        sample = dataset[number]
        moved = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        assert len(moved) == len(plain)
        ends = [place for place, token in enumerate(plain) if token == EOD]
        assert ends == [place for place, token in enumerate(moved) if token == EOD]
        start = 0
        for end in [*ends, len(plain)]:
            if end - start >= 10:
                begin, rest = put_together(moved[start:end])
                assert begin + rest == plain[start : end - 3]
                seen += 1
            else:
                assert moved[start:end] == plain[start:end]
            start = end + 1
    assert seen > 50


def test_rates_are_kept_and_a_sample_depends_on_its_number_alone(dataset_of):
    half, never = dataset_of(rate=0.5), dataset_of(rate=0.0)
    marked = sum(PREFIX in half[number]["tokens"] for number in range(len(half)))
    assert 0.3 < marked / len(half) < 1
    for number in (5, 3, 5, -1):
        np.testing.assert_array_equal(half[number]["tokens"], half[number]["tokens"])
        np.testing.assert_array_equal(never[number]["tokens"], never.window(number)[:-1])
    np.testing.assert_array_equal(half[-1]["tokens"], half[len(half) - 1]["tokens"])


def test_marks_are_found_in_a_vocabulary():
    found = FillInTheMiddle.of_vocabulary(
        Vocabulary(["a", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]), rate=0.9
    )
    assert (found.prefix_id, found.middle_id, found.suffix_id, found.rate) == (1, 2, 3, 0.9)
    with pytest.raises(ValueError, match="has no marks such as <fim_prefix>"):
        FillInTheMiddle.of_vocabulary(Vocabulary(["a"]))
    with pytest.raises(ValueError, match=r"rate \(2\) must lie from 0 to 1"):
        FillInTheMiddle(**ALL, rate=2)
