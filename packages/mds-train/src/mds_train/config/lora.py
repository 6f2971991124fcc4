"""The [lora] table: low-rank adapters that are trained in place of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from mds_core.config.adapters import ADAPTED, AdapterConfig
from mds_train.config.checks import require_not_negative

__all__ = ["LoraConfig"]

_THEIRS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "c_attn", "query_key_value"),
    "linear_proj": ("o_proj", "dense"),
    "linear_fc1": ("gate_proj", "up_proj", "c_fc", "dense_h_to_4h"),
    "linear_fc2": ("down_proj", "dense_4h_to_h"),
}
"""What transformers calls parts of our layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Adapters beside linear layers; the weights of checkpoint.load stay as they are."""

    rank: int = 0
    """Width of the adapters, such as 8 to 64; 0 trains the model itself."""

    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""

    dropout: float = 0.0
    """Share of an adapter's inputs that are dropped in training."""

    targets: tuple[str, ...] = ADAPTED
    """Which layers: linear_qkv, linear_proj (attention), linear_fc1, linear_fc2 (MLP)."""

    def __post_init__(self) -> None:
        require_not_negative("lora.rank", self.rank)
        for target in self.targets:
            ours = next((ours for ours, names in _THEIRS.items() if target in names), None)
            if ours is not None:
                raise ValueError(
                    f"lora.targets has {target}, which is {ours} here (together with what shares "
                    f"its input); write {ours}."
                )
        try:
            AdapterConfig(
                rank=max(1, self.rank),
                alpha=self.alpha,
                dropout=self.dropout,
                targets=self.targets,
            )
        except ValueError as error:
            raise ValueError(f"[lora]: {error}") from error

    @property
    def adapters(self) -> AdapterConfig | None:
        """The adapters; None without."""
        if not self.rank:
            return None
        return AdapterConfig(
            rank=self.rank, alpha=self.alpha, dropout=self.dropout, targets=self.targets
        )
