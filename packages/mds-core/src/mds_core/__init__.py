"""Parallel transformer layers, models and pipeline schedules that equal one process."""

from mds_core.config import GPTConfig
from mds_core.groups import Layout, ProcessGroups
from mds_core.sharding import ParameterShard

__all__ = ["GPTConfig", "Layout", "ParameterShard", "ProcessGroups"]
