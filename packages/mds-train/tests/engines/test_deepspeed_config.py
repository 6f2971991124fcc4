from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import MODEL, tiny_config

from mds_train.engines.deepspeed_config import deepspeed_config


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_batch_sizes_multiply_up(tmp_path: Path, dp_size: int) -> None:
    derived = deepspeed_config(
        tiny_config(tmp_path), dp_size=dp_size, replicas=dp_size, on_cpu=True
    )

    micro, steps = (
        derived["train_micro_batch_size_per_gpu"],
        derived["gradient_accumulation_steps"],
    )
    assert micro * steps * dp_size == derived["train_batch_size"] == 8


@pytest.mark.parametrize(("stage", "clipping"), [(0, 0.0), (1, 1.0), (2, 1.0), (3, 1.0)])
def test_clipping_is_always_written_and_done_once(
    tmp_path: Path, stage: int, clipping: float
) -> None:
    config = tiny_config(tmp_path, parallel={"zero_stage": stage})

    assert (
        deepspeed_config(config, dp_size=1, replicas=1, on_cpu=True)["gradient_clipping"]
        == clipping
    )


def test_bf16_sums_gradients_in_fp32(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"precision": "bf16"})

    derived = deepspeed_config(config, dp_size=1, replicas=1, on_cpu=True)

    assert derived["bf16"]["enabled"] is True
    assert derived["data_types"] == {"grad_accum_dtype": "fp32"}
    assert derived["communication_data_type"] == "fp32"


def test_a_pipeline_is_one_large_micro_batch_to_deepspeed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, parallel={"pp_size": 2})

    derived = deepspeed_config(config, dp_size=2, replicas=2, on_cpu=True)

    assert derived["train_micro_batch_size_per_gpu"] == 4
    assert derived["gradient_accumulation_steps"] == 1


def test_ranks_that_share_sequences_count_as_replicas(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, parallel={"ulysses_size": 2})

    derived = deepspeed_config(config, dp_size=2, replicas=4, on_cpu=True)

    assert derived["train_batch_size"] == 16
    assert derived["gradient_accumulation_steps"] == 2


def test_experts_are_summed_in_one_buffer(tmp_path: Path) -> None:
    model = replace(MODEL, num_experts=4)
    config = tiny_config(tmp_path, model=model, parallel={"ep_size": 2})

    zero = deepspeed_config(config, dp_size=2, replicas=2, on_cpu=True)["zero_optimization"]

    assert zero["contiguous_gradients"] is True


def test_what_is_kept_on_the_host_is_deepspeeds_own_settings(tmp_path: Path) -> None:
    """DeepSpeed's own class reads them, so that a key it does not know would be refused."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    offload = {"offload_optimizer": "cpu", "offload_ratio": 0.5, "offload_parameters": "cpu"}
    config = tiny_config(
        tmp_path,
        parallel={"zero_stage": 3},
        memory=offload,
        optimizer={"implementation": "deepspeed-cpu"},
    )

    zero = deepspeed_config(config, dp_size=1, replicas=1, on_cpu=False)["zero_optimization"]

    read = DeepSpeedZeroConfig(**zero)
    assert read.offload_optimizer.device == read.offload_param.device == "cpu"
    assert (read.offload_optimizer.ratio, read.offload_optimizer.pin_memory) == (0.5, True)
