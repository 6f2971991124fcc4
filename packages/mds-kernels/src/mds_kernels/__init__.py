"""Fused training kernels with a float64 reference each, chosen per device and dtype."""
