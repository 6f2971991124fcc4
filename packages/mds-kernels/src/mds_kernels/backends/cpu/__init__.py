"""Compiled C++ kernels for a CPU, where ``mds-kernels build --device cpu`` has made them."""
