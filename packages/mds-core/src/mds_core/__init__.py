"""Parallel transformer layers, models and pipeline schedules that equal one process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mds_core.bert_config import BertConfig
    from mds_core.config import GPTConfig
    from mds_core.groups import Layout, ProcessGroups
    from mds_core.sharding import ParameterShard
    from mds_core.t5_config import T5Config

__all__ = ["BertConfig", "GPTConfig", "Layout", "ParameterShard", "ProcessGroups", "T5Config"]

# torch takes over a second to import, and a configuration does not need it.
_HOMES = {
    "BertConfig": "mds_core.bert_config",
    "GPTConfig": "mds_core.config",
    "Layout": "mds_core.groups",
    "ParameterShard": "mds_core.sharding",
    "ProcessGroups": "mds_core.groups",
    "T5Config": "mds_core.t5_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
