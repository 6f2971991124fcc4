"""Rotary positions in a ``config.json``: transformers 5 has one table, 4 had three members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mds_ckpt.families.rule import number

_KEYS = frozenset(
    {"rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings"}
    | {"low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"}
    | {"short_factor", "long_factor", "mscale", "mscale_all_dim", "truncate"}
    | {"partial_rotary_factor"}
)


def rotation_from_hf(
    config: Mapping[str, Any], *, theta: str = "rope_theta", share: str = "", default: float = 1.0
) -> dict[str, Any]:
    """``rope_theta``, ``rope_percent`` and ``rope_scaling`` of a model.

    Args:
        config: A ``config.json``; ValueError for a table that we don't know.
        theta: The member of transformers 4 that holds the base of the frequencies.
        share: The member of transformers 4 that holds the share of channels that rotate.
        default: That share where nothing says.
    """
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, Mapping) or not table.keys() <= _KEYS:
        raise ValueError("'rope_parameters' is not an object of members that we know")
    members: dict[str, Any] = {
        "rope_theta": number(table, "rope_theta", number(config, theta, 10000.0))
    }
    percent = number(table, "partial_rotary_factor", number(config, share, default))
    if percent != 1.0:
        members["rope_percent"] = percent
    scaling = {k: v for k, v in table.items() if k not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        members["rope_scaling"] = scaling
    return members


def rotation_to_hf(
    config: Mapping[str, Any], *, theta: str = "rope_theta", share: str = ""
) -> dict[str, Any]:
    """The members of a ``config.json``, in the words of both transformers 4 and 5."""
    base, percent = config.get("rope_theta", 10000.0), config.get("rope_percent", 1.0)
    table = dict(config.get("rope_scaling") or {"rope_type": "default"}) | {"rope_theta": base}
    members: dict[str, Any] = {theta: base, "rope_scaling": config.get("rope_scaling")}
    if share:
        table["partial_rotary_factor"] = members[share] = percent
    return members | {"rope_parameters": table}
