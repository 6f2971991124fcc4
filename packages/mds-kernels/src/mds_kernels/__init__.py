"""Fused training kernels with a float64 reference each, chosen per device and dtype."""

from mds_kernels.ops.cross_entropy import cross_entropy
from mds_kernels.ops.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy

__all__ = ["LinearCrossEntropy", "cross_entropy", "linear_cross_entropy"]
