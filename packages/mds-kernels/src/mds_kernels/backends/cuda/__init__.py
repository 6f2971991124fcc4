"""Compiled CUDA C++ kernels, where ``mds-kernels build`` has made them."""
