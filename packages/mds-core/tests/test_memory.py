"""What is computed again or kept on the host changes no gradient, and does free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import DROPPING, GPT2, MIXTRAL, PR_MOE, QWEN3, T5_SHAPE, Cell, build, t5_loss
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mds_core.config import Execution
from mds_core.groups import ProcessGroups
from mds_core.memory import again, on_host
from mds_core.models import T5
from mds_core.rng import DropoutKey

MODULES = ["core_attention", "attention", "norm", "activation", "mlp"]
POLICIES = {
    **{name: Execution(recompute="modules", recompute_modules=(name,)) for name in MODULES},
    "several": Execution(recompute="modules", recompute_modules=("norm", "activation")),
    "host": Execution(offload_activations=True),
    "full-host": Execution(recompute="full", offload_activations=True),
}
CONFIGS = {
    "qwen3": replace(QWEN3, **DROPPING),
    "mixtral": MIXTRAL,
    "pr-moe": replace(PR_MOE, **DROPPING),
    "t5": replace(T5_SHAPE, **DROPPING),
}


def loss_of(model) -> torch.Tensor:
    window = torch.randint(0, 96, (3, 17), generator=torch.Generator().manual_seed(3))
    key = DropoutKey(seed=1, samples=torch.arange(3))
    if isinstance(model, T5):
        mask = torch.ones(3, 16, dtype=torch.float64)
        return t5_loss(model, window[:, :-1], window[:, 1:], mask=mask, key=key)
    return model(window[:, :-1], window[:, 1:], dropout_key=key).loss_sum


def gradients(config, execution: Execution) -> dict[str, torch.Tensor]:
    model = build(Cell(config=config, execution=execution), ProcessGroups.single())
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, torch.Tensor]]:
    return {name: gradients(config, Execution()) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CONFIGS)
def test_no_policy_changes_a_gradient(policy, name, plain) -> None:
    actual = gradients(CONFIGS[name], POLICIES[policy])

    assert actual.keys() == plain[name].keys()
    for parameter, gradient in actual.items():
        assert torch.equal(gradient, plain[name][parameter]), parameter


def kept_and_computed(execution: Execution) -> tuple[int, int]:
    """Bytes that autograd keeps of a GPT's layers, and operations of its matrix products."""
    config = replace(GPT2, num_layers=2, hidden_dropout=0.1)
    execution = replace(execution, attention_kernel="math")
    model = build(Cell(config=config, execution=execution), ProcessGroups.single())
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = loss_of(model)
        loss.backward()
    return sum(kept.values()), counter.get_total_flops()


@pytest.mark.parametrize("module", MODULES)
def test_computing_a_module_again_keeps_less(module) -> None:
    kept, flops = kept_and_computed(POLICIES[module])
    plain_kept, plain_flops = kept_and_computed(Execution())

    assert kept < plain_kept
    if module in ("norm", "activation"):
        assert flops == plain_flops  # the product behind them is not repeated
    else:
        assert flops > plain_flops


def test_the_list_and_the_layers_keep_less_the_more_is_computed_again() -> None:
    both, _ = kept_and_computed(POLICIES["several"])
    more = Execution(
        recompute="modules", recompute_modules=("norm", "activation", "core_attention")
    )
    whole = Execution(recompute="modules", recompute_modules=("attention", "mlp"))

    sizes = [both, *(kept_and_computed(x)[0] for x in (more, whole, Execution(recompute="full")))]
    assert sizes == sorted(sizes, reverse=True)


def test_large_activations_move_to_the_host_and_parameters_stay() -> None:
    weight = nn.Parameter(torch.randn(100, 100))
    x, small = torch.randn(100, 100, requires_grad=True), torch.randn(3, requires_grad=True)

    with on_host():
        product, sine, tiny = x @ weight.mT, x.sin(), small.sin()

    assert sine.grad_fn._saved_self.data_ptr() != x.data_ptr()
    assert torch.equal(sine.grad_fn._saved_self, x)
    assert tiny.grad_fn._saved_self.data_ptr() == small.data_ptr()
    assert product.grad_fn._saved_mat2.data_ptr() == weight.data_ptr()


def test_inputs_of_recomputed_blocks_move_to_the_host() -> None:
    moved: list[int] = []
    x = torch.randn(100, 100, requires_grad=True)

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: moved.append(t.numel()) or t, lambda t: t
    ):
        y = again(lambda t: t.sin().cos().exp(), x)
    y.sum().backward()

    assert moved.count(x.numel()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": "modules"}, r"recompute is 'modules' and recompute_modules \(\)"),
        ({"recompute_modules": ("mlp",)}, "recompute is 'none' and recompute_modules"),
        (
            {"recompute": "modules", "recompute_modules": ("mlp", "activation")},
            "has mlp and activation, which is a part of it",
        ),
        (
            {"recompute": "modules", "recompute_modules": ("sums",)},
            r"recompute_modules \('sums'\) is unknown; choose one of core_attention",
        ),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        Execution(**changes)


def test_norms_of_a_post_norm_model_are_not_computed_again() -> None:
    with pytest.raises(ValueError, match="with residual_post_layernorm the residual stream keeps"):
        POLICIES["norm"].check(replace(GPT2, residual_post_layernorm=True))
