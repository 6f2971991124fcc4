"""A run with adapters leaves the weights as they are, saves the adapters, and resumes bitwise."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    MODEL,
    VOCABULARY,
    checkpoint_differences,
    make_store,
    run_here,
    tiny_config,
)
from safetensors.numpy import load_file

from mds_ckpt import open_checkpoint
from mds_train import TrainConfig, cli
from mds_train.config import LoraConfig
from mds_train.finetune.adapter import write_adapter
from mds_train.generate import load_model

pytestmark = pytest.mark.timeout(120)

SHAPE = replace(
    MODEL,
    activation="swiglu",
    ffn_hidden_size=48,
    num_key_value_heads=2,
    position_embedding="rope",
    normalization="rmsnorm",
    add_bias=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a trained base, and six steps of adapters beside it with checkpoints 3 and 6."""
    path = tmp_path_factory.mktemp("lora")
    make_store(path)
    base = tiny_config(path, model=SHAPE, checkpoint={"save_interval": 6})
    run_here(replace(base, train=replace(base.train, run_dir=str(path / "base"))))
    run_here(lora_config(path, "tuned"))
    return path


def lora_config(folder: Path, name: str, **lora: Any) -> TrainConfig:
    load = {"load": str(folder / "base"), "load_weights_only": True, "save_interval": 3}
    config = tiny_config(folder, model=SHAPE, checkpoint=load)
    train = replace(config.train, run_dir=str(folder / name))
    return replace(config, train=train, lora=replace(LORA, **lora))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-6"


def logits(*arguments: Any, **options: Any) -> torch.Tensor:
    tokens = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    with torch.no_grad():
        found = load_model(*arguments, **options)(tokens)
    assert isinstance(found, torch.Tensor)
    return found


def test_checkpoints_hold_the_adapters_alone(folder: Path) -> None:
    saved = open_checkpoint(newest(folder / "tuned"))

    assert all(".adapter.linear_" in name for name in saved.tensors)
    assert len(saved.tensors) == 2 * 4 * MODEL.num_layers
    assert set(saved.states) == {"weight", "exp_avg", "exp_avg_sq"}
    assert saved.states["exp_avg"].keys() == saved.tensors.keys()


def test_it_resumes_bitwise(folder: Path) -> None:
    whole = lora_config(folder, "tuned")
    halves = lora_config(folder, "halves")
    first, _ = run_here(replace(halves, train=replace(halves.train, exit_step=3)))

    second, _ = run_here(halves, resume=True)

    assert len(first.losses) == len(second.losses) == 3
    tuned, resumed = Path(whole.train.run_dir), Path(halves.train.run_dir)
    assert checkpoint_differences(newest(tuned), newest(resumed)) == []


def test_the_run_is_the_base_with_b_a_added_to_its_weights(folder: Path, tmp_path: Path) -> None:
    base, saved = (
        open_checkpoint(newest(folder / "base")),
        open_checkpoint(newest(folder / "tuned")),
    )
    expected = load_model(folder / "base")
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            first = name.removesuffix("weight") + "adapter.linear_in.weight"
            if first in saved.tensors:
                a = saved.tensors[first].numpy().astype(np.float64)
                b = saved.tensors[first.replace("_in", "_out")].numpy().astype(np.float64)
                change = LORA.alpha / LORA.rank * b @ a
                assert np.abs(change).max() > 1e-3
                parameter.copy_(torch.from_numpy(base.tensors[name].numpy() + change))
        wanted = expected(torch.arange(24).view(2, 12) * 7 % VOCABULARY)

    torch.testing.assert_close(logits(folder / "tuned"), wanted, rtol=0, atol=2e-6)
    adapter = write_adapter(folder / "tuned")
    torch.testing.assert_close(logits(adapter), wanted, rtol=0, atol=2e-6)
    beside = logits(folder / "base", adapter=adapter)
    torch.testing.assert_close(beside, wanted, rtol=0, atol=2e-6)
    assert not torch.allclose(logits(folder / "base"), wanted, atol=1e-3)
    shutil.move(folder / "base", tmp_path / "elsewhere")
    try:
        with pytest.raises(ValueError, match="which is not there any more"):
            load_model(folder / "tuned")
        with pytest.raises(ValueError, match="add --adapter"):
            load_model(adapter)
    finally:
        shutil.move(tmp_path / "elsewhere", folder / "base")


def test_the_adapter_has_the_names_and_shapes_of_transformers(folder: Path) -> None:
    adapter = write_adapter(folder / "tuned")

    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    layer = "base_model.model.model.layers.1"
    head = MODEL.hidden_size // MODEL.num_attention_heads
    rows = {"q": MODEL.hidden_size, "k": 2 * head, "v": 2 * head}
    for letter, count in rows.items():
        assert tensors[f"{layer}.self_attn.{letter}_proj.lora_B.weight"].shape == (count, 4)
    assert tensors[f"{layer}.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    assert config["r"] == 4
    assert config["lora_alpha"] == 8.0
    modules = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert " ".join(config["target_modules"]) == modules


def test_the_command_trains_merges_and_leaves_an_adapter(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ["--data", str(folder / "store"), "--output", str(run), "--merge"]
    settings = ["--lora.rank", "2", "--lora.targets", "linear_qkv", "linear_fc2"]
    short = ["--train.train-steps", "2", "--train.global-batch-size", "4"]

    assert cli.main(["finetune", str(folder / "base"), *arguments, *settings, *short]) == 0

    shown = capsys.readouterr().out
    assert "adapters of rank 2 beside" in shown
    assert str(run / "merged") in shown
    torch.testing.assert_close(logits(run / "merged"), logits(run), rtol=0, atol=2e-6)
    assert "lr = 0.0002" in (run / "config.toml").read_text()
    names = open_checkpoint(run / "checkpoints").tensors
    assert {name.split(".")[4] for name in names} == {"linear_qkv", "linear_fc2"}


def test_what_was_tuned_can_be_tuned_again(folder: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(folder / "store"), "--output", str(tmp_path / "again")]
    short = ["--train.train-steps", "1", "--lr", "1e-12", "--optimizer.weight-decay", "0"]

    assert cli.main(["finetune", str(folder / "tuned"), *arguments, *short]) == 0

    torch.testing.assert_close(logits(tmp_path / "again"), logits(folder / "tuned"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"checkpoint": {"load": None, "load_weights_only": False}}, "needs checkpoint.load"),
        ({"checkpoint": {"load_weights_only": False}}, "takes weights alone"),
        ({"train": {"run_dir": "base"}}, "a folder of its own"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, change: dict[str, dict[str, Any]], said: str
) -> None:
    config = lora_config(tmp_path, "run")
    for table, values in change.items():
        if "run_dir" in values:
            values = {"run_dir": str(tmp_path / "base")}  # noqa: PLW2901
        changed = {table: replace(getattr(config, table), **values)}
        with pytest.raises(ValueError, match=said):
            replace(config, **changed)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"targets": ("q_proj",)}, "q_proj, which is linear_qkv here"),
        ({"targets": ("embedding",)}, "choose among these, not embedding"),
        ({"rank": -1}, "lora.rank"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LoraConfig(**values)


def test_merging_needs_adapters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(folder / "store"), "--output", str(tmp_path / "run"), "--merge"]

    assert cli.main(["finetune", str(folder / "base"), *arguments]) == 2

    assert "set --lora.rank" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
