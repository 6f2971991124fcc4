from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_cases import tiny_config

from mds_train.config import TrainConfig
from mds_train.engines.deepspeed_config import deepspeed_config
from mds_train.engines.own_json import check_own_json, with_own_json
from mds_train.errors import InputError


def merged(folder: Path, own: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    path = folder / "ds.json"
    path.write_text(json.dumps(own))
    config = tiny_config(folder, engine={"deepspeed_config": str(path)}, **changes)
    return with_own_json(derived(config), config=config)


def derived(config: TrainConfig) -> dict[str, Any]:
    return deepspeed_config(config, dp_size=1, replicas=1, on_cpu=True)


def test_a_json_that_says_the_same_changes_nothing(tmp_path: Path) -> None:
    own = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "fp16": {"enabled": False, "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "prescale_gradients": False,
        "elasticity": {"enabled": False},
        "zero_optimization": {"stage": 1.0, "offload_optimizer": {"device": "none"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
    }

    assert merged(tmp_path, own) == derived(tiny_config(tmp_path))


def test_settings_of_buffers_and_reports_are_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own = {
        "zero_optimization": {"reduce_bucket_size": 1e6, "stage3_prefetch_bucket_size": 10},
        "steps_per_print": 5,
        "flops_profiler": {"enabled": True, "profile_step": 2},
    }

    found = merged(tmp_path, own)

    expected = derived(tiny_config(tmp_path))
    expected["zero_optimization"] |= own["zero_optimization"]
    assert found == expected | {key: own[key] for key in ("steps_per_print", "flops_profiler")}
    assert "zero_optimization.reduce_bucket_size = 1000000.0 is passed on" in caplog.text


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"train_batch_size": 16},
            "train_batch_size is 16, but train.global_batch_size is 8; change one of them",
        ),
        ({"gradient_accumulation_steps": 2}, "is 2, but 4 follows here; change train.global_batch"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, but train.gradient_clipping is 1"),
        ({"zero_optimization": {"stage": 3}}, "stage is 3, but parallel.zero_stage is 1"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "device is 'cpu', but memory.offload_optimizer is 'none'",
        ),
        ({"zero_optimization": {"overlap_comm": True}}, "the engine chooses it by device"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True, but train.precision is 'fp32'"),
        ({"fp16": {"enabled": True, "hysteresis": 9}}, "hysteresis is 9, but fp16.hysteresis is 2"),
        ({"prescale_gradients": True}, "gradients are only summed"),
        ({"scheduler": {"type": "WarmupLR"}}, "the .schedule. table says how"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "not known to change no result"),
        ({"my_key": 1}, "my_key is 1, which is not passed on"),
        (
            {"optimizer": {"type": "Lamb"}},
            'optimizer.type is "Lamb", but optimizer.name is "adamw"',
        ),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1.0}}}, "lr is 1.0, but .optimizer. has"),
    ],
)
def test_a_key_that_says_something_else_names_both_and_what_to_change(
    tmp_path: Path, own: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        merged(tmp_path, own)

    assert str(tmp_path / "ds.json") in str(caught.value)


def test_what_is_chosen_by_device_may_be_said_where_the_engine_leaves_it_open(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"overlap_comm": True}}))
    engine = {"deepspeed_config": str(path)}

    check_own_json(tiny_config(tmp_path, engine=engine), world_size=1)
    on_cpu = tiny_config(tmp_path, engine=engine, train={"device": "cpu"})
    with pytest.raises(InputError, match="the engine chooses it by device"):
        check_own_json(on_cpu, world_size=1)


def test_a_precision_that_is_switched_off_contradicts_a_run_in_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"bf16\.enabled is False, but train\.precision"):
        merged(tmp_path, {"bf16": {"enabled": False}}, train={"precision": "bf16"})


def test_all_contradictions_are_told_at_once_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train_batch_size.*; my_key") as caught:
        merged(tmp_path, {"my_key": 1, "train_batch_size": 9})
    assert "train_batch_size is 9" in str(caught.value)

    config = tiny_config(tmp_path, engine={"deepspeed_config": str(tmp_path / "none.json")})
    with pytest.raises(InputError, match="there is no such file"):
        with_own_json({}, config=config)
