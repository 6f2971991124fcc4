"""Which samples a run sees: of one store, of several by weight, of others for validation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import VOCABULARY, tiny_config

from mds_data import GPTDataset, open_store, write_store
from mds_data.encryption.keys import new_identity
from mds_data.store.encrypt import encrypt_store
from mds_train import TrainConfig
from mds_train.config import DataConfig
from mds_train.data.building import open_stores, training_samples, validation_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores whose tokens say which one they are from."""
    path = tmp_path_factory.mktemp("blends")
    for number, documents in enumerate((60, 30, 10)):
        tokens = [np.full(17, number + 10 * (index % 5), np.int64) for index in range(documents)]
        split = {"train": (0.0, 0.8), "valid": (0.8, 1.0)}
        write_store(path / f"{number}", tokens, vocab_size=VOCABULARY, eod_id=0, split=split)
    return path


def config_of(folder: Path, **data: Any) -> TrainConfig:
    names = data.pop("stores", ())
    valid = data.pop("valid_stores", ())
    table = DataConfig(
        seq_length=16,
        stores=tuple(str(folder / name) for name in names),
        valid_stores=tuple(str(folder / name) for name in valid),
        **data,
    )
    return replace(tiny_config(folder, train={"train_steps": 20}), data=table)


def sources_of(samples: Any) -> list[int]:
    return [int(samples[number]["tokens"][0]) % 10 for number in range(len(samples))]


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_every_prefix_holds_each_store_by_its_weight(folder: Path, order: str) -> None:
    config = config_of(folder, stores=("0", "1"), weights=(3.0, 1.0), order=order)

    found = sources_of(training_samples(config, open_stores(config)))

    assert len(found) == 160
    for length in (8, 40, 160):
        assert abs(Counter(found[:length])[0] - 0.75 * length) <= 1


def test_each_store_goes_on_in_its_own_order(folder: Path) -> None:
    config = config_of(folder, stores=("0", "1"), weights=(1.0, 1.0), split="80,20,0")
    stores = open_stores(config)
    blend = training_samples(config, stores)

    second = [number for number in range(160) if int(blend[number]["tokens"][0]) % 10 == 1]

    alone = GPTDataset(
        open_store(folder / "1"), seq_length=16, num_samples=90, seed=7, split=("80,20,0", "train")
    )
    for place, number in enumerate(second):
        assert (blend[number]["tokens"] == alone[place]["tokens"]).all()


def test_without_weights_the_sizes_decide(folder: Path) -> None:
    config = config_of(folder, stores=("0", "1", "2"))

    counts = Counter(sources_of(training_samples(config, open_stores(config))))

    # 48, 24 and 8 documents of 17 tokens: 51, 25 and 8 samples, of which 160 have their share.
    assert [counts[source] for source in (0, 1, 2)] == pytest.approx([97, 48, 15], abs=1.5)


def test_validation_takes_its_own_stores_as_a_whole(folder: Path) -> None:
    config = config_of(folder, store=str(folder / "0"), valid_stores=("1", "2"))
    stores = open_stores(config)

    validation = validation_samples(config, stores)

    assert validation is not None
    assert len(validation) == (30 * 17 - 1) // 16 + (10 * 17 - 1) // 16
    assert set(sources_of(validation)) == {1, 2}
    training = training_samples(config, stores)
    documents = {bytes(training[number]["tokens"]) for number in range(160)}
    assert set(sources_of(training)) == {0}
    assert len(documents) > 1


def test_a_store_whose_vocabulary_is_too_large_is_named(folder: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "large", [np.arange(50)], vocab_size=5000, eod_id=0)
    config = config_of(folder, stores=("0", str(tmp_path / "large")))

    with pytest.raises(ValueError, match="large was made with a vocabulary of 5000 tokens"):
        open_stores(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"data\.store is not set"),
        ({"store": "a", "stores": ("b",)}, "both set"),
        ({"stores": ("a", "b"), "weights": (1.0,)}, "1 numbers for 2"),
        ({"stores": ("a", "b"), "weights": (1.0, -1.0)}, "must be greater than 0"),
        ({"store": "a", "valid_weights": (1.0,)}, "1 numbers for 0"),
    ],
)
def test_stores_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(seq_length=16, **changes)


def test_an_encrypted_store_gives_the_same_samples(folder: Path, tmp_path: Path) -> None:
    identity = tmp_path / "key.txt"
    recipient = new_identity(identity)
    for name in ("0", "1"):
        encrypt_store(folder / name, tmp_path / name, recipients=[recipient])
    plain = config_of(folder, stores=("0", "1"))
    sealed = config_of(tmp_path, stores=("0", "1"), identity=str(identity))

    one, other = (training_samples(each, open_stores(each)) for each in (plain, sealed))

    for number in range(len(one)):
        assert np.array_equal(one[number]["tokens"], other[number]["tokens"])
    with pytest.raises(ValueError, match="no key was given"):
        open_stores(config_of(tmp_path, stores=("0",)))
