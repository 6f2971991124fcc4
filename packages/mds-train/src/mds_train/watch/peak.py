"""The peak of a device as measured: the rate of one large matrix product."""

from __future__ import annotations

import time

import torch

__all__ = ["measured_peak"]


def measured_peak(device: torch.device, *, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """TFLOP/s of the best of some matrix products, all that a model could hope for.

    Args:
        device: What to measure.
        dtype: Of the matrices.
        seconds: How long to try, about.
    """
    size = 8192 if device.type == "cuda" else 1024
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    best, until = float("inf"), time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < until or rounds < 3:
        _settle(device)
        began = time.perf_counter()
        torch.matmul(left, right)
        _settle(device)
        best = min(best, time.perf_counter() - began)
        rounds += 1
    return 2 * size**3 / best / 1e12


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
