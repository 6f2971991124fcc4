"""The fields of a GPT-like model's shape, and the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mds_core.config.choices import (
    GATED,
    Activation,
    BalanceChoices,
    BalanceScope,
    DropPolicy,
    Normalization,
    PositionEmbedding,
    RouterNoise,
)
from mds_core.expert_plan import experts_of_layers
from mds_core.rope_scaling import RopeScaling, RopeType

__all__ = ["SCALING_FIELDS", "Shape"]

# Members of a rope_scaling table: here they are flat, so that each has its option and variable.
SCALING_FIELDS: Mapping[str, str] = MappingProxyType(
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
class Shape:
    """What `GPTConfig` is made of, unchecked."""

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
            for member, name in SCALING_FIELDS.items()
            if getattr(self, name) is not None
        }
        if not given:
            return None
        if missing := sorted({"rope_type", "factor"} - given.keys()):
            names = ", ".join(SCALING_FIELDS[member] for member in missing)
            raise ValueError(
                f"{', '.join(SCALING_FIELDS[member] for member in given)} is set without {names}; "
                f"set both or neither."
            )
        return RopeScaling(**given)

    @property
    def qkv_width(self) -> int:
        """Rows of the query/key/value projection."""
        return (self.num_attention_heads + 2 * self.kv_heads) * self.channels

    @property
    def fc1_width(self) -> int:
        """Rows of the MLP's first projection, gate and up together."""
        return self.ffn_width * (2 if self.gated else 1)
