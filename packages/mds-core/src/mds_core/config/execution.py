"""How a model computes: what it keeps, what it computes again, how ranks share a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.config.choices import (
    AttentionKernel,
    Recompute,
    RecomputeModule,
    SequenceSharing,
    check_choice,
    check_int,
)
from mds_core.config.shape import Shape

__all__ = ["Execution"]

_MODULES: tuple[RecomputeModule, ...] = ("core_attention", "attention", "norm", "activation", "mlp")


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
        check_choice("recompute", self.recompute, ("none", "selective", "full", "modules"))
        self._check_modules()
        check_choice("attention_kernel", self.attention_kernel, ("auto", "fused", "math"))
        check_choice("sequence_sharing", self.sequence_sharing, ("ulysses", "ring"))
        check_int("recompute_layers", self.recompute_layers)
        if self.sequence_chunk is not None:
            check_int("sequence_chunk", self.sequence_chunk)
        if self.attention_kernel == "fused" and self.tiled:
            raise ValueError(
                f'attention_kernel="fused" cannot attend in tiles, as sequence_sharing '
                f"({self.sequence_sharing!r}) or sequence_chunk ({self.sequence_chunk}) ask for. "
                f"Leave attention_kernel out."
            )

    def _check_modules(self) -> None:
        for name in self.recompute_modules:
            check_choice("recompute_modules", name, _MODULES)
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

    def check(self, config: Shape) -> None:
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
