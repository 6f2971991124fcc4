"""Flags of the original that shape the model."""

from __future__ import annotations

from mds_train.config.megatron_conversions import experts, residual
from mds_train.config.megatron_kinds import Derived, Ignored, OldFlag, Switch, Value

__all__ = ["MODEL_FLAGS"]

_MODEL: tuple[OldFlag, ...] = (
    Value(names=("--num-layers", "--encoder-num-layers"), key="model.num_layers"),
    Value(names=("--decoder-num-layers",), key="model.decoder_num_layers"),
    Switch(names=("--bert-no-binary-head",), values={"model.binary_head": False}),
    Switch(
        names=("--apply-residual-connection-post-layernorm",),
        values={"model.residual_post_layernorm": True},
    ),
    Value(names=("--hidden-size",), key="model.hidden_size"),
    Value(names=("--ffn-hidden-size",), key="model.ffn_hidden_size"),
    Value(names=("--num-attention-heads",), key="model.num_attention_heads"),
    Value(names=("--num-key-value-heads", "--num-query-groups"), key="model.num_key_value_heads"),
    Value(names=("--kv-channels",), key="model.head_dim"),
    Value(names=("--vocab-size",), key="model.vocab_size"),
    Value(names=("--max-position-embeddings",), key="model.max_position_embeddings"),
    Value(names=("--make-vocab-size-divisible-by",), key="model.make_vocab_size_divisible_by"),
    Value(names=("--layernorm-epsilon", "--norm-epsilon"), key="model.norm_epsilon"),
    Value(names=("--normalization",), key="model.normalization", convert=str.lower),
    Value(names=("--rotary-position-embeddings-theta", "--rotary-base"), key="model.rope_theta"),
    Value(names=("--rotary-percent",), key="model.rope_percent"),
    Value(names=("--init-method-std",), key="model.init_std"),
    Value(names=("--hidden-dropout",), key="model.hidden_dropout"),
    Value(names=("--attention-dropout",), key="model.attention_dropout"),
    # The original means the learned ones: beside rotary positions it changes nothing.
    Switch(names=("--no-position-embedding",), values={"model.position_embedding": "none"}),
    Switch(
        names=("--use-rotary-position-embeddings",),
        values={"model.position_embedding": "rope"},
        prevails=True,
    ),
    Value(
        names=("--position-embedding-type",),
        key="model.position_embedding",
        prevails=True,
        convert=lambda text: {"learned_absolute": "learned"}.get(text, text),
    ),
    Switch(
        names=("--untie-embeddings-and-output-weights",), values={"model.tie_embeddings": False}
    ),
    Switch(names=("--disable-bias-linear",), values={"model.add_bias": False}),
    Switch(names=("--add-qkv-bias",), values={"model.add_qkv_bias": True}),
    Switch(names=("--qk-layernorm",), values={"model.qk_norm": True}),
    Switch(names=("--swiglu",), values={"model.activation": "swiglu"}),
    Switch(names=("--squared-relu",), values={"model.activation": "relu2"}),
    Switch(names=("--openai-gelu",), values={"model.activation": "gelu_tanh"}),
    Switch(
        names=("--apply-layernorm-1p", "--apply-layernorm-1p-bias"),
        values={"model.zero_centered_norm": True},
    ),
)

_EXPERTS: tuple[OldFlag, ...] = (
    Derived(
        names=("--num-experts",),
        key="model.num_experts",
        needs=("model.num_layers", "model.expert_interval?"),
        compute=experts,
        several=True,
    ),
    Value(names=("--moe-expert-parallel-size",), key="parallel.ep_size"),
    Value(names=("--expert-interval",), key="model.expert_interval"),
    Value(names=("--topk",), key="model.moe_topk"),
    Value(names=("--mlp-type",), key="model.moe_residual", convert=residual),
    Value(names=("--moe-loss-coeff",), key="model.moe_loss_coeff"),
    Value(names=("--moe-train-capacity-factor",), key="model.moe_capacity_factor"),
    Value(names=("--moe-eval-capacity-factor",), key="model.moe_eval_capacity_factor"),
    Value(names=("--moe-min-capacity",), key="model.moe_min_capacity"),
    Switch(
        names=("--disable-moe-token-dropping",),
        values={"model.moe_capacity_factor": None, "model.moe_eval_capacity_factor": None},
        prevails=True,
    ),
    Switch(
        names=("--enable-expert-tensor-parallelism",),
        values={"parallel.expert_tensor_parallel": True},
    ),
    Ignored(
        names=("--create-moe-param-group",),
        reason="experts that ranks share out always have groups of their own",
    ),
    Switch(
        names=("--disable-moe-top2-2nd-expert-sampling",),
        values={"model.moe_sample_second": False},
    ),
    Ignored(names=("--use-tutel",), reason="tokens are sent to their experts by the model itself"),
)

_LEGACY: tuple[OldFlag, ...] = (
    Switch(names=("--legacy-vocab-softmax",), values={"model.legacy_vocab_softmax": True}),
)

MODEL_FLAGS: tuple[OldFlag, ...] = (*_MODEL, *_EXPERTS, *_LEGACY)
