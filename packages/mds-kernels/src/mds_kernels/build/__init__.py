"""Compiling the C++ kernels for this machine, on request only: where, how, and by whom just now."""
