"""A run whose store and checkpoints are encrypted is the plain run, and leaves no plain weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine_cases import Recorder, checkpoint_differences, make_store, run_here, tiny_config

from mds_ckpt import KeySource, open_checkpoint
from mds_ckpt.encryption.keys import new_identity
from mds_ckpt.protection.encrypt import decrypt_checkpoint
from mds_data.store.encrypt import encrypt_store
from mds_train import TrainConfig
from mds_train.config import CheckpointConfig, DataConfig
from mds_train.data.building import key_of
from mds_train.saving.sealing import check_sealing

pytestmark = pytest.mark.timeout(120)

NOBODY = "age1" + "q" * 58


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A plain run in ``run``, an encrypted one of the same in ``sealed``, its key in key.txt."""
    path = tmp_path_factory.mktemp("sealing")
    make_store(path)
    recipient = new_identity(path / "key.txt")
    encrypt_store(path / "store", path / "sealed-store", recipients=[recipient])
    run_here(tiny_config(path))
    run_here(sealed_config(path, path / "sealed", backup=str(path / "second")))
    yield path
    dist.destroy_process_group()


def sealed_config(folder: Path, run_dir: Path, **checkpoint: Any) -> TrainConfig:
    key = str(folder / "key.txt")
    recipient = (folder / "key.txt").read_text().split()[3]
    config = tiny_config(
        folder,
        data={"store": str(folder / "sealed-store"), "identity": key},
        checkpoint={"encrypt_to": (recipient,), "identity": key, **checkpoint},
    )
    return replace(config, train=replace(config.train, run_dir=str(run_dir)))


def step_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


def decrypted(folder: Path, source: Path, target: Path) -> Path:
    decrypt_checkpoint(source, target, key=KeySource(identity=folder / "key.txt"))
    return target


def plain_losses(folder: Path, run_dir: Path) -> list[float]:
    config = tiny_config(folder, checkpoint={"load": str(step_of(folder / "run", 3))})
    recorder, _ = run_here(replace(config, train=replace(config.train, run_dir=str(run_dir))))
    return recorder.losses


def resumed(folder: Path, run_dir: Path, **checkpoint: Any) -> Recorder:
    """Go on from the encrypted checkpoint of step 3."""
    shutil.copytree(step_of(folder / "sealed", 3), step_of(run_dir, 3))
    return run_here(sealed_config(folder, run_dir, **checkpoint), resume=True)[0]


@pytest.mark.parametrize("step", [3, 6])
def test_what_is_under_the_seal_is_the_plain_checkpoint(
    folder: Path, tmp_path: Path, step: int
) -> None:
    opened = decrypted(folder, step_of(folder / "sealed", step), tmp_path / "plain")

    assert checkpoint_differences(opened, step_of(folder / "run", step)) == []


def test_no_weight_lies_there_in_plain_bytes(folder: Path) -> None:
    plain = open_checkpoint(step_of(folder / "run", 3))
    weights = {name: tensor.numpy().tobytes() for name, tensor in plain.tensors.items()}

    written = [path.read_bytes() for path in (folder / "sealed").rglob("*") if path.is_file()]
    written += [path.read_bytes() for path in (folder / "second").rglob("*") if path.is_file()]

    random = {name: data for name, data in weights.items() if len(set(data)) > 16}
    assert len(random) > 8
    for name, data in random.items():
        assert not [text for text in written if data[:64] in text], name


def test_a_resumed_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    recorder = resumed(folder, tmp_path / "again")

    assert recorder.losses == plain_losses(folder, tmp_path / "plain-again")
    assert len(recorder.losses) == 3
    last = decrypted(folder, step_of(tmp_path / "again", 6), tmp_path / "last")
    assert checkpoint_differences(last, step_of(folder / "run", 6)) == []


def test_the_second_place_holds_the_same_bytes(folder: Path) -> None:
    one, other = (step_of(folder / name, 6) for name in ("sealed", "second"))

    assert {path.name: path.read_bytes() for path in one.iterdir()} == {
        path.name: path.read_bytes() for path in other.iterdir()
    }


def test_without_a_key_nothing_is_resumed_and_it_says_how_to_name_one(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"no key was given; name what opens it: checkpoint\.ide"):
        resumed(folder, tmp_path / "again", identity=None)
    store = replace(sealed_config(folder, tmp_path / "run").data, identity=None)
    config = replace(tiny_config(folder), data=store)
    with pytest.raises(ValueError, match=r"no key was given; name what opens it: data\.identity"):
        run_here(config)


def test_a_wrong_key_is_refused(folder: Path, tmp_path: Path) -> None:
    new_identity(tmp_path / "other.txt")

    with pytest.raises(ValueError, match="does not open with the key"):
        resumed(folder, tmp_path / "again", identity=str(tmp_path / "other.txt"))


@pytest.mark.parametrize(
    ("entries", "named", "message"),
    [
        (("age1short",), {}, "no public key of age"),
        (("AGE-SECRET-KEY-1",), {}, "no public key of age"),
        (("passphrase",), {}, "set checkpoint.passphrase_file"),
        (("key-command",), {"passphrase_file": "p"}, "set checkpoint.key_command"),
    ],
)
def test_recipients_that_cannot_be_are_refused(
    entries: tuple[str, ...], named: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointConfig(encrypt_to=entries, **named)


def test_keys_are_tried_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("one line\n")
    named = {"passphrase_file": str(words)}

    assert check_sealing(CheckpointConfig(), first=True) is None
    by_words = CheckpointConfig(encrypt_to=("passphrase",), **named)
    assert check_sealing(by_words, first=True) is None
    other = (folder / "key.txt").read_text().split()[3]
    for_others = CheckpointConfig(encrypt_to=(other,), **named)
    assert "encrypted for others only" in str(check_sealing(for_others, first=True))
    with pytest.raises(ValueError, match="is no age recipient"):
        check_sealing(CheckpointConfig(encrypt_to=(NOBODY,)), first=True)
    command = CheckpointConfig(encrypt_to=("key-command",), key_command="/not/there")
    with pytest.raises(ValueError, match="can't be run"):
        check_sealing(command, first=True)


def test_a_passphrase_from_the_environment_opens_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORDS", "a secret")

    key = key_of(DataConfig(store="s", seq_length=4, passphrase_variable="WORDS"))

    assert key is not None
    assert key.passphrase() == b"a secret"
    assert "a secret" not in repr(key)
