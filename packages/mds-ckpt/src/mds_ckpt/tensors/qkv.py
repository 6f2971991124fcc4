"""Row orders of fused query, key and value weights, and how to tell which one a checkpoint has.

Canonical is *grouped*: for each key/value head its query heads, its key, its value. All are orders
of one rank's rows. Letters: n query heads, g key/value heads, d head dim, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "LAYOUTS",
    "Layout",
    "Verdict",
    "detect_layout",
    "fused_rows",
    "key_value_rows",
    "query_rows",
]

Layout = Literal["grouped", "thirds", "v0", "v1"]
LAYOUTS: tuple[Layout, ...] = ("grouped", "thirds", "v0", "v1")
Run = tuple[int, int]
"""Rows ``[start, stop)`` of the whole, canonical tensor."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer."""

    queries: int
    groups: int
    channels: int

    def check(self, tp_size: int) -> None:
        """ValueError if ``tp_size`` ranks can't share the heads evenly."""
        if self.groups < 1 or self.queries % self.groups or self.groups % tp_size:
            raise ValueError(
                f"{self.queries} query heads in {self.groups} groups can't be shared by "
                f"{tp_size} tensor-parallel ranks"
            )

    @property
    def rows(self) -> int:
        """Rows of the whole fused weight."""
        return (self.queries + 2 * self.groups) * self.channels


def fused_rows(layout: Layout, heads: Heads, *, tp_rank: int, tp_size: int) -> list[Run]:
    """Where the rows of one rank's fused weight belong in the canonical one, in their order."""
    heads.check(tp_size)
    count = heads.groups // tp_size
    groups = range(tp_rank * count, (tp_rank + 1) * count)
    if layout == "grouped":
        width = _group_rows(heads)
        return [(groups[0] * width, (groups[-1] + 1) * width)]
    if layout != "thirds" and heads.groups != heads.queries:
        raise ValueError(f"the order {layout} is older than grouped key/value heads")
    if layout == "v1":
        return _interleaved(heads, groups)
    # v0 is [3, n/t, d], which is the thirds of today where every head has its own key and value.
    query = [_part(heads, group, 0, _per_group(heads)) for group in groups]
    key = [_part(heads, group, _per_group(heads), 1) for group in groups]
    value = [_part(heads, group, _per_group(heads) + 1, 1) for group in groups]
    return query + key + value


def query_rows(heads: Heads, *, tp_rank: int, tp_size: int) -> list[Run]:
    """The rows of a separate query weight (before November 2023, with grouped heads)."""
    heads.check(tp_size)
    count = heads.groups // tp_size
    groups = range(tp_rank * count, (tp_rank + 1) * count)
    return [_part(heads, group, 0, _per_group(heads)) for group in groups]


def key_value_rows(heads: Heads, *, tp_rank: int, tp_size: int) -> list[Run]:
    """The rows of a separate key/value weight: for each group key, then value."""
    heads.check(tp_size)
    count = heads.groups // tp_size
    groups = range(tp_rank * count, (tp_rank + 1) * count)
    return [_part(heads, group, _per_group(heads), 2) for group in groups]


def _per_group(heads: Heads) -> int:
    return heads.queries // heads.groups


def _group_rows(heads: Heads) -> int:
    return (_per_group(heads) + 2) * heads.channels


def _part(heads: Heads, group: int, first: int, count: int) -> Run:
    start = group * _group_rows(heads) + first * heads.channels
    return start, start + count * heads.channels


def _interleaved(heads: Heads, groups: range) -> list[Run]:
    """Version 1: [n/t, d, 3], so the three rows of a channel stand together."""
    rows = []
    for head in groups:
        base = head * 3 * heads.channels
        for channel in range(heads.channels):
            rows += [
                (row, row + 1)
                for row in range(base + channel, base + 3 * heads.channels, heads.channels)
            ]
    return rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """A layout, and why it is taken for this one."""

    layout: Layout
    reason: str
    is_certain: bool = True


def detect_layout(
    args: Mapping[str, Any] | None,
    version: object,
    *,
    asked: Layout | None = None,
    has_fpdt_names: bool = False,
) -> Verdict:
    """Which row order the fused weights have.

    Args:
        args: The training script's arguments as stored; None if the checkpoint has none.
        version: ``checkpoint_version``; None if missing, which means 0.
        asked: What the user says; wins.
        has_fpdt_names: Whether attention has the names of DeepSpeed's FPDT layers.
    """
    if asked is not None:
        return Verdict(asked, "asked for")
    marker = (args or {}).get("mds_qkv_layout")
    if marker in LAYOUTS:
        return Verdict(marker, "args.mds_qkv_layout says so")
    if has_fpdt_names:
        return Verdict("thirds", "the names are those of FPDT layers")
    number = version if isinstance(version, int | float) else 0.0
    if number < 1.0:
        return Verdict("v0", f"checkpoint_version is {version}")
    if number < 2.0:
        return Verdict("v1", f"checkpoint_version is {version}")
    if args is None:
        return Verdict("grouped", "there are no args to tell grouped from thirds", is_certain=False)
    return _by_args(args)


def _by_args(args: Mapping[str, Any]) -> Verdict:
    """Version 2 and 3 were written by code of both orders; argparse leaves every option behind."""
    field = "ds_sequence_parallel_fpdt"
    if field not in args:
        return Verdict("grouped", f"args have no {field}: the code is older than thirds")
    if args.get("hf_ckpt_dir") or args.get("to_hf_ckpt"):
        reason = "args say that hf2megads made it, which writes groups"
        return Verdict("grouped", reason, is_certain=False)
    queries, groups = args.get("num_attention_heads"), args.get("num_key_value_heads")
    if groups is not None and groups != queries:
        reason = f"args have {field}, but that code can't run grouped heads"
        return Verdict("grouped", reason, is_certain=False)
    return Verdict("thirds", f"args have {field}: the code splits rows into thirds per rank")
