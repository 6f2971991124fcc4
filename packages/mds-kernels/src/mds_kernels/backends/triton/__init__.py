"""Triton kernels, imported only where they are chosen."""
