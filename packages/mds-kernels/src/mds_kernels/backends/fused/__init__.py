"""Autograd of the fused kernels, once for all backends: triton, cuda and cpu give the passes.

A pass is a graph op named ``mds_kernels::<backend>_<pass>``, which takes and returns whole tensors.
"""
