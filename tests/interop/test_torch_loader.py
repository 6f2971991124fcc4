"""A torch DataLoader sees the same batches with any number of ranks and workers, and on resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mds_data import (
    BertDataset,
    BlendedDataset,
    GPTDataset,
    NMTDataset,
    ResumableSampler,
    SFTDataset,
    StoreWriter,
    T5Dataset,
    Vocabulary,
    open_store,
    write_store,
)

torch = pytest.importorskip("torch", reason="it loads the batches")

from mds_data.torch_dataset import TorchDataset, data_loader, window_loader  # noqa: E402

SEQ_LENGTH = 16
GLOBAL_BATCH = 12
STEPS = 14


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> GPTDataset:
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "store"
    lengths = random.integers(5, 60, 40)
    documents = [np.append(random.integers(1, 500, length), 0) for length in lengths]
    write_store(path, documents, vocab_size=500, eod_id=0)
    return GPTDataset(open_store(path), seq_length=SEQ_LENGTH, reset_attention_mask=True)


def sampler_of(dataset: GPTDataset, **options: Any) -> ResumableSampler:
    return ResumableSampler(
        len(dataset), global_batch_size=GLOBAL_BATCH, shuffle=True, seed=5, **options
    )


def global_batches(
    dataset: GPTDataset, *, ranks: int, micro: int, workers: int, consumed: int = 0, steps: int
) -> list[list[list[int]]]:
    """Tokens of each step's global batch, put together from the loaders of all ranks."""
    loaders: list[Iterator[Any]] = [
        iter(
            data_loader(
                dataset,
                sampler_of(
                    dataset,
                    rank=rank,
                    num_ranks=ranks,
                    micro_batch_size=micro,
                    consumed_samples=consumed,
                ),
                num_workers=workers,
            )
        )
        for rank in range(ranks)
    ]
    batches = []
    for _ in range(steps):
        rows: list[list[int]] = []
        for _ in range(GLOBAL_BATCH // (ranks * micro)):
            for loader in loaders:
                rows += next(loader)["tokens"].tolist()
        batches.append(rows)
    return batches


def expected_batches(dataset: GPTDataset, *, first: int = 0, steps: int) -> list[list[list[int]]]:
    sampler = sampler_of(dataset)
    return [
        [dataset[int(number)]["tokens"].tolist() for number in sampler.global_batch(step)]
        for step in range(first, first + steps)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "micro", "workers"),
    [(1, 12, 0), (1, 3, 2), (2, 3, 1), (3, 2, 0), (4, 3, 2), (6, 1, 0), (12, 1, 0)],
)
def test_ranks_and_workers_do_not_show(
    dataset: GPTDataset, ranks: int, micro: int, workers: int
) -> None:
    assert len(dataset) < STEPS * GLOBAL_BATCH  # the epoch ends on the way
    batches = global_batches(dataset, ranks=ranks, micro=micro, workers=workers, steps=STEPS)
    assert batches == expected_batches(dataset, steps=STEPS)


@pytest.mark.timeout(300)
def test_a_run_goes_on_mid_epoch_with_other_ranks_and_workers(dataset: GPTDataset) -> None:
    sampler = sampler_of(dataset, num_ranks=4)
    before = global_batches(dataset, ranks=4, micro=1, workers=1, steps=5)
    sampler.advance(5)
    state = sampler.state_dict()

    resumed = sampler_of(dataset, num_ranks=3).load_state_dict(state)
    after = global_batches(
        dataset, ranks=3, micro=4, workers=2, consumed=resumed.consumed_samples, steps=9
    )

    assert before + after == expected_batches(dataset, steps=14)


@pytest.mark.timeout(300)
def test_workers_may_be_spawned(dataset: GPTDataset) -> None:
    loader = torch.utils.data.DataLoader(
        TorchDataset(dataset),
        batch_sampler=sampler_of(dataset),
        num_workers=2,
        multiprocessing_context="spawn",
        collate_fn=_first,
    )
    batches = [batch["tokens"].tolist() for batch in islice(iter(loader), 3)]
    assert batches == expected_batches(dataset, steps=3)


def _first(batch: Any) -> Any:
    return batch


def test_borders_of_documents_run_on_through_a_batch(dataset: GPTDataset) -> None:
    batch = TorchDataset(dataset).__getitems__([3, 0, 7])
    flat = batch["tokens"].flatten().tolist()
    starts = {0, 16, 32} | {place + 1 for place, token in enumerate(flat) if token == 0}
    assert batch["cumulative_lengths"].tolist() == sorted(starts | {48})
    assert batch["cumulative_lengths"].dtype == torch.int32


@pytest.mark.timeout(300)
@pytest.mark.parametrize("vocab_size", [60_000, 100_000])
def test_windows_that_workers_send_become_the_samples(tmp_path: Path, vocab_size: int) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocab_size, 300) for _ in range(9)]
    write_store(tmp_path / "s", documents, vocab_size=vocab_size)
    write_store(tmp_path / "t", [random.integers(0, 900, 700)], vocab_size=900)
    one, other = (GPTDataset(open_store(tmp_path / name), seq_length=20) for name in "st")
    for dataset in (one, BlendedDataset([one, other], [3, 1], num_samples=200)):
        sampler = ResumableSampler(len(dataset), global_batch_size=6)
        alone = data_loader(dataset, sampler, num_workers=0)
        shared = data_loader(dataset, sampler, num_workers=2)
        for expected, batch in zip(islice(alone, 30), shared, strict=False):
            assert list(batch) == list(expected)
            for name, values in expected.items():
                assert torch.equal(batch[name], values)
                assert batch[name].dtype == values.dtype
                assert batch[name].is_contiguous()
        windows = window_loader(dataset, sampler, num_workers=1)
        for expected, batch in zip(islice(alone, 9), windows, strict=False):
            assert torch.equal(batch[:, :-1], expected["tokens"])
            assert torch.equal(batch[:, 1:], expected["labels"])


def test_samples_that_are_more_than_windows_are_no_windows(dataset: GPTDataset) -> None:
    with pytest.raises(ValueError, match="use data_loader"):
        window_loader(dataset, sampler_of(dataset))


def test_samples_of_every_kind_become_batches(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
    words += [f"<extra_id_{number}>" for number in range(20)]
    vocabulary = Vocabulary([*words, *(f"w{number}" for number in range(60))])
    with StoreWriter(tmp_path / "s", vocab_size=len(vocabulary), sentences=True) as writer:
        for _ in range(40):
            lengths = random.integers(2, 12, 2).tolist()
            ids = random.integers(len(words), len(vocabulary), sum(lengths))
            writer.add(ids, sentence_lengths=lengths)
        writer.commit()
    store = open_store(tmp_path / "s")
    sizes = {"seq_length": 32, "decoder_seq_length": 32, "vocabulary": vocabulary}
    datasets = [
        BertDataset(store, seq_length=32, vocabulary=vocabulary),
        T5Dataset(store, **sizes),
        NMTDataset(store, **sizes),
        SFTDataset(store, seq_length=32),
    ]
    for dataset in datasets:
        batch = TorchDataset(dataset).__getitems__([0, 3, 1])
        alone = [TorchDataset(dataset)[number] for number in (0, 3, 1)]
        for name, values in batch.items():
            if name != "cumulative_lengths":
                assert torch.equal(values, torch.stack([sample[name] for sample in alone]))
