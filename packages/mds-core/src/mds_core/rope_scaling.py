"""How rotary positions are stretched to more positions than a model was first trained on.

The names are those of Hugging Face's ``rope_parameters``, so that a table of a published model's
config.json can be given as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, Self

__all__ = ["RopeScaling", "RopeType", "sharpness"]

RopeType = Literal["linear", "dynamic", "yarn", "llama3"]

_LLAMA3 = frozenset({"low_freq_factor", "high_freq_factor"})
_YARN = frozenset({"attention_factor", "beta_fast", "beta_slow"})
_OWN_MEMBERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"linear": frozenset(), "dynamic": frozenset(), "yarn": _YARN, "llama3": _LLAMA3}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """One way of stretching rotary positions by ``factor``.

    Raises:
        ValueError: The type is unknown, or a member is out of range or of another type.
    """

    rope_type: RopeType
    """``linear`` divides positions, ``dynamic`` enlarges the base as sequences grow (NTK),
    ``yarn`` and ``llama3`` stretch the long waves only."""
    factor: float
    """How many times the positions are stretched."""
    original_max_position_embeddings: int | None = None
    """Positions before stretching (yarn, llama3); max_position_embeddings when left out."""
    low_freq_factor: float | None = None
    """llama3: waves longer than the original length over this are stretched in full."""
    high_freq_factor: float | None = None
    """llama3: waves shorter than the original length over this stay as they are."""
    beta_fast: float | None = None
    """yarn: waves that turn more often than this in the original length stay; 32 if None."""
    beta_slow: float | None = None
    """yarn: waves that turn less often than this are stretched in full; 1 if None."""
    attention_factor: float | None = None
    """yarn: factor of cosines and sines; 0.1 ln(factor) + 1 if None."""

    def __post_init__(self) -> None:
        if self.rope_type not in _OWN_MEMBERS:
            raise ValueError(
                f"rope_type ({self.rope_type!r}) is unknown; choose one of "
                f"{', '.join(_OWN_MEMBERS)}."
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "rope_type" and value is not None:
                self._check(field.name, value)
        if self.rope_type == "llama3":
            self._check_llama3()

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self | None:
        """Read a TOML or JSON table; ``type`` is the old name of ``rope_type``.

        Returns:
            The scaling; None for the type ``default``, which scales nothing.
        """
        members = {name: value for name, value in table.items() if value is not None}
        old_name = members.pop("type", None)
        members.setdefault("rope_type", old_name)
        if members["rope_type"] == "default":
            return None
        if members["rope_type"] == "yarn":
            _resolve_yarn(members)
        known = [field.name for field in fields(cls)]
        unknown = sorted(members.keys() - set(known))
        if unknown or "factor" not in members:
            raise ValueError(
                f"rope_scaling {dict(table)} is not understood: it takes {', '.join(known)}, of "
                f"which rope_type and factor are required."
            )
        return cls(**members)

    def table(self) -> dict[str, Any]:
        """The members that are set, as `of` reads them."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _check(self, name: str, value: object) -> None:
        if name in (_YARN | _LLAMA3) - _OWN_MEMBERS[self.rope_type]:
            raise ValueError(
                f"{name} ({value!r}) has no meaning for the rope_type {self.rope_type!r}; leave "
                f"it out."
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} ({value!r}) of rope scaling must be a number.")  # noqa: TRY004
        stretches = name in ("factor", "original_max_position_embeddings")
        if not (value >= 1.0 if stretches else value > 0.0) or math.isinf(value):
            least = "at least 1" if stretches else "above 0"
            raise ValueError(f"{name} ({value}) of rope scaling must be {least}.")

    def _check_llama3(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is None or high is None or not low < high:
            raise ValueError(
                f"llama3 needs low_freq_factor ({low}) below high_freq_factor ({high}); Llama 3.1 "
                f"has 1 and 4."
            )


def sharpness(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cosines and sines, which keeps attention over longer sequences sharp."""
    return 0.1 * scale * math.log(factor) + 1.0


def _resolve_yarn(members: dict[str, Any]) -> None:
    """Replace the members that only DeepSeek's tables have by what follows from them."""
    if not members.pop("truncate", True):
        raise ValueError(
            "rope_scaling's truncate is false, which our yarn does not have; leave it out."
        )
    scale, scale_all = members.pop("mscale", None), members.pop("mscale_all_dim", None)
    if scale and scale_all and "factor" in members:
        own, all_channels = (sharpness(members["factor"], value) for value in (scale, scale_all))
        members.setdefault("attention_factor", own / all_channels)
