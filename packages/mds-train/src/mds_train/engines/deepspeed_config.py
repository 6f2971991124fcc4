"""Derives DeepSpeed's JSON from the configuration of the run.

DeepSpeed's own defaults decide nothing that changes a number: those that did (clipping at 1.0, sums
of gradients in bf16) are written out.
"""

from __future__ import annotations

from typing import Any

from mds_train.config import TrainConfig

__all__ = ["deepspeed_config"]


def deepspeed_config(
    config: TrainConfig, *, dp_size: int, replicas: int, on_cpu: bool
) -> dict[str, Any]:
    """The JSON of one run.

    Args:
        config: The run.
        dp_size: Number of data-parallel ranks.
        replicas: Number of ranks with equal weights, which DeepSpeed sums gradients over; more than
            dp_size where ranks share sequences.
        on_cpu: No accelerator: nothing to overlap communication with.
    """
    train = config.train
    micro_batches = train.global_batch_size // (train.micro_batch_size * dp_size)
    micro_batch_size = train.micro_batch_size
    if config.parallel.pp_size > 1:  # the schedule runs them; DeepSpeed sees one large one
        micro_batch_size, micro_batches = micro_batch_size * micro_batches, 1
    stage = config.parallel.zero_stage
    derived: dict[str, Any] = {
        # What DeepSpeed multiplies up; ranks that share sequences count samples more than once.
        "train_batch_size": micro_batch_size * micro_batches * replicas,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": train.gradient_clipping if _clips(config) else 0.0,
        "prescale_gradients": False,
        "communication_data_type": "fp32",
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero(config, on_cpu=on_cpu),
    }
    if train.precision == "bf16":
        derived["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if stage:
            derived["data_types"] = {"grad_accum_dtype": "fp32"}
    if train.precision == "fp16":
        # The engine sets the scale before every step: see `mds_train.engines.loss_scale`.
        derived["fp16"] = {"enabled": True, "loss_scale": 1.0}
        if stage:
            derived["data_types"] = {"grad_accum_dtype": "fp32"}
    return derived


def _clips(config: TrainConfig) -> bool:
    """Whether DeepSpeed clips; where each rank has whole gradients the engine does it itself.

    There DeepSpeed leaves out the shards of other tensor-parallel ranks (ZeRO 0, bf16), does not
    report the norm (ZeRO 0, fp32), or sums it in fp32 (ZeRO 1, bf16).
    """
    stage = config.parallel.zero_stage
    offloads = config.memory.offload_optimizer != "none"
    return stage > 0 and ((stage, config.train.precision) != (1, "bf16") or offloads)


def _zero(config: TrainConfig, *, on_cpu: bool) -> dict[str, Any]:
    stage = config.parallel.zero_stage
    zero: dict[str, Any] = {"stage": stage, "round_robin_gradients": False}
    zero |= _offload(config, on_cpu=on_cpu)
    if on_cpu:
        zero |= {"overlap_comm": False, "contiguous_gradients": False}
    if config.parallel.ep_size > 1:
        # With experts ZeRO 1 and 2 sum over the right ranks only where gradients are copied into
        # one buffer, which is 2 GB unless said otherwise.
        zero["contiguous_gradients"] = True
        if on_cpu:
            zero["reduce_bucket_size"] = 50_000_000
    return zero


def _offload(config: TrainConfig, *, on_cpu: bool) -> dict[str, Any]:
    """What is moved to the host's memory; pinned, where there is a device to copy it to."""
    memory, found = config.memory, {}
    if memory.offload_optimizer != "none":
        place = {"device": memory.offload_optimizer, "pin_memory": not on_cpu}
        found["offload_optimizer"] = place | {"ratio": memory.offload_ratio}
    if memory.offload_parameters != "none":
        found["offload_param"] = {"device": memory.offload_parameters, "pin_memory": not on_cpu}
    return found
