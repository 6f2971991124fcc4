"""Mixtral: Llama's attention, and experts in place of the MLP of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from mds_ckpt.families.change import Stacked
from mds_ckpt.families.llama import (
    IGNORED,
    llama_from_hf,
    llama_needs,
    llama_rules,
    llama_to_hf,
)
from mds_ckpt.families.rule import Family, Rule, Shape, Target, has_experts, number, whole_number
from mds_ckpt.families.rule import same as same_tensor
from mds_ckpt.manifest import ModelRecord

_MOST_EXPERTS = 10_000
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)
"""What transformers takes where ``config.json`` is silent; other than for a Llama."""


def _counts(model: ModelRecord) -> list[int]:
    """Experts of each layer."""
    config = model.config
    layers = config["num_layers"]
    if config.get("layer_experts") is not None:
        return list(config["layer_experts"])
    count, interval = config.get("num_experts") or 0, config.get("expert_interval", 1)
    return [0 if (layer + 1) % interval else count for layer in range(layers)]


def _faults(model: ModelRecord) -> list[str]:
    config = model.config
    topk = config.get("moe_topk", 1)
    normalized = config.get("moe_normalize_gates")
    needs = llama_needs(model, but=("num_experts",)) | {
        "experts": has_experts(config),
        "as many experts in every layer": len(set(_counts(model))) == 1,
        "no MLP beside the experts": not config.get("moe_residual")
        and not config.get("moe_shared_hidden_size"),
        "weights of a token's experts that sum to 1": topk > 1
        if normalized is None
        else bool(normalized),
        "no biases": not (config.get("add_bias", True) or config.get("add_qkv_bias")),
        "no query/key norms": not config.get("qk_norm"),
    }
    return [f"mixtral needs {need}" for need, met in needs.items() if not met]


def _notes(model: ModelRecord) -> Sequence[str]:
    factor = model.config.get("moe_eval_capacity_factor")
    if factor is None:
        return ()
    note = (
        f"the source's experts have places for {factor} times an even share of the tokens, "
        f"Mixtral's for all: where the source drops tokens, results differ"
    )
    return (note,)


def _width(model: ModelRecord) -> int:
    return int(model.config.get("moe_ffn_hidden_size") or Shape.of(model).width)


def _to_hf_config(model: ModelRecord) -> dict[str, Any]:
    config = model.config
    return llama_to_hf("mixtral", model) | {
        "intermediate_size": _width(model),
        "num_local_experts": _counts(model)[0],
        "num_experts_per_tok": config.get("moe_topk", 1),
        "router_aux_loss_coef": config.get("moe_loss_coeff", 0.01),
        "sliding_window": config.get("sliding_window"),
    }


def _from_hf_config(config: Mapping[str, Any]) -> ModelRecord:
    if number(config, "router_jitter_noise", 0.0) != 0.0:
        raise ValueError("'router_jitter_noise' is set, which our router does not have")
    config = {**_DEFAULTS, **config}
    return llama_from_hf(
        "mixtral",
        config,
        num_experts=whole_number(config, "num_local_experts", most=_MOST_EXPERTS),
        moe_topk=whole_number(config, "num_experts_per_tok", most=_MOST_EXPERTS),
        moe_normalize_gates=True,
        moe_loss_coeff=number(config, "router_aux_loss_coef", 0.001),
    )


def _expert_rules(model: ModelRecord, layer: int) -> Iterator[Rule]:
    h, f, count = Shape.of(model).hidden, _width(model), _counts(model)[layer]
    ours, theirs = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.block_sparse_moe"
    yield same_tensor(f"{ours}.router.weight", f"{theirs}.gate.weight", count, h)
    for number_ in range(count):
        inner, outer = f"{ours}.experts.local_experts.{number_}", f"{theirs}.experts.{number_}"
        yield Rule(
            Target(f"{inner}.linear_fc1.weight", (2 * f, h)),
            (Target(f"{outer}.w1.weight", (f, h)), Target(f"{outer}.w3.weight", (f, h))),
            Stacked(),
        )
        yield same_tensor(f"{inner}.linear_fc2.weight", f"{outer}.w2.weight", h, f)


MIXTRAL = Family(
    name="mixtral",
    prefix="model.",
    faults=_faults,
    to_hf_config=_to_hf_config,
    from_hf_config=_from_hf_config,
    rules=partial(llama_rules, mlp=_expert_rules),
    ignored=IGNORED,
    notes=_notes,
)
