"""The shape of a GPT-like decoder. Nothing here depends on how it is parallelised.

Parameter count and floating-point operations follow from these numbers alone, so a plan for a
thousand devices needs no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, Self

from mds_core.expert_plan import (
    check_experts,
    experts_of_layers,
    mlp_params,
    routed_active_weights,
    routed_params,
)
from mds_core.rope_scaling import RopeScaling, RopeType

__all__ = ["Activation", "Execution", "GPTConfig", "Normalization", "PositionEmbedding"]

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu", "swiglu", "geglu", "geglu_tanh"]
Normalization = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rope", "alibi", "none"]
Recompute = Literal["none", "selective", "full", "modules"]
RecomputeModule = Literal["core_attention", "attention", "norm", "activation", "mlp"]
SequenceSharing = Literal["ulysses", "ring"]
AttentionKernel = Literal["auto", "fused", "math"]
DropPolicy = Literal["position", "probability", "random"]
BalanceScope = Literal["sequence", "micro_batch"]
BalanceChoices = Literal["all", "first"]
RouterNoise = Literal["none", "rsample", "jitter"]

GATED: frozenset[str] = frozenset({"swiglu", "geglu", "geglu_tanh"})
_MODULES: tuple[RecomputeModule, ...] = (
    "core_attention",
    "attention",
    "norm",
    "activation",
    "mlp",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "activation": (
        *("gelu", "gelu_tanh", "relu", "relu2", "silu"),
        *("swiglu", "geglu", "geglu_tanh"),
    ),
    "normalization": ("layernorm", "rmsnorm"),
    "position_embedding": ("learned", "rope", "alibi", "none"),
    "moe_drop_policy": ("position", "probability", "random"),
    "moe_balance_scope": ("sequence", "micro_batch"),
    "moe_balance_choices": ("all", "first"),
    "moe_noise": ("none", "rsample", "jitter"),
}


# Members of a rope_scaling table: here they are flat, so that each has its option and variable.
_SCALING_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "rope_type": "rope_scaling_type",
        "original_max_position_embeddings": "rope_scaling_original_positions",
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_scaling_low_freq_factor",
        "high_freq_factor": "rope_scaling_high_freq_factor",
        "beta_fast": "rope_scaling_beta_fast",
        "beta_slow": "rope_scaling_beta_slow",
        "attention_factor": "rope_scaling_attention_factor",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Shape of a decoder-only transformer: GPT-2, NeoX, BLOOM, Llama, Mistral, Mixtral, Qwen kinds.

    Raises:
        ValueError: A value is out of range or two values contradict each other; the message names
            both and says what to change.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    """The true vocabulary; padding is a matter of the layout."""
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    """Key/value heads; as many as attention heads when left out, 1 is multi-query attention."""
    head_dim: int | None = None
    """Channels of a head (Megatron's kv_channels); hidden_size / num_attention_heads if None."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; 4 * hidden_size, for gated activations 8/3 rounded down to 64, if None."""
    make_vocab_size_divisible_by: int = 128
    position_embedding: PositionEmbedding = "learned"
    rope_theta: float = 10000.0
    rope_percent: float = 1.0
    """Share of a head's channels that rotates."""
    rope_scaling_type: RopeType | None = None
    """How rotary positions are stretched, see `mds_core.rope_scaling`; not at all if None."""
    rope_scaling_factor: float | None = None
    """How many times the positions are stretched."""
    rope_scaling_original_positions: int | None = None
    """Positions before stretching (yarn, llama3); max_position_embeddings when left out."""
    rope_scaling_low_freq_factor: float | None = None
    """With llama3: waves longer than the original length over this are stretched in full."""
    rope_scaling_high_freq_factor: float | None = None
    """With llama3: waves shorter than the original length over this stay as they are."""
    rope_scaling_beta_fast: float | None = None
    """With yarn: waves that turn more often in the original length stay; 32 if None."""
    rope_scaling_beta_slow: float | None = None
    """With yarn: waves that turn less often are stretched in full; 1 if None."""
    rope_scaling_attention_factor: float | None = None
    """With yarn: factor of cosines and sines; 0.1 ln(factor) + 1 if None."""
    activation: Activation = "gelu"
    normalization: Normalization = "layernorm"
    norm_epsilon: float = 1e-5
    zero_centered_norm: bool = False
    """Store norm weights minus one (Megatron's apply_layernorm_1p)."""
    add_bias: bool = True
    """Biases in the linear layers."""
    add_qkv_bias: bool | None = None
    """Bias of the query/key/value projection; as add_bias when left out."""
    qk_norm: bool = False
    """Normalise every query and key head (Qwen 3)."""
    parallel_residual: bool = False
    """Attention and MLP of a layer read the same input and are added together (GPT-NeoX)."""
    residual_post_layernorm: bool = False
    """Add to the normalised stream, not to what was normalised (post-LN, as in BERT)."""
    embedding_norm: bool = False
    """Normalise the token vectors (BLOOM)."""
    sliding_window: int | None = None
    """Positions a token attends to, itself included; all earlier ones when left out."""
    tie_embeddings: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    num_experts: int | None = None
    """MLPs among which the tokens of a layer are shared out; one for all tokens when left out."""
    expert_interval: int = 1
    """Every how many-th layer has experts; with 2 these are the second, the fourth, ..."""
    layer_experts: tuple[int, ...] | None = None
    """Experts of each layer, 0 for none, instead of num_experts (PR-MoE's growing numbers)."""
    moe_topk: int = 1
    """Experts that each token is sent to."""
    moe_noise: RouterNoise = "none"
    """In training: draw the expert by its probability instead of taking the most probable one
    ("rsample", one expert a token), or shake what the router sees by one percent ("jitter")."""
    moe_sample_second: bool = False
    """In training: draw the second of a token's two experts by its probability (DeepSpeed's)."""
    moe_normalize_gates: bool | None = None
    """Let the weights of a token's experts sum to 1; with more than one expert if None."""
    moe_ffn_hidden_size: int | None = None
    """Width of an expert; as ffn_hidden_size when left out."""
    moe_shared_hidden_size: int | None = None
    """Width of an MLP for all tokens that is added to the experts; none when left out."""
    moe_residual: bool = False
    """Mix an MLP for all tokens with the experts by a learned share (PR-MoE)."""
    moe_capacity_factor: float | None = None
    """Places of an expert in training, over an even share of the tokens; no limit if None."""
    moe_eval_capacity_factor: float | None = None
    """The same outside training."""
    moe_min_capacity: int = 4
    """With a capacity factor: places that an expert has at least."""
    moe_drop_policy: DropPolicy = "position"
    """Who gets the places: first choices and earlier tokens, the most probable ones, or in training
    those who draw the best lots (DeepSpeed's with one expert a token)."""
    moe_loss_coeff: float = 0.01
    """Factor of the loss that keeps the experts evenly used."""
    moe_z_loss_coeff: float = 0.0
    """Factor of the loss that keeps the router's scores small."""
    moe_balance_scope: BalanceScope = "sequence"
    """Over what the use should be even: each sequence, or a rank's micro batch (DeepSpeed's)."""
    moe_balance_choices: BalanceChoices = "all"
    """Whether all choices of a token count as use, or the first (DeepSpeed's top-2)."""

    def __post_init__(self) -> None:
        self._check_types()
        self._check_sizes()
        self._check_ratios()
        self._check_rope()
        check_experts(self)
        if self.parallel_residual and self.residual_post_layernorm:
            raise ValueError(
                "parallel_residual and residual_post_layernorm exclude each other: with both there "
                "are two streams to add to. Switch one of them off."
            )

    def _check_rope(self) -> None:
        scaling = self.rope_scaling
        if scaling is not None and self.position_embedding != "rope":
            raise ValueError(
                f"rope_scaling_type ({scaling.rope_type!r}) stretches rotary positions, but "
                f"position_embedding is {self.position_embedding!r}. Leave rope_scaling_type out "
                f'or choose position_embedding="rope".'
            )
        if scaling is not None and scaling.rope_type == "dynamic" and self.rope_channels <= 2:
            raise ValueError(
                f"dynamic scaling needs more than {self.rope_channels} rotating channels; choose "
                f"a larger head_dim or another rope_scaling_type."
            )
        if self.position_embedding == "rope" and self.rope_channels % 2:
            raise ValueError(
                f"rope_percent ({self.rope_percent}) of head_dim ({self.channels}) gives "
                f"{self.rope_channels} rotating channels; rotation needs pairs. Change one of them."
            )

    def _check_types(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for field in fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("int") and value is not None:
                _check_int(field.name, value)

    def _check_sizes(self) -> None:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}); each head needs hidden_size / num_attention_heads "
                f"channels. Change one of the two, or give head_dim."
            )
        if self.ffn_width < 1:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is too small for the width that a gated MLP has "
                f"by default, a multiple of 64; give ffn_hidden_size."
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.kv_heads}); every key/value head serves an equal "
                f"number of query heads. Change one of the two."
            )

    def _check_ratios(self) -> None:
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must be at least 0 and less than 1; it is "
                    f"the share of values that is dropped."
                )
        if not 0.0 < self.rope_percent <= 1.0:
            raise ValueError(
                f"rope_percent ({self.rope_percent}) must be above 0 and at most 1; for no "
                f'rotation choose position_embedding="none".'
            )
        for name in ("norm_epsilon", "init_std", "rope_theta"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0.")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def channels(self) -> int:
        """Channels of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies an activated gate with an up projection."""
        return self.activation in GATED

    @property
    def ffn_width(self) -> int:
        """Width of the MLP between its two projections."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 8 * self.hidden_size // 3 // 64 * 64 if self.gated else 4 * self.hidden_size

    @property
    def stacked_layers(self) -> int:
        """All layers, those that the stages of a pipeline share out."""
        return self.num_layers

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts of every layer, 0 where there is one MLP for all tokens."""
        return experts_of_layers(self)

    @property
    def expert_drawn(self) -> bool:
        """Whether one of a token's experts is drawn in training, not the most probable one."""
        return self.moe_noise == "rsample" or self.moe_sample_second

    @property
    def router_draws(self) -> bool:
        """Whether the router needs random numbers in training."""
        lots = self.moe_drop_policy == "random" and self.moe_capacity_factor is not None
        return any(self.experts) and (self.expert_drawn or self.moe_noise != "none" or lots)

    @property
    def expert_width(self) -> int:
        """Width of an expert between its two projections."""
        return self.moe_ffn_hidden_size or self.ffn_width

    @property
    def shared_width(self) -> int:
        """Width of the MLP for all tokens beside the experts, 0 for none."""
        return self.ffn_width if self.moe_residual else self.moe_shared_hidden_size or 0

    @property
    def qkv_bias(self) -> bool:
        """Whether the query/key/value projection has a bias."""
        return self.add_bias if self.add_qkv_bias is None else self.add_qkv_bias

    @property
    def rope_channels(self) -> int:
        """Channels of a head that rotate."""
        return int(self.channels * self.rope_percent)

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """How rotary positions are stretched, from the fields ``rope_scaling_...``."""
        given = {
            member: getattr(self, name)
            for member, name in _SCALING_FIELDS.items()
            if getattr(self, name) is not None
        }
        if not given:
            return None
        if missing := sorted({"rope_type", "factor"} - given.keys()):
            names = ", ".join(_SCALING_FIELDS[member] for member in missing)
            raise ValueError(
                f"{', '.join(_SCALING_FIELDS[member] for member in given)} is set without {names}; "
                f"set both or neither."
            )
        return RopeScaling(**given)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read what a checkpoint says of its model; members of other models are left out.

        Args:
            record: Fields by name; ``rope_scaling`` may be a table as Hugging Face writes it.
        """
        known = {field.name for field in fields(cls)}
        members = {name: value for name, value in record.items() if name in known}
        if members.get("layer_experts") is not None:
            members["layer_experts"] = tuple(members["layer_experts"])  # JSON has lists only
        if record.get("rope_scaling"):
            scaling = RopeScaling.of(record["rope_scaling"])
            for member, value in scaling.table().items() if scaling else ():
                members[_SCALING_FIELDS[member]] = value
        return cls(**members)

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of its model; `from_record` reads it."""
        flat = set(_SCALING_FIELDS.values())
        resolved = self.resolved()
        members = {name: value for name, value in asdict(resolved).items() if name not in flat}
        if resolved.rope_scaling is not None:
            members["rope_scaling"] = resolved.rope_scaling.table()
        return members

    def resolved(self) -> Self:
        """The same configuration with every derived value written out."""
        original = self.rope_scaling_original_positions
        if self.rope_scaling_type in ("yarn", "llama3") and original is None:
            original = self.max_position_embeddings
        return replace(
            self,
            rope_scaling_original_positions=original,
            num_key_value_heads=self.kv_heads,
            head_dim=self.channels,
            ffn_hidden_size=self.ffn_width,
            add_qkv_bias=self.qkv_bias,
        )

    def padded_vocab_size(self, tp_size: int = 1) -> int:
        """Rows of the embedding over all tensor-parallel ranks, padding included."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def check_tp(self, tp_size: int) -> None:
        """Raise ValueError unless every split dimension divides by ``tp_size``."""
        for name, value in (
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads),
            ("ffn_hidden_size", self.ffn_width),
        ):
            if value % tp_size:
                raise ValueError(
                    f"{name} ({value}) is not a multiple of tp_size ({tp_size}); each "
                    f"tensor-parallel rank takes an equal share. Change one of the two."
                )

    def check_expert_parallel(self, ep_size: int, *, tp_size: int = 1) -> None:
        """Raise ValueError unless the experts divide by ``ep_size`` and their width by tp_size."""
        if ep_size > 1 and not any(self.experts):
            raise ValueError(
                f"ep_size is {ep_size}, but the model has no experts to share out; set ep_size=1, "
                f"or give num_experts."
            )
        for layer, experts in enumerate(self.experts):
            if experts % ep_size:
                raise ValueError(
                    f"layer {layer} has {experts} experts, not a multiple of ep_size ({ep_size}); "
                    f"each rank takes an equal share. Change one of the two."
                )
        widths = {"the experts": self.expert_width, "the shared MLP": self.shared_width}
        for name, width in widths.items() if any(self.experts) else ():
            if width % tp_size:
                raise ValueError(
                    f"the width of {name} ({width}) is not a multiple of tp_size ({tp_size}); each "
                    f"tensor-parallel rank takes an equal share. Change one of the two."
                )

    def check_ulysses(self, ulysses_size: int, *, tp_size: int = 1) -> None:
        """Raise ValueError unless a tensor-parallel rank's heads divide by ``ulysses_size``."""
        heads = self.kv_heads // tp_size
        if heads % ulysses_size:
            raise ValueError(
                f"num_key_value_heads ({self.kv_heads}) leaves {heads} on each of {tp_size} "
                f"tensor-parallel ranks, not a multiple of ulysses_size ({ulysses_size}); each "
                f"rank attends with an equal share. Change one of the three."
            )

    def num_params(self) -> int:
        """Trained numbers of the whole model, over all ranks, with the true vocabulary."""
        embedding = self.vocab_size * self.hidden_size
        if self.position_embedding == "learned":
            embedding += self.max_position_embeddings * self.hidden_size
        if self.embedding_norm:
            embedding += self._norm_params()
        head = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        layers = sum(self.num_layer_params(layer) for layer in range(self.num_layers))
        return embedding + layers + self._norm_params() + head

    def num_layer_params(self, layer: int = 0) -> int:
        """Trained numbers of one transformer layer."""
        biases = self._qkv_width if self.qkv_bias else 0
        biases += self.hidden_size if self.add_bias else 0
        per_head = self.channels * (2 if self.normalization == "layernorm" else 1)
        qk_norms = 2 * per_head if self.qk_norm else 0
        attention = self._attention_matmul_params() + biases + qk_norms
        return attention + self._mlp_params(layer) + 2 * self._norm_params()

    def _mlp_params(self, layer: int) -> int:
        if experts := self.experts[layer]:
            return routed_params(self, experts=experts)
        return mlp_params(self, width=self.ffn_width)

    def flops_per_token(self, seq_length: int) -> float:
        """Floating-point operations of one training step per token, forward and backward.

        Counted are the matrix products only (2 operations a multiplication), three times the
        forward pass. Attention counts the pairs that the mask lets through, not the masked ones;
        experts count for the tokens that they are chosen for.
        """
        window = min(self.sliding_window or seq_length, seq_length)
        pairs = window * (window + 1) // 2 + (seq_length - window) * window
        attention = 2 * self.num_attention_heads * self.channels * pairs / seq_length
        layers = self.num_layers * (self._attention_matmul_params() + attention)
        mlps = sum(
            routed_active_weights(self, experts=experts)
            if experts
            else self.hidden_size * (self._fc1_width + self.ffn_width)
            for experts in self.experts
        )
        return 6.0 * (layers + mlps + self.vocab_size * self.hidden_size)

    @property
    def _qkv_width(self) -> int:
        return (self.num_attention_heads + 2 * self.kv_heads) * self.channels

    @property
    def _fc1_width(self) -> int:
        return self.ffn_width * (2 if self.gated else 1)

    def _attention_matmul_params(self) -> int:
        return self.hidden_size * (self._qkv_width + self.num_attention_heads * self.channels)

    def _norm_params(self) -> int:
        return self.hidden_size * (2 if self.normalization == "layernorm" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How a model computes. It changes speed and memory, never the result."""

    sequence_parallel: bool = False
    """Split the activations between the tensor-parallel layers by position (Megatron's)."""
    recompute: Recompute = "none"
    """What is computed again backward: nothing, the attention core, whole layers, or a list."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """With ``modules`` the list: core_attention is what lies between attention's projections,
    attention all of it, norm the norm before each, activation what lies between an MLP's
    projections, mlp all of it or all experts."""
    sequence_sharing: SequenceSharing = "ulysses"
    """How ranks along ulysses share a sequence: by swapping positions for heads around attention,
    or as a ring, in which keys and values go round (context parallelism)."""
    sequence_chunk: int | None = None
    """Most positions that attention pairs with as many others, and that an MLP sees, at a time; all
    if None. Nothing then grows with the square of a sequence; experts are not cut."""
    offload_activations: bool = False
    """Keep what the backward pass needs of the layers in host memory."""
    recompute_layers: int = 1
    """With ``full``: how many layers form one recomputed block."""
    expert_tensor_parallel: bool = True
    """Split each expert over the tensor-parallel ranks; else these share out the tokens."""
    attention_kernel: AttentionKernel = "auto"
    """``fused`` is torch's scaled_dot_product_attention, ``math`` plain steps that can drop."""

    def __post_init__(self) -> None:
        _check_choice("recompute", self.recompute, ("none", "selective", "full", "modules"))
        self._check_modules()
        _check_choice("attention_kernel", self.attention_kernel, ("auto", "fused", "math"))
        _check_choice("sequence_sharing", self.sequence_sharing, ("ulysses", "ring"))
        _check_int("recompute_layers", self.recompute_layers)
        if self.sequence_chunk is not None:
            _check_int("sequence_chunk", self.sequence_chunk)
        if self.attention_kernel == "fused" and self.tiled:
            raise ValueError(
                f'attention_kernel="fused" cannot attend in tiles, as sequence_sharing '
                f"({self.sequence_sharing!r}) or sequence_chunk ({self.sequence_chunk}) ask for. "
                f"Leave attention_kernel out."
            )

    def _check_modules(self) -> None:
        for name in self.recompute_modules:
            _check_choice("recompute_modules", name, _MODULES)
        if (self.recompute == "modules") != bool(self.recompute_modules):
            raise ValueError(
                f"recompute is {self.recompute!r} and recompute_modules {self.recompute_modules}; "
                f'give the list with recompute="modules", and only then.'
            )
        for whole, part in (("attention", "core_attention"), ("mlp", "activation")):
            if {whole, part} <= set(self.recompute_modules):
                raise ValueError(
                    f"recompute_modules has {whole} and {part}, which is a part of it; leave one "
                    f"of the two out."
                )

    @property
    def tiled(self) -> bool:
        """Whether attention is computed tile by tile."""
        return self.sequence_sharing == "ring" or self.sequence_chunk is not None

    def check_short(self, kind: str) -> None:
        """Raise ValueError if this is meant for long causal sequences, which ``kind`` has not."""
        if self.tiled:
            raise ValueError(
                f"sequence_sharing={self.sequence_sharing!r} and sequence_chunk="
                f"{self.sequence_chunk} are for causal models, not for a {kind}; leave them out."
            )

    def computes_again(self, module: RecomputeModule) -> bool:
        """Whether the backward pass computes ``module`` again by itself, not as part of a layer."""
        if self.recompute == "selective":
            return module == "core_attention"
        return module in self.recompute_modules

    def check(self, config: GPTConfig) -> None:
        """Raise ValueError if ``config`` asks for what this way of computing cannot do."""
        if self.computes_again("norm") and config.residual_post_layernorm:
            raise ValueError(
                "recompute_modules has norm, but with residual_post_layernorm the residual stream "
                "keeps what the norms give; leave norm out."
            )
        if self.attention_kernel == "fused" and config.attention_dropout > 0.0:
            raise ValueError(
                f'attention_kernel="fused" cannot drop attention weights, but attention_dropout '
                f"is {config.attention_dropout}. Set attention_dropout=0, or "
                f'attention_kernel="auto" or "math".'
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} ({value!r}) is unknown; choose one of {', '.join(choices)}.")


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} ({value!r}) must be a whole number.")  # noqa: TRY004
    if value < 1:
        raise ValueError(f"{name} ({value}) must be at least 1.")
