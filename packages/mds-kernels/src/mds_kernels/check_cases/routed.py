"""Cases of what serves experts, main gradients, attention and the optimizer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from mds_kernels.check import Check, Inputs
from mds_kernels.check_cases.inputs import fixed, normal
from mds_kernels.ops import adamw, attention, permutation, wgrad

__all__ = ["CASES"]

_EXPERTS = 5


# ---- experts -----------------------------------------------------------------------------------


def _permute_inputs(tokens: int, choices: int) -> Any:
    def make(generator: Generator) -> Inputs:
        experts = torch.randint(0, _EXPERTS - 1, (tokens, choices), generator=generator)
        return {"x": normal(generator, tokens, 19), "experts": experts}  # the last expert is idle

    return make


def _unpermute_inputs(tokens: int, choices: int, *, weigh: bool) -> Any:
    def make(generator: Generator) -> Inputs:
        places = torch.randperm(tokens * choices, generator=generator)
        return {
            "rows": normal(generator, tokens * choices, 19),
            "positions": places.view(tokens, choices),
            "probabilities": normal(generator, tokens, choices) if weigh else None,
        }

    return make


def _permuted_rows(x: Tensor, experts: Tensor, **arguments: Any) -> Tensor:
    return permutation.moe_permute(x, experts, num_experts=_EXPERTS, **arguments).tokens


def _permute_there_and_back(x: Tensor, experts: Tensor, **arguments: Any) -> Tensor:
    permuted = permutation.moe_permute(x, experts, num_experts=_EXPERTS, **arguments)
    return permutation.moe_unpermute(permuted.tokens, permuted.positions, **arguments)


def _plain_permute(x: Tensor, experts: Tensor) -> Tensor:
    return x[experts.flatten().argsort(stable=True) // experts.shape[1]]


def _plain_unpermute(
    rows: Tensor, positions: Tensor, probabilities: Tensor | None = None
) -> Tensor:
    picked = rows[positions]
    return (picked if probabilities is None else picked * probabilities[..., None]).sum(dim=1)


def _permute(case: str, tokens: int, choices: int) -> Check:
    return Check(
        op="moe_permute",
        case=case,
        inputs=_permute_inputs(tokens, choices),
        run=_permuted_rows,
        reference=lambda x, experts: permutation.moe_permute_reference(
            x, experts, num_experts=_EXPERTS
        ),
        plain=_plain_permute,
    )


def _unpermute(case: str, tokens: int, choices: int, *, weigh: bool) -> Check:
    return Check(
        op="moe_unpermute",
        case=case,
        inputs=_unpermute_inputs(tokens, choices, weigh=weigh),
        run=permutation.moe_unpermute,
        reference=permutation.moe_unpermute_reference,
        plain=_plain_unpermute,
    )


# ---- main gradients, the optimizer -------------------------------------------------------------


def _wgrad_inputs(generator: Generator) -> Inputs:
    return {
        "grad_output": normal(generator, 3, 7, 13).detach(),
        "inputs": normal(generator, 3, 7, 11).detach(),
        "total": normal(generator, 13, 11).detach(),
    }


def _accumulated(total: Tensor, grad_output: Tensor, inputs: Tensor, **arguments: Any) -> Tensor:
    wide = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
    wgrad.wgrad_accumulate(wide, grad_output, inputs, **arguments)
    return wide


def _two_dimensional(function: Any) -> Any:
    return lambda total, grad_output, inputs: function(
        total, grad_output.flatten(0, 1), inputs.flatten(0, 1)
    )


def _plain_wgrad(total: Tensor, grad_output: Tensor, inputs: Tensor) -> Tensor:
    return total + grad_output.T @ inputs


_STEP: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def _adamw_inputs(generator: Generator) -> Inputs:
    gradients = {f"gradient_{step}": normal(generator, 7, 5).detach() for step in range(3)}
    return {"parameter": normal(generator, 7, 5).detach(), **gradients}


def _stepped(make: Any) -> Any:
    def run(parameter: Tensor, *, backend: str | None = None, **gradients: Tensor) -> Tensor:
        leaf = parameter.clone().requires_grad_()
        optimizer = make([leaf], backend)
        for gradient in gradients.values():
            leaf.grad = gradient
            optimizer.step()
        return leaf.detach()

    return run


# ---- attention ---------------------------------------------------------------------------------


def _attention_inputs(
    generator: Generator, *, queries: int, groups: int, masked: bool = False
) -> Inputs:
    keys = 9
    inputs: Inputs = {
        "query": normal(generator, 2, 4, queries, 8),
        "key": normal(generator, 2, 4 // groups, keys, 8),
        "value": normal(generator, 2, 4 // groups, keys, 8),
    }
    if masked:
        mask = fixed(generator, 2, 1, queries, keys) < 0.3
        mask[0, 0, 1] = True  # a query that sees nothing
        inputs["mask"] = mask
    return inputs


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    scores = (
        query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * query.shape[-1] ** -0.5
    )
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if causal:
        hidden = ~torch.ones_like(hidden).tril(scores.shape[-1] - scores.shape[-2])
    hidden = hidden if mask is None else hidden | mask
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1) * ~hidden.all(dim=-1, keepdim=True)
    return weights @ value.repeat_interleave(groups, dim=1)


def _attention(case: str, *, causal: bool, **inputs: Any) -> Check:
    return Check(
        op="attention",
        case=case,
        inputs=lambda generator: _attention_inputs(generator, **inputs),
        run=attention.attention,
        reference=attention.attention_reference,
        plain=_plain_attention,
        arguments={"causal": causal},
    )


CASES: tuple[Check, ...] = (
    _permute("odd sizes, an idle expert", 13, 3),
    _permute("no tokens", 0, 2),
    Check(
        op="moe_permute",
        case="there and back",
        inputs=_permute_inputs(13, 2),
        run=_permute_there_and_back,
        reference=lambda x, experts: x.double() * experts.shape[1],
        plain=lambda x, experts: x * experts.shape[1],
    ),
    _unpermute("weighted", 13, 3, weigh=True),
    _unpermute("sum", 13, 2, weigh=False),
    _unpermute("no tokens", 0, 2, weigh=True),
    Check(
        op="wgrad_accumulate",
        case="odd sizes",
        inputs=_wgrad_inputs,
        run=_accumulated,
        reference=_two_dimensional(wgrad.wgrad_accumulate_reference),
        plain=_two_dimensional(_plain_wgrad),
    ),
    Check(
        op="adamw",
        case="three steps",
        inputs=_adamw_inputs,
        run=_stepped(lambda leaves, backend: adamw.adamw(leaves, backend=backend, **_STEP)),
        reference=lambda parameter, **gradients: adamw.adamw_reference(
            parameter, list(gradients.values()), **_STEP
        ),
        plain=_stepped(lambda leaves, _: torch.optim.AdamW(leaves, **_STEP)),
    ),
    _attention("causal", causal=True, queries=9, groups=1),
    _attention("causal, fewer queries, grouped", causal=True, queries=5, groups=2),
    _attention("padding, a blind query", causal=False, queries=5, groups=1, masked=True),
)
