"""Arithmetic on tensors: boxes, number types, digests, row orders."""
