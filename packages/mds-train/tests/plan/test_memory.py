"""States are divided as ZeRO and the layout say, activations as the layers really keep them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shell_cases import tiny_config

from mds_core import ProcessGroups
from mds_core.config.adapters import AdapterConfig
from mds_core.models import GPT, add_adapters
from mds_train.config import EngineConfig, LoraConfig, MemoryConfig, ParallelConfig
from mds_train.plan.memory import plan_memory


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer", "buffers", "summing"),
    [
        (0, 4, 4, 8, 0, 4),
        (1, 4, 4, 12 / 2, 0, 4 + 4 / 2),
        (2, 4, 4 / 2, 12 / 2, 0, 8),
        (3, 4 / 2, 4 / 2, 12 / 2, 8, 12),
    ],
)
def test_zero_divides_what_it_says_by_the_replicas(
    stage: int, weights: float, gradients: float, optimizer: float, buffers: int, summing: float
) -> None:
    config = replace(tiny_config(Path("run")), parallel=ParallelConfig(zero_stage=stage))
    count = config.model.num_params()

    memory = plan_memory(config, world_size=2, on_cpu=True)

    assert memory.weights == pytest.approx(weights * count, abs=16)
    assert memory.gradients == pytest.approx(gradients * count, abs=16)
    assert memory.optimizer == pytest.approx(optimizer * count, abs=16)
    assert memory.buffers == pytest.approx(buffers * count, abs=16)
    assert memory.summing == pytest.approx(summing * count, abs=32)
    states = memory.weights + memory.gradients + memory.optimizer
    computing = memory.activations + memory.head + memory.buffers
    assert memory.total == states + max(computing, memory.summing)


def test_the_buffer_of_a_device_has_the_size_that_the_json_says(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"reduce_bucket_size": 1000000}}')
    config = replace(tiny_config(Path("run")), parallel=ParallelConfig(zero_stage=2))
    said = replace(config, engine=EngineConfig(deepspeed_config=str(own)))

    usual, small = (plan_memory(each, world_size=2) for each in (config, said))

    assert usual.buffers == 4 * 500_000_000  # DeepSpeed's default
    assert small.buffers == 4 * 1_000_000
    assert plan_memory(said, world_size=2, on_cpu=True).buffers == 0


def test_what_lies_in_the_hosts_memory_is_not_counted() -> None:
    config = replace(tiny_config(Path("run")), parallel=ParallelConfig(zero_stage=3))
    config = replace(config, optimizer=replace(config.optimizer, implementation="deepspeed-cpu"))
    offload = MemoryConfig(offload_optimizer="cpu", offload_ratio=0.75, offload_parameters="cpu")

    whole = plan_memory(config, world_size=2)
    part = plan_memory(replace(config, memory=offload), world_size=2)

    assert (part.weights, part.gradients) == (0, whole.gradients)
    assert part.optimizer == pytest.approx(whole.optimizer / 4, abs=1)


def test_ranks_that_share_out_experts_hold_a_part_of_them() -> None:
    config = tiny_config(Path("run"))
    config = replace(config, model=replace(config.model, num_experts=4, moe_topk=2))
    shared = replace(config, parallel=ParallelConfig(ep_size=2, zero_stage=1))
    whole = GPT(config.model.core(), ProcessGroups.single(), device="meta")
    named, experts = dict(whole.named_parameters()), whole.expert_parameters()
    half = sum(named[name].numel() for name in experts) // 2

    memory = plan_memory(shared, world_size=2)

    assert half > 10_000
    assert memory.weights == pytest.approx(4 * (config.model.num_params() - half), abs=16)
    # ZeRO cuts what both ranks hold; the experts of a rank are held by nobody else.
    assert memory.optimizer == pytest.approx(12 / 2 * config.model.num_params(), abs=64)


def test_beside_adapters_the_weights_have_no_gradients() -> None:
    config = tiny_config(Path("run"))
    load = replace(config.checkpoint, load="base", load_weights_only=True)
    adapting = replace(config, checkpoint=load, lora=LoraConfig(rank=2))
    model = GPT(config.model.core(), ProcessGroups.single(), device="meta")
    add_adapters(model, AdapterConfig(rank=2, alpha=16.0))
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)

    whole, memory = (plan_memory(each, world_size=1) for each in (config, adapting))

    assert memory.weights == whole.weights
    assert memory.gradients == 4 * trained
    assert memory.optimizer * whole.gradients == whole.optimizer * memory.gradients


def test_tensor_parallel_halves_the_model() -> None:
    config = tiny_config(Path("run"))
    split = replace(config, parallel=ParallelConfig(tp_size=2))

    whole, half = plan_memory(config, world_size=1), plan_memory(split, world_size=2)

    assert half.weights == pytest.approx(whole.weights / 2, abs=8)
    assert half.activations < whole.activations


def test_recomputing_layers_keeps_little_of_them() -> None:
    config = tiny_config(Path("run"))
    again = replace(config, memory=MemoryConfig(recompute="full"))

    whole, little = (plan_memory(each, world_size=1).activations for each in (config, again))

    assert little < whole


def test_ranks_that_share_a_sequence_share_its_activations() -> None:
    config = tiny_config(Path("run"))
    shared = replace(config, parallel=ParallelConfig(ulysses_size=2))

    alone, half = plan_memory(config, world_size=1), plan_memory(shared, world_size=2)

    assert half.weights == alone.weights
    # Half of everything, and the attention's result once more as it comes back by position.
    model, positions = config.model, config.train.micro_batch_size * config.data.seq_length
    copies = model.num_layers * positions * model.hidden_size // 2 * 4
    assert half.activations == alone.activations // 2 + copies


def test_pipeline_ranks_hold_their_stages_and_a_schedules_micro_batches() -> None:
    config = tiny_config(Path("run"))
    config = replace(config, train=replace(config.train, global_batch_size=16))
    staged = replace(config, parallel=ParallelConfig(pp_size=2, zero_stage=0))
    every = replace(config, parallel=ParallelConfig(pp_size=2, zero_stage=0, schedule="gpipe"))

    whole, half = plan_memory(config, world_size=1), plan_memory(staged, world_size=2)

    assert 0.4 * whole.weights < half.weights < whole.weights
    # Each rank holds half of the layers, of two micro batches.
    assert half.activations == pytest.approx(whole.activations, rel=0.1)
    assert plan_memory(every, world_size=2).activations > half.activations
