"""Layers that split over tensor-parallel ranks; a group of None makes each an ordinary layer."""

from mds_core.layers.attention import SelfAttention
from mds_core.layers.cache import KVCache, SlotCache
from mds_core.layers.embedding import VocabParallelEmbedding
from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from mds_core.layers.mlp import MLP
from mds_core.layers.norm import Norm

__all__ = [
    "MLP",
    "ColumnParallelLinear",
    "KVCache",
    "Norm",
    "RowParallelLinear",
    "SelfAttention",
    "SlotCache",
    "VocabParallelEmbedding",
]
