"""The same GPT-2 as several libraries build it, for `tokens_per_second.py`.

Every builder returns a function from tokens and labels, both [b, s], to the mean loss, and the
module whose parameters are trained. Peers are imported only where they are asked for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A GPT-2 and the batch that it is given."""

    layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    length: int
    batch: int

    def flops(self, *, parameters: int) -> float:
        """Operations of the matrix products of one step, attention counted as causal."""
        attention = 6 * self.layers * self.hidden_size * self.length
        products = parameters - self.length * self.hidden_size  # positions are looked up only
        return self.batch * self.length * (6 * products + attention)


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(layers=2, hidden_size=128, heads=4, vocab_size=1024, length=128, batch=4),
    "14m": Shape(layers=6, hidden_size=384, heads=6, vocab_size=8192, length=512, batch=8),
    "124m": Shape(layers=12, hidden_size=768, heads=12, vocab_size=50304, length=1024, batch=2),
}


def mds_core(shape: Shape) -> tuple[nn.Module, Loss]:
    """Ours."""
    from mds_core import GPTConfig, ProcessGroups
    from mds_core.models import GPT

    config = GPTConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.length,
        activation="gelu_tanh",
    )
    model = GPT(config, ProcessGroups.single())
    return model, lambda tokens, labels: model(tokens, labels).loss_sum / labels.numel()


class _Linear(nn.Linear):
    def forward(self, x: Tensor, dropping: None = None) -> Tensor:
        del dropping  # of an adapter, which it has not
        return super().forward(x)


def mds_core_plain_linears(shape: Shape) -> tuple[nn.Module, Loss]:
    """Ours with torch's own linears and table in the place of the tensor-parallel ones."""
    from mds_core.layers import ColumnParallelLinear, RowParallelLinear

    model, loss = mds_core(shape)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                rows, columns = child.weight.shape
                plain = _Linear(columns, rows, bias=child.bias is not None, device="meta")
                plain.weight, plain.bias = child.weight, child.bias
                setattr(parent, name, plain)
    return model, loss


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        heads = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class _Plain(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.length, shape.hidden_size)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def plain_torch(shape: Shape) -> tuple[nn.Module, Loss]:
    """Sixty lines of torch without a library."""
    model = _Plain(shape)
    return model, model


def transformers(shape: Shape) -> tuple[nn.Module, Loss]:
    """Hugging Face's GPT-2 with fused attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.length,
        n_embd=shape.hidden_size,
        n_layer=shape.layers,
        n_head=shape.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        # `labels` would be shifted by one; ours are shifted already.
        return model(tokens, labels=labels, shift_labels=labels).loss

    return model, loss


def litgpt(shape: Shape) -> tuple[nn.Module, Loss]:
    """LitGPT's model and chunked loss; it has no learned positions, so it rotates instead."""
    from litgpt import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        name="gpt2",
        block_size=shape.length,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=True,
        gelu_approximate="tanh",
    )
    model = GPT(config)
    model.lm_head.weight = model.transformer.wte.weight
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return chunked_cross_entropy(model(tokens), labels)

    return model, loss


CONTESTANTS: Mapping[str, Callable[[Shape], tuple[nn.Module, Loss]]] = {
    "mds_core": mds_core,
    "mds_core, plain linears": mds_core_plain_linears,
    "plain torch": plain_torch,
    "transformers": transformers,
    "litgpt": litgpt,
}


def gemm(size: int, dtype: torch.dtype) -> Callable[[], None]:
    """One square product, the rate that the others are measured against."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)

    def run() -> None:
        torch.mm(left, right, out=out)

    return run
