"""What each family of models reads of a store, and how it is stacked and counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family_cases import BERT, ONE_HEAD, T5, family_config, make_pairs, make_sentences

from mds_data import StoreWriter, open_store
from mds_train.config import TrainConfig
from mds_train.data.building import open_stores, training_samples
from mds_train.data.families import collate_of, dataset_of
from mds_train.data.masked_words import SegmentedWords, collate_segments
from mds_train.data.source_and_target import SourceAndTarget


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores")
    make_sentences(path)
    make_pairs(path)
    return path


def test_a_bert_reads_words_segments_and_whether_they_were_swapped(folder: Path) -> None:
    config = family_config(folder, BERT)
    stores = open_stores(config)
    dataset = training_samples(config, stores)

    micro = collate_of(config)(dataset, [3, 5])

    assert isinstance(micro, SegmentedWords)
    assert set(micro.arguments()) >= {"tokens", "labels", "binary_labels", "padding_mask"}
    assert micro.binary_labels.tolist() == [int(dataset[n]["is_random"]) for n in (3, 5)]
    assert micro.labels.min() == 0  # where nothing is predicted there is -1 in the sample
    assert micro.counts().tolist() == [float(micro.loss_mask.sum()), 2.0]
    assert micro.samples.tolist() == [3, 5]


def test_samples_that_fill_a_micro_batch_do_not_count(folder: Path) -> None:
    config = family_config(folder, BERT)
    micro = collate_segments(training_samples(config, open_stores(config)), [0, 1, 2])

    first = micro.counting(1)

    assert first.counts().tolist() == [float(micro.loss_mask[0].sum()), 1.0]
    assert micro.counts()[1] == 3
    sums = torch.nn.functional.cross_entropy(
        torch.zeros(3, 2), first.binary_labels, reduction="sum"
    )
    assert sums.item() == pytest.approx(np.log(2))


def test_the_types_of_padding_are_types_that_there_are() -> None:
    sample = {
        "tokens": np.array([2, 9, 3, 40]),
        "token_types": np.array([0, 0, 1, 40]),
        "labels": np.array([-1, 7, -1, -1]),
        "loss_mask": np.array([0, 1, 0, 0]),
        "padding_mask": np.array([1, 1, 1, 0]),
        "is_random": np.array(1),
    }

    micro = collate_segments([sample], [0])  # type: ignore[arg-type]

    assert micro.token_types.tolist() == [[0, 0, 1, 0]]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_t5_reads_a_source_and_a_target(folder: Path, pairs: bool) -> None:
    config = family_config(folder, T5, pairs=pairs)
    stores = open_stores(config)

    micro = collate_of(config)(training_samples(config, stores), [0, 1])

    assert isinstance(micro, SourceAndTarget)
    assert micro.tokens.shape == (2, 24)
    assert micro.decoder_tokens.shape == micro.labels.shape == (2, 16)
    output = SimpleNamespace(losses=torch.ones(2, 16))
    assert micro.sums(output).tolist() == micro.counts().tolist()


def test_a_bert_without_binary_head_reads_one_segment(folder: Path) -> None:
    config = family_config(folder, ONE_HEAD)

    micro = collate_of(config)(training_samples(config, open_stores(config)), [0])

    assert micro.counts().shape == (1,)
    assert micro.arguments()["token_types"].max() == 0


def test_what_makes_samples_is_taken_over(folder: Path) -> None:
    masks, short = 0.5, 0.0
    config = family_config(
        folder, BERT, data={"mask_probability": masks, "short_probability": short}
    )
    usual = family_config(folder, BERT)
    store = open_store(folder / "sentences")

    def masked(config: TrainConfig) -> int:
        dataset = dataset_of(config, store, split="train", num_samples=40)
        return sum(int(dataset[number]["loss_mask"].sum()) for number in range(40))

    assert masked(config) > 2 * masked(usual)


def test_a_store_without_tokenizer_needs_one_beside_it(folder: Path, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "bare", vocab_size=97, sentences=True) as writer:
        for _ in range(9):
            writer.add(np.arange(5, 25), sentence_lengths=[6, 6, 8])
        writer.commit()
    store = open_store(tmp_path / "bare")
    bare = family_config(folder, T5)
    given = family_config(folder, T5, data={"tokenizer": str(folder / "vocab.txt")})

    with pytest.raises(ValueError, match="keeps no tokenizer"):
        dataset_of(bare, store, split=None, num_samples=4)

    assert len(dataset_of(given, store, split=None, num_samples=4)) == 4
    assert (dataset_of(given, store, split=None, num_samples=4)[0]["labels"] > 66).any()


def test_a_store_of_texts_is_no_store_of_pairs(folder: Path) -> None:
    config = family_config(folder, T5, data={"pairs": True})

    with pytest.raises(ValueError, match="holds no pairs of source and target"):
        training_samples(config, open_stores(config))


def test_blends_mix_stores_of_sentences(folder: Path, tmp_path: Path) -> None:
    make_sentences(tmp_path, documents=30)
    both = (str(folder / "sentences"), str(tmp_path / "sentences"))
    config = family_config(folder, BERT, data={"store": None, "stores": both})

    samples = training_samples(config, open_stores(config))

    assert len(samples) == 48
    assert samples[47]["tokens"].shape == (24,)
