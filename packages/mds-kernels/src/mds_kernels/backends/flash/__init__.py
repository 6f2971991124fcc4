"""Kernels of the flash-attn package; imported only where it is chosen."""
