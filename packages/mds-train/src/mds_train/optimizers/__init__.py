"""Optimizers: what turns gradients into steps, one torch optimizer each."""
