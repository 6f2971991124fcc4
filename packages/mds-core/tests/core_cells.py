"""Small models and training runs for parity tests, imported by the tests and their ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from unittest import mock

import torch
import torch.distributed as dist

from mds_core import collectives
from mds_core.bert_config import BertConfig
from mds_core.config import Execution, GPTConfig
from mds_core.config.adapters import AdapterConfig
from mds_core.groups import Layout, ProcessGroups
from mds_core.init import normal
from mds_core.models import GPT, T5, Bert, add_adapters
from mds_core.rng import DropoutKey
from mds_core.sharding import cut, merge
from mds_core.t5_config import T5Config

GPT2 = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=96,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=8,
    activation="gelu_tanh",
)
"""Learned positions, biases, tied head."""

LLAMA_GQA = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=8,
    num_key_value_heads=4,
    ffn_hidden_size=48,
    vocab_size=97,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=16,
    position_embedding="rope",
    activation="swiglu",
    normalization="rmsnorm",
    add_bias=False,
    tie_embeddings=False,
)
"""Rotary positions, no bias, untied head, an odd vocabulary that needs padding."""

LLAMA_YARN = replace(
    LLAMA_GQA,
    rope_scaling_type="yarn",
    rope_scaling_factor=4.0,
    rope_scaling_original_positions=8,
)

QWEN3 = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    ffn_hidden_size=48,
    vocab_size=97,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=4,
    position_embedding="rope",
    activation="geglu",
    normalization="rmsnorm",
    add_bias=False,
    add_qkv_bias=True,
    qk_norm=True,
    sliding_window=5,
)
"""Normalised heads of their own width, a query/key/value bias, a sliding window, a tied head."""

NEOX = replace(
    GPT2,
    position_embedding="rope",
    rope_percent=0.5,
    parallel_residual=True,
    tie_embeddings=False,
)
"""Attention and MLP beside each other."""

BLOOM = replace(GPT2, position_embedding="alibi", embedding_norm=True)
"""Normalised token vectors, no position vectors but scores that fall with the distance."""

BERT = BertConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=97,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=8,
)
"""Both directions, token types, two heads; an odd vocabulary that needs padding."""

T5_SHAPE = T5Config(
    num_layers=2,
    decoder_num_layers=1,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=97,
    max_position_embeddings=16,
    make_vocab_size_divisible_by=8,
)
"""An encoder, a decoder that attends to it, a bias on the scores of a padded vocabulary."""

MIXTRAL = replace(LLAMA_GQA, num_experts=4, moe_topk=2, moe_loss_coeff=0.1, moe_z_loss_coeff=0.01)
"""Gated experts in every layer, two for each token, weights that sum to 1, both extra losses."""

PR_MOE = replace(
    GPT2, layer_experts=(2, 4), moe_residual=True, moe_loss_coeff=0.1, moe_ffn_hidden_size=48
)
"""One expert a token, more of them in later layers, mixed with an MLP by a learned share."""

SHARED = replace(GPT2, num_experts=4, expert_interval=2, moe_topk=3, moe_shared_hidden_size=40)
"""Experts in every second layer, added to an MLP for all tokens."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run."""

    config: GPTConfig
    dtype: torch.dtype = torch.float64
    execution: Execution = field(default_factory=Execution)
    steps: int = 3
    std_factor: float = 5.0
    """Start from larger values than usual: a barely trained model hides mistakes."""
    summed: bool = True
    """Whether gradients are summed over the ranks that share a sequence."""
    broken: str | None = None
    """Name of a collective whose communication in the backward pass is left out."""
    adapters: AdapterConfig | None = None
    """What is trained in place of the model."""


DROPPING = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
CELLS = {
    "gpt": Cell(config=GPT2),
    "gpt-dropout": Cell(config=replace(GPT2, **DROPPING)),
    "gpt-sequence-parallel-dropout-full": Cell(
        config=replace(GPT2, **DROPPING),
        execution=Execution(sequence_parallel=True, recompute="full"),
    ),
    "llama-gqa": Cell(config=LLAMA_GQA),
    "llama-yarn": Cell(config=LLAMA_YARN, steps=1),
    "llama-gqa-sequence-parallel-selective": Cell(
        config=LLAMA_GQA, execution=Execution(sequence_parallel=True, recompute="selective")
    ),
    "qwen3": Cell(config=QWEN3),
    "qwen3-sequence-parallel-modules": Cell(
        config=QWEN3,
        execution=Execution(
            sequence_parallel=True,
            recompute="modules",
            recompute_modules=("norm", "activation", "core_attention"),
            offload_activations=True,
        ),
        steps=1,
    ),
    "gpt-one-key-value-head-dropout": Cell(
        config=replace(GPT2, num_key_value_heads=1, **DROPPING), steps=1
    ),
    "qwen3-one-key-value-head-sequence-parallel": Cell(
        config=replace(QWEN3, num_key_value_heads=1),
        execution=Execution(sequence_parallel=True, recompute="full"),
        steps=1,
    ),
    "neox-dropout": Cell(config=replace(NEOX, **DROPPING), steps=1),
    "bloom": Cell(config=BLOOM, steps=1),
    "bloom-sequence-parallel-dropout": Cell(
        config=replace(BLOOM, **DROPPING), execution=Execution(sequence_parallel=True), steps=1
    ),
    "moe-mixtral": Cell(config=MIXTRAL),
    "moe-mixtral-sequence-parallel-full": Cell(
        config=MIXTRAL, execution=Execution(sequence_parallel=True, recompute="full")
    ),
    "moe-residual-dropout": Cell(config=replace(PR_MOE, **DROPPING)),
    "moe-residual-sequence-parallel": Cell(
        config=PR_MOE, execution=Execution(sequence_parallel=True), steps=1
    ),
    "moe-shared-whole-experts": Cell(
        config=SHARED, execution=Execution(expert_tensor_parallel=False), steps=1
    ),
    "moe-drawn-sequence-parallel-full": Cell(
        config=replace(MIXTRAL, moe_sample_second=True, moe_noise="jitter"),
        execution=Execution(sequence_parallel=True, recompute="full"),
        steps=1,
    ),
    "moe-rsample": Cell(config=replace(PR_MOE, moe_noise="rsample"), steps=1),
    "moe-capacity": Cell(config=replace(MIXTRAL, moe_capacity_factor=0.8), steps=1),
    "moe-capacity-lots-sequence-parallel": Cell(
        config=replace(PR_MOE, moe_capacity_factor=0.6, moe_drop_policy="random"),
        execution=Execution(sequence_parallel=True),
        steps=1,
    ),
    "moe-capacity-whole-experts-sequence-parallel": Cell(
        config=replace(PR_MOE, moe_capacity_factor=0.8, moe_drop_policy="probability"),
        execution=Execution(sequence_parallel=True, expert_tensor_parallel=False),
        steps=1,
    ),
    "moe-capacity-sequence-parallel": Cell(
        config=replace(MIXTRAL, moe_capacity_factor=0.8, moe_balance_scope="micro_batch"),
        execution=Execution(sequence_parallel=True),
        steps=1,
    ),
    "bert": Cell(config=BERT, steps=1),
    "bert-post-norm-dropout-full": Cell(
        config=replace(BERT, residual_post_layernorm=True, **DROPPING),
        execution=Execution(recompute="full"),
    ),
    "bert-sequence-parallel-dropout": Cell(
        config=replace(BERT, embedding_norm=True, **DROPPING),
        execution=Execution(sequence_parallel=True),
        steps=1,
    ),
    "t5": Cell(config=T5_SHAPE, steps=1),
    "t5-sequence-parallel-dropout-full": Cell(
        config=replace(T5_SHAPE, num_key_value_heads=2, **DROPPING),
        execution=Execution(sequence_parallel=True, recompute="full"),
    ),
    "t5-post-norm-selective": Cell(
        config=replace(T5_SHAPE, num_key_value_heads=1, residual_post_layernorm=True),
        execution=Execution(recompute="selective"),
        steps=1,
    ),
    "lora-gpt-dropout": Cell(
        config=replace(GPT2, **DROPPING), adapters=AdapterConfig(rank=3, alpha=6.0, dropout=0.2)
    ),
    "lora-llama-gqa-sequence-parallel-modules": Cell(
        config=LLAMA_GQA,
        execution=Execution(
            sequence_parallel=True, recompute="modules", recompute_modules=("norm", "activation")
        ),
        adapters=AdapterConfig(rank=2, alpha=5.0, dropout=0.1),
    ),
    "lora-sequence-parallel-some": Cell(
        config=LLAMA_GQA,
        execution=Execution(sequence_parallel=True, recompute="full"),
        adapters=AdapterConfig(rank=2, alpha=5.0, targets=("linear_proj", "linear_fc1")),
        steps=1,
    ),
    "gpt-fp32": Cell(config=GPT2, dtype=torch.float32),
    "llama-gqa-fp32": Cell(config=LLAMA_GQA, dtype=torch.float32),
}
UNEVEN = {
    "gpt-three-heads-dropout": Cell(
        config=replace(GPT2, num_attention_heads=3, head_dim=8, **DROPPING), steps=1
    ),
    "bloom-six-heads": Cell(config=replace(BLOOM, num_attention_heads=6, head_dim=8), steps=1),
}
"""Heads that do not divide by the ranks of a sequence."""
BROKEN = {"broken": Cell(config=LLAMA_GQA, broken="_Copy", steps=1)}
ULYSSES = {
    f"ulysses-{name}": replace((CELLS | UNEVEN)[name], steps=1)
    for name in (
        *("gpt-dropout", "llama-gqa-sequence-parallel-selective", "qwen3"),
        *("bloom-sequence-parallel-dropout", "llama-yarn"),
        *("qwen3-one-key-value-head-sequence-parallel", "gpt-three-heads-dropout"),
        *("moe-mixtral", "moe-residual-dropout", "moe-rsample", "lora-gpt-dropout"),
    )
}


def ring(name: str, **options) -> Cell:
    """The first step of a cell whose sequences go round."""
    cell = CELLS[name]
    execution = replace(cell.execution, sequence_sharing="ring", **options)
    return replace(cell, steps=1, execution=execution)


RING = {
    "ring-gpt-dropout": ring("gpt-dropout"),
    "ring-qwen3": ring("qwen3", sequence_chunk=3),
    "ring-bloom-sequence-parallel-dropout": ring("bloom-sequence-parallel-dropout"),
    "ring-llama-yarn": ring("llama-yarn", recompute="selective"),
    "ring-moe-mixtral": ring("moe-mixtral"),
}
RING_TP2 = {
    f"ring-tp2-{name}": ring(name)
    for name in ("gpt-sequence-parallel-dropout-full", "llama-gqa-sequence-parallel-selective")
}
RING4 = {f"ring4-{name}": ring(name) for name in ("gpt-dropout", "qwen3")}
DP = {f"dp-{name}": CELLS[name] for name in ("moe-mixtral", "gpt-dropout")}
EP = {
    f"ep-{name}": CELLS[name]
    for name in (
        *("moe-mixtral", "moe-residual-dropout", "moe-shared-whole-experts"),
        "moe-drawn-sequence-parallel-full",
    )
}
EP_TP2 = {
    f"ep-tp2-{name}": replace(CELLS[name], steps=1)
    for name in (
        *("moe-mixtral-sequence-parallel-full", "moe-residual-dropout"),
        *("moe-residual-sequence-parallel", "moe-shared-whole-experts"),
    )
}
EP_ULYSSES = {"ep-ulysses-moe-mixtral": replace(CELLS["moe-mixtral"], steps=1)}
UNSUMMED = {"ulysses-unsummed": Cell(config=GPT2, steps=1, summed=False)}
ULYSSES_TP2 = {
    f"ulysses-tp2-{name}": replace((CELLS | UNEVEN)[name], steps=1)
    for name in (
        *("gpt-sequence-parallel-dropout-full", "llama-gqa", "bloom-six-heads", "qwen3"),
        "gpt-one-key-value-head-dropout",
        "lora-llama-gqa-sequence-parallel-modules",
    )
}
TP4 = {
    f"tp4-{name}": replace(CELLS[name], steps=1)
    for name in (
        *("gpt-sequence-parallel-dropout-full", "llama-gqa"),
        *("qwen3", "gpt-one-key-value-head-dropout"),
    )
}
ALL = CELLS | BROKEN


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Global losses, gradients and parameters after every step."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: list[dict[str, torch.Tensor]]


def batch(config: GPTConfig, step: int) -> tuple[torch.Tensor, ...]:
    """Tokens, labels and loss mask [3, 16] of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    window = torch.randint(0, config.vocab_size, (3, 17), generator=generator)
    mask = (torch.rand(3, 16, generator=generator) > 0.2).double()
    return window[:, :-1], window[:, 1:], mask


class AdamW:
    """Plain AdamW in ten lines: importing torch.optim's takes longer than a whole test."""

    def __init__(self, parameters) -> None:
        self.states = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        self.step_number = 0

    @torch.no_grad()
    def step(self, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.1) -> None:
        # The gradient of a key's bias is zero but for rounding; a smaller eps would blow that up.
        self.step_number += 1
        for p, mean, square in self.states:
            p.mul_(1 - lr * weight_decay)
            mean.mul_(beta1).add_(p.grad, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            size = (square / (1 - beta2**self.step_number)).sqrt_().add_(eps)
            p.addcdiv_(mean, size, value=-lr / (1 - beta1**self.step_number))


def build(cell: Cell, groups: ProcessGroups) -> GPT | Bert | T5:
    kind = {BertConfig: Bert, T5Config: T5}.get(type(cell.config), GPT)
    model = kind(cell.config, groups, seed=7, dtype=cell.dtype, execution=cell.execution)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(cell.std_factor if parameter.dim() > 1 else 1.0)
    if cell.adapters is not None:
        adapt(model, cell.adapters)
    return model


def adapt(model: GPT, config: AdapterConfig) -> None:
    add_adapters(model, config)
    give_adapters_effect(model.parameter_shards(), dict(model.named_parameters()))


@torch.no_grad()
def give_adapters_effect(shards, parameters) -> None:
    """Beside a B of zeros A would have no gradient."""
    for name, parameter in parameters.items():
        if name.endswith("linear_out.weight"):
            shape = shards[name].global_shape
            values = normal(3, name, global_shape=shape, std=0.3, dtype=parameter.dtype)
            parameter.copy_(cut(shards[name], values))


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def train(cell: Cell, groups: ProcessGroups) -> Trace:
    """Three plain AdamW steps; every rank returns the same global trace."""
    if cell.broken is None:
        return _train(cell, groups)
    with mock.patch.object(getattr(collectives, cell.broken), "backward", _no_communication):
        return _train(cell, groups)


def train_all(cells: dict[str, Cell], layout: Layout) -> dict[str, Trace]:
    """Several runs in the same processes."""
    groups = ProcessGroups.build(layout)  # once: gloo keeps the threads of every group
    return {name: train(cell, groups) for name, cell in cells.items()}


def ulysses_report() -> dict:
    """Logits of two ranks that share each sequence, and what they refuse."""
    groups = ProcessGroups.build(Layout(ulysses_size=2))
    found = {}
    for sharing in ("ulysses", "ring"):
        cell = Cell(config=LLAMA_GQA, execution=Execution(sequence_sharing=sharing))
        model = build(cell, groups).eval()
        tokens, labels, _ = batch(LLAMA_GQA, 0)
        with torch.no_grad():
            logits, losses = model(tokens), model(tokens, labels).losses
        odd = refusal(lambda model=model, tokens=tokens: model(tokens[:, :15]))
        even = refusal(lambda model=model, tokens=tokens: model(tokens[:, :14]))
        cached = refusal(lambda model=model: model.new_cache(1, max_length=4))
        found[sharing] = {"logits": logits, "losses": losses, "odd": odd, "cached": cached}
        found[sharing]["even"] = even
    return found


def refusal(action) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def sum_gradients(parameters, groups: ProcessGroups, *, experts=frozenset()) -> None:
    """What an engine does: ranks that see other positions or samples each have a part."""
    for name, parameter in parameters.items():
        group = groups.expert_dp_ulysses if name in experts else groups.dp_ulysses
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)


def _no_communication(ctx, grad):
    del ctx
    return grad, None


def _train(cell: Cell, groups: ProcessGroups) -> Trace:
    model = build(cell, groups)
    optimizer = AdamW(trained(model).values())
    trace = Trace(losses=[], gradients=[], parameters=[])
    for step in range(cell.steps):
        tokens, labels, mask = batch(cell.config, step)
        count = mask[:, :8].sum() if isinstance(model, T5) else mask.sum()
        own = torch.arange(3).tensor_split(groups.dp_size)[groups.dp_rank]
        tokens, labels, mask = tokens[own], labels[own], mask[own]
        key = DropoutKey(seed=5, samples=own + 3 * step)
        if isinstance(model, Bert):
            loss = bert_loss(model, tokens, labels, mask=mask, key=key, count=count)
        elif isinstance(model, T5):
            loss = t5_loss(model, tokens, labels, mask=mask, key=key) / count
        else:
            loss = model(tokens, labels, loss_mask=mask, dropout_key=key).loss_sum / count
        model.zero_grad()
        loss.backward()
        parameters = trained(model)
        if cell.summed:
            experts = model.expert_parameters() if isinstance(model, GPT) else frozenset()
            sum_gradients(parameters, groups, experts=experts)
        if groups.dp is not None:
            loss = loss.detach()
            dist.all_reduce(loss, group=groups.dp)
        gradients = {name: p.grad for name, p in parameters.items()}
        trace.losses.append(loss.item())
        trace.gradients.append(whole(model, gradients, check_replicas=cell.broken is None))
        optimizer.step()
        trace.parameters.append(
            whole(
                model,
                trained(model),
                check_replicas=cell.broken is None,
            )
        )
    return trace


def bert_loss(model: Bert, tokens, labels, *, mask, key, count) -> torch.Tensor:
    """Both losses of samples of a batch of three that have segments, padding and a label."""
    result = model(
        tokens,
        labels,
        loss_mask=mask,
        binary_labels=labels[:, 0] % 2,
        token_types=(labels > 40).long(),
        padding_mask=padding_of(key),
        dropout_key=key,
    )
    return result.loss_sum / count + result.binary_sum / 3


def padding_of(key: DropoutKey) -> torch.Tensor:
    """Samples of different lengths."""
    return torch.arange(16) < torch.tensor([16, 13, 9])[key.samples % 3, None]


def t5_loss(model: T5, tokens, labels, *, mask, key) -> torch.Tensor:
    """The sum of eight decoder tokens' losses for encoder sequences of different lengths."""
    result = model(
        tokens,
        labels[:, :8],
        labels[:, 1:9],
        loss_mask=mask[:, :8],
        padding_mask=padding_of(key),
        dropout_key=key,
    )
    return result.loss_sum


@torch.no_grad()
def whole(
    model: GPT | Bert | T5, tensors: dict[str, torch.Tensor], *, check_replicas: bool = True
) -> dict[str, torch.Tensor]:
    """Join the tensor-parallel ranks' tensors; replicas must agree to the bit."""
    shards = model.parameter_shards()
    group = model.groups.tp
    if group is None:
        joined = {name: merge([shards[name]], [tensor]) for name, tensor in tensors.items()}
        return with_other_experts(joined, model.groups)
    joined = {}
    for name, tensor in tensors.items():
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        all_shards = [None] * group.size()
        dist.all_gather_object(all_shards, shards[name], group=group)
        if shards[name].dim is None:
            assert not check_replicas or all(torch.equal(part, parts[0]) for part in parts), name
        joined[name] = merge(all_shards, parts)
    return with_other_experts(joined, model.groups)


def with_other_experts(tensors: dict[str, torch.Tensor], groups: ProcessGroups) -> dict:
    """Add the experts of the other ranks; what all hold must agree to the bit."""
    if groups.ep is None:
        return tensors
    parts = [None] * groups.ep_size
    dist.all_gather_object(parts, tensors, group=groups.ep)
    for part in parts:
        for name in part.keys() & tensors.keys():
            assert torch.equal(part[name], tensors[name]), name
    return {name: tensor for part in parts for name, tensor in part.items()}
