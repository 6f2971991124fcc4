"""Translation samples from a store of pairs."""

import numpy as np
import pytest
from sentence_material import small_vocabulary
from store_material import random_documents, write_small

from mds_data import NMTDataset, StoreWriter, TokenizerFile, open_store
from mds_data.store.erase import erase_documents

BOS, EOS, PAD = 65, 66, 0


@pytest.fixture
def pairs():
    random = np.random.default_rng(1)
    return [
        (
            random.integers(5, 65, random.integers(1, 9)),
            random.integers(5, 65, random.integers(1, 9)),
        )
        for _ in range(50)
    ]


@pytest.fixture
def path(tmp_path, pairs):
    tokenizer = small_vocabulary(tmp_path)
    file = TokenizerFile(kind=tokenizer.kind, content=tokenizer.file.content)
    path = tmp_path / "pairs"
    with StoreWriter(
        path, vocab_size=tokenizer.vocab_size, sentences=True, tokenizer=file, split="90,10,0"
    ) as writer:
        for source, target in pairs:
            lengths = [len(source), len(target)]
            writer.add(np.concatenate([source, target]), sentence_lengths=lengths)
        writer.commit()
    return path


def read_back(sample):
    encoder = sample["encoder_tokens"][sample["encoder_padding_mask"] == 1].tolist()
    labels = sample["labels"][sample["loss_mask"] == 1].tolist()
    decoder = sample["decoder_tokens"][sample["decoder_padding_mask"] == 1].tolist()
    assert decoder[0] == BOS
    assert labels[-1] == EOS
    assert decoder[1:] == labels[:-1]
    return tuple(encoder), tuple(labels[:-1])


def test_an_epoch_shows_every_pair_once_and_each_epoch_in_another_order(path, pairs):
    dataset = NMTDataset(open_store(path), seq_length=8, decoder_seq_length=9, num_samples=100)

    read = [read_back(dataset[number]) for number in range(100)]

    expected = [(tuple(source.tolist()), tuple(target.tolist())) for source, target in pairs]
    assert sorted(read[:50]) == sorted(read[50:]) == sorted(expected)
    assert read[:50] != read[50:] != expected
    assert dataset.pairs == 50


def test_a_part_of_the_split_in_the_store_s_order(path, pairs):
    dataset = NMTDataset(
        open_store(path), seq_length=8, decoder_seq_length=9, split="valid", shuffle=False
    )
    read = [read_back(dataset[number]) for number in range(len(dataset))]
    assert [source for source, _ in read] == [tuple(s.tolist()) for s, _ in pairs[45:]]


def test_long_sides_are_cut_and_marked(path, pairs):
    dataset = NMTDataset(open_store(path), seq_length=4, decoder_seq_length=4, shuffle=False)
    for number, (source, target) in enumerate(pairs):
        sample = dataset[number]
        assert sample["truncated"] == (len(source) > 4 or len(target) > 3)
        assert read_back(sample) == (tuple(source[:4].tolist()), tuple(target[:3].tolist()))


def test_erased_pairs_are_left_out(path, pairs):
    erase_documents(path, [0, 7], reason="test")
    dataset = NMTDataset(open_store(path), seq_length=8, decoder_seq_length=9, shuffle=False)
    assert len(dataset) == 48
    assert read_back(dataset[0])[0] == tuple(pairs[1][0].tolist())
    assert read_back(dataset[6])[0] == tuple(pairs[8][0].tolist())


def test_a_store_of_plain_documents_is_refused(tmp_path):
    write_small(tmp_path / "s", random_documents(5))
    with pytest.raises(ValueError, match="holds no pairs of source and target"):
        NMTDataset(open_store(tmp_path / "s"), seq_length=8, decoder_seq_length=9)
