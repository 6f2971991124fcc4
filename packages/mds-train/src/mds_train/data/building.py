"""Opens the stores of a run and makes its samples: one dataset or a blend, for each split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mds_data import BlendedDataset, KeySource, SealedError, TokenStore, open_store
from mds_train.batches import GuardedSamples, Samples
from mds_train.config import TrainConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.config.data import DataConfig
from mds_train.config.keys import named_keys, ways_to_name
from mds_train.data.families import Split, dataset_of

__all__ = [
    "Stores",
    "epoch_lengths",
    "key_of",
    "open_stores",
    "training_samples",
    "validation_samples",
]

_MARGIN = 1.005
"""Megatron's: each part of a blend is laid out a little longer than its share."""


class Stores:
    """The open stores of a run.

    Attributes:
        training: In the order of the configuration.
        validation: Those of data.valid_stores; empty where validation is a split of the others.
    """

    def __init__(self, training: Sequence[TokenStore], validation: Sequence[TokenStore]) -> None:
        self.training = tuple(training)
        self.validation = tuple(validation)

    def close(self) -> None:
        """Unmap all of them."""
        for store in (*self.training, *self.validation):
            store.close()


def key_of(data: DataConfig) -> KeySource | None:
    """What opens the stores that are encrypted."""
    named = named_keys(data)
    return KeySource(**named) if named else None  # type: ignore[arg-type]


def open_stores(config: TrainConfig) -> Stores:
    """Open every store that the run names.

    Raises:
        ValueError: If one does not fit the model.
    """
    data = config.data
    stores = Stores(
        [_opened(path, data) for path in data.paths],
        [_opened(path, data) for path in data.valid_stores],
    )
    for path, store in zip(
        (*data.paths, *data.valid_stores), (*stores.training, *stores.validation), strict=True
    ):
        if not _is_megatron_pair(store) and store.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"{path} was made with a vocabulary of {store.vocab_size} tokens, but "
                f"model.vocab_size is {config.model.vocab_size}; set it to {store.vocab_size}."
            )
    return stores


def _opened(path: str, data: DataConfig) -> TokenStore:
    key = key_of(data)
    try:
        return open_store(Path(path), key=key)
    except SealedError as error:
        if key is not None:
            raise
        raise ValueError(
            f"{path}: the store is encrypted, and no key was given; name what opens it: "
            f"{ways_to_name('data')}."
        ) from error


def epoch_lengths(config: TrainConfig, stores: Stores) -> list[int]:
    """How many training samples each store holds."""
    split = _training_split(config)
    return [
        len(dataset_of(config, store, split=split, num_samples=None)) for store in stores.training
    ]


def training_samples(config: TrainConfig, stores: Stores, *, at_least: int = 0) -> Samples:
    """The samples of all steps, in the order in which they are consumed.

    Args:
        config: The run.
        stores: Its open stores.
        at_least: So many samples where the steps need fewer: a resumed run's batches may have been
            larger before.
    """
    needed = BatchSizes.from_config(config.train).consumed_after(config.train.train_steps)
    needed = max(needed, at_least)
    return _mixed(
        config,
        stores.training,
        config.data.weights,
        split=_training_split(config),
        num_samples=needed,
    )


def validation_samples(config: TrainConfig, stores: Stores) -> Samples | None:
    """The samples that the validation loss is over; None where it is never measured.

    Raises:
        ValueError: If the split holds no sample.
    """
    measured = config.watch.eval_interval is not None or config.train.skip_train
    if not measured or config.watch.eval_samples == 0:
        return None
    own = bool(config.data.valid_stores)
    samples = _mixed(
        config,
        stores.validation if own else stores.training,
        config.data.valid_weights if own else config.data.weights,
        split=None if own else _split(config, "valid"),
        num_samples=None,
    )
    if len(samples) == 0:
        raise ValueError(
            f"the validation split of {', '.join(config.data.valid_stores or config.data.paths)} "
            f"holds no sample of {config.data.seq_length} tokens; choose another data.split, "
            f"shorten data.seq_length or leave watch.eval_interval out."
        )
    return samples


def _mixed(
    config: TrainConfig,
    stores: Sequence[TokenStore],
    weights: Sequence[float],
    *,
    split: Split,
    num_samples: int | None,
) -> Samples:
    if len(stores) == 1:
        return _samples(config, stores[0], split=split, num_samples=num_samples)
    lengths = [len(dataset_of(config, store, split=split, num_samples=None)) for store in stores]
    shares = [float(weight) for weight in weights or lengths]
    total = sum(lengths) if num_samples is None else num_samples
    parts = [
        _samples(
            config,
            store,
            split=split,
            # No longer than one epoch where the samples are only measured on.
            num_samples=None
            if num_samples is None
            else math.ceil(total * (share / sum(shares)) * _MARGIN),
        )
        for store, share in zip(stores, shares, strict=True)
    ]
    order = config.data.order
    return BlendedDataset(
        parts, shares, num_samples=total, order="balanced" if order == "fast" else order
    )


def _samples(
    config: TrainConfig,
    store: TokenStore,
    *,
    split: Split,
    num_samples: int | None,
) -> Samples:
    """The samples, checked one by one where the store does not know its vocabulary."""
    dataset = dataset_of(config, store, split=split, num_samples=num_samples)
    if _is_megatron_pair(store):
        return GuardedSamples(dataset, vocab_size=config.model.vocab_size)
    return dataset


def _is_megatron_pair(store: TokenStore) -> bool:
    return not store.manifest.files and not store.manifest.segments


def _training_split(config: TrainConfig) -> Split:
    whole = bool(config.data.valid_stores) and config.data.split is None
    return None if whole else _split(config, "train")


def _split(config: TrainConfig, name: str) -> str | tuple[str, str]:
    """The stores' own split of that name, or the one that data.split asks for."""
    return name if config.data.split is None else (config.data.split, name)
