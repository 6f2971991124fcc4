"""A Llama as torchtitan has it, saved by torch's own DCP, computes the same in transformers.

The model is written here anew with Meta's rotation of neighbouring channels, so it shares nothing
with the reader that turns it into transformers' halves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mds_ckpt import convert, open_checkpoint

torch = pytest.importorskip("torch", reason="it writes the checkpoint")
transformers = pytest.importorskip("transformers", reason="it computes the converted model")

LAYERS, HIDDEN, HEADS, GROUPS, WIDTH, VOCAB = 2, 32, 4, 2, 48, 61
THETA, EPSILON, LOGITS = 5000.0, 1e-5, 1e-5


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = GROUPS * HIDDEN // HEADS
    shapes = {"tok_embeddings.weight": (VOCAB, HIDDEN), "output.weight": (VOCAB, HIDDEN)}
    shapes["norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        for name, shape in {
            "attention_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attention.wq": (HIDDEN, HIDDEN),
            "attention.wk": (rows, HIDDEN),
            "attention.wv": (rows, HIDDEN),
            "attention.wo": (HIDDEN, HIDDEN),
            "feed_forward.w1": (WIDTH, HIDDEN),
            "feed_forward.w2": (HIDDEN, WIDTH),
            "feed_forward.w3": (WIDTH, HIDDEN),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return {n: torch.randn(shape, generator=generator) * 0.2 for n, shape in shapes.items()}


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[b, s, n, d], each pair of neighbouring channels as a complex number."""
    channels = x.size(-1)
    rates = THETA ** (-torch.arange(0, channels, 2).double() / channels)
    angles = torch.outer(torch.arange(x.size(1)).double(), rates)
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).reshape(x.shape)


def logits(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    x = w["tok_embeddings.weight"][tokens]
    b, s = tokens.shape
    for layer in range(LAYERS):
        own = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{layer}.")}
        h = normed(x, own["attention_norm.weight"])
        q, k, v = (
            (h @ own[f"attention.w{letter}.weight"].T).view(b, s, -1, HIDDEN // HEADS)
            for letter in "qkv"
        )
        k, v = (part.repeat_interleave(HEADS // GROUPS, dim=2) for part in (rotated(k), v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (rotated(q), k, v)), is_causal=True
        )
        x = x + attended.transpose(1, 2).reshape(b, s, -1) @ own["attention.wo.weight"].T
        h = normed(x, own["ffn_norm.weight"])
        gate = torch.nn.functional.silu(h @ own["feed_forward.w1.weight"].T)
        up = h @ own["feed_forward.w3.weight"].T
        x = x + (gate * up) @ own["feed_forward.w2.weight"].T
    return normed(x, w["norm.weight"]) @ w["output.weight"].T


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_logits_of_a_llama_of_torchtitan(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    tensors = weights()
    moments = {f"optimizer.state.{name}.exp_avg": tensor * 2 for name, tensor in tensors.items()}
    state = {**tensors, **moments, "train_state": {"step": 30}}
    dcp.save(state, checkpoint_id=tmp_path / "run" / "step-30")
    facts = f"num_attention_heads={HEADS},max_position_embeddings=64,rope_theta={THETA}"

    convert(tmp_path / "run", tmp_path / "hf", to="hf", source_format=f"torchtitan:{facts}")

    looked_at = open_checkpoint(tmp_path / "run")
    assert (looked_at.format, looked_at.step) == ("torchtitan", 30)
    assert set(looked_at.states) == {"weight", "exp_avg"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = theirs(tokens).logits, logits(tensors, tokens)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < LOGITS
