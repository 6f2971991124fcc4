"""A plan says what a run then needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mds_core import ProcessGroups
from mds_core.models import GPT
from mds_core.partition import Stage
from mds_train.cli import main
from mds_train.config import TrainConfig
from mds_train.model_building import execution_of, parameter_dtype
from mds_train.plan.activations import LayerCounter, layer_bytes
from mds_train.plan.machines import Fitted, Machine, machine_named
from mds_train.plan.memory import memory_by_stage, plan_memory
from mds_train.plan.search import ROOM, search_layouts
from mds_train.plan.speed import plan_speed, plan_traffic
from mds_train.recipes.catalogue import all_recipes, find_recipe
from mds_train.recipes.sizes import configuration_of

RECIPES = [recipe.name for recipe in all_recipes()]
A100 = machine_named("a100-80")


def small(recipe: str, *, precision: str = "fp32", recompute: str = "none") -> TrainConfig:
    """A recipe's kind of layer in a size that runs here, on one rank."""
    config = configuration_of(find_recipe(recipe))
    model = replace(
        config.model, num_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=100,
        num_key_value_heads=2 if config.model.num_key_value_heads else None,
        ffn_hidden_size=176 if config.model.ffn_hidden_size else None,
    )  # fmt: skip
    return replace(
        config,
        model=model,
        data=replace(config.data, seq_length=32),
        train=replace(config.train, precision=precision, micro_batch_size=3, global_batch_size=6),
        parallel=replace(config.parallel, tp_size=1, sequence_parallel=False),
        memory=replace(config.memory, recompute=recompute),
    )


def really_saved(config: TrainConfig) -> int:
    """Bytes that autograd keeps of the middle layer, run on numbers."""
    model = GPT(
        config.model.core(), ProcessGroups.single(),
        stage=Stage(index=1, count=3, layers=range(1, 2)),
        dtype=parameter_dtype(config), execution=execution_of(config),
    )  # fmt: skip
    shape = (config.train.micro_batch_size, config.data.seq_length, config.model.hidden_size)
    hidden = torch.randn(shape).to(parameter_dtype(config)).requires_grad_()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model.forward_stage(
            hidden, position_ids=torch.arange(config.data.seq_length)[None]
        )
    del result
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", ["gpt3-125m", "llama3-8b"])
def test_a_layer_keeps_what_was_counted(recipe: str, precision: str, recompute: str) -> None:
    config = small(recipe, precision=precision, recompute=recompute)

    assert layer_bytes(config) == pytest.approx(really_saved(config), rel=0.01)


def test_counting_once_serves_all_micro_batches() -> None:
    config = small("llama3-8b")
    count = LayerCounter()

    for micro_batch in (1, 3):
        train = replace(config.train, micro_batch_size=micro_batch)
        counted = replace(config, train=train)
        assert count(counted) == pytest.approx(layer_bytes(counted), rel=0.01)


@pytest.mark.parametrize("replicas", [1, 8, 64])
def test_states_take_what_the_distributed_optimizer_needs(replicas: int) -> None:
    # Megatron's table for bf16 with fp32 gradients: 18 bytes a parameter, or 6 + 12 / d.
    config = configuration_of(find_recipe("gpt3-1.3b"))
    parameters = config.model.num_params()

    plans = memory_by_stage(config, world_size=replicas)

    for stage, expected in ((0, 18), (1, 6 + 12 / replicas), (3, 18 / replicas)):
        plan = plans[stage]
        states = plan.weights + plan.gradients + plan.optimizer
        assert states / parameters == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned(name: str) -> None:
    recipe = find_recipe(name)
    config = configuration_of(recipe)

    memory = plan_memory(config, world_size=recipe.gpus)
    speed = plan_speed(config, world_size=recipe.gpus, machine=A100)

    # Experts are not yet shared out over ranks by the trainer, so their recipes do not fit.
    if not any(config.model.experts):
        assert memory.total < recipe.gpu_gigabytes * 1e9
    assert 0 < speed.utilisation < A100.fitted.efficiency
    assert all(
        each.bytes > 0 for each in plan_traffic(config, world_size=recipe.gpus, machine=A100)
    )


def test_time_follows_from_flops_and_bubble() -> None:
    config = configuration_of(find_recipe("gpt3-175b"))
    endless = replace(A100, memory_gigabytes=1e12)

    speed = plan_speed(
        config, world_size=1024, machine=endless, fitted=Fitted(efficiency=0.5, exposed=0)
    )

    # 192 micro batches on 16 stages; 6 FLOPs a parameter and token, and the attention.
    assert speed.bubble_share == pytest.approx(15 / 207)
    assert speed.flops_per_token == pytest.approx(6 * 174.6e9, rel=0.03)
    tokens = 1536 * 2048
    assert speed.step_seconds == pytest.approx(
        tokens * speed.hardware_flops_per_token / (1024 * 312e12 * 0.5) / (1 - 15 / 207)
    )


def test_what_is_sent_and_what_memory_moves_takes_time() -> None:
    config = configuration_of(find_recipe("gpt3-175b"))

    def seconds(machine: Machine, *, exposed: float) -> float:
        fitted = Fitted(efficiency=0.5, exposed=exposed)
        return plan_speed(config, world_size=1024, machine=machine, fitted=fitted).step_seconds

    sent = sum(each.seconds for each in plan_traffic(config, world_size=1024, machine=A100))
    hidden, shown = (seconds(A100, exposed=share) for share in (0, 1))
    assert shown - hidden == pytest.approx(sent)
    assert seconds(replace(A100, memory_gigabytes=100), exposed=0) > 1.15 * hidden


def test_interleaving_divides_the_bubble_as_published() -> None:
    # Narayanan et al. 2021: (p - 1) / (v m) of the ideal time.
    config = configuration_of(find_recipe("gpt3-175b-interleaved"))

    bubble = plan_speed(config, world_size=1024, machine=A100).bubble_share

    assert bubble / (1 - bubble) == pytest.approx(15 / (3 * 192))


def test_the_search_finds_layouts_that_fit_and_run() -> None:
    config = configuration_of(find_recipe("llama2-7b"))

    found = search_layouts(config, world_size=64, machine=A100)

    assert len(found) == 5
    assert [each.step_seconds for each in found] == sorted(each.step_seconds for each in found)
    for each in found:
        each.config.check_world(64)
        assert each.memory <= ROOM * 80e9
        assert each.config.train.global_batch_size == config.train.global_batch_size


def test_where_nothing_fits_the_search_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-1t", "--gpus", "16", "--gpu", "v100-32", "--search"]) == 1

    assert "No layout fits" in capsys.readouterr().out


def test_the_command_prints_memory_time_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt3-13b", "--gpu", "h100"]) == 0

    shown = capsys.readouterr().out
    for word in ("12,853,386,240", "ZeRO 1 *", "tokens a day", "a checkpoint", "gradients"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gpt3-175b", "--gpus", "100"], "multiple of 128"),
        (["gpt3-175b", "--gpu", "a100"], "a100-80"),
        (["gpt3-175c"], "gpt3-175b"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) in (2, 3)

    assert word in capsys.readouterr().err
