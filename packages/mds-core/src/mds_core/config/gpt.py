"""The shape of a GPT-like decoder. Nothing here depends on how it is parallelised.

Parameter count and floating-point operations follow from these numbers alone, so a plan for a
thousand devices needs no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from mds_core.config import checks, counts
from mds_core.config.shape import SCALING_FIELDS, Shape
from mds_core.rope_scaling import RopeScaling

__all__ = ["GPTConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig(Shape):
    """Shape of a decoder-only transformer: GPT-2, NeoX, BLOOM, Llama, Mistral, Mixtral, Qwen kinds.

    Raises:
        ValueError: A value is out of range or two values contradict each other; the message names
            both and says what to change.
    """

    def __post_init__(self) -> None:
        checks.check_shape(self)

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
                members[SCALING_FIELDS[member]] = value
        return cls(**members)

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of its model; `from_record` reads it."""
        flat = set(SCALING_FIELDS.values())
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
        checks.check_tp(self, tp_size)

    def check_expert_parallel(self, ep_size: int, *, tp_size: int = 1) -> None:
        """Raise ValueError unless the experts divide by ``ep_size`` and their width by tp_size."""
        checks.check_expert_parallel(self, ep_size, tp_size=tp_size)

    def check_ulysses(self, ulysses_size: int, *, tp_size: int = 1) -> None:
        """Raise ValueError if a tensor-parallel rank has fewer heads than ``ulysses_size``."""
        checks.check_ulysses(self, ulysses_size, tp_size=tp_size)

    def num_params(self) -> int:
        """Trained numbers of the whole model, over all ranks, with the true vocabulary."""
        return counts.model_params(self)

    def num_layer_params(self, layer: int = 0) -> int:
        """Trained numbers of one transformer layer."""
        return counts.layer_params(self, layer)

    def flops_per_token(self, seq_length: int) -> float:
        """Floating-point operations of one training step per token, forward and backward.

        Counted are the matrix products only (2 operations a multiplication), three times the
        forward pass. Attention counts the pairs that the mask lets through, not the masked ones;
        experts count for the tokens that they are chosen for.
        """
        return counts.flops_per_token(self, seq_length)
