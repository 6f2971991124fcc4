"""From tokens per second to FLOP/s, the share of the hardware's peak, and the time that is left."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = [
    "KNOWN_PEAKS",
    "StepTimes",
    "duration",
    "model_flops_utilisation",
    "peak_of",
    "short_number",
]

KNOWN_PEAKS = {
    "GB200": 2450.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "MI300X": 1307.0,
    "MI250X": 383.0,
}
"""Dense peaks of bf16 and fp16 in TFLOP/s by words of the device's name, from data sheets."""


def peak_of(device_name: str, *, precision: str) -> float | None:
    """Return the peak of a device in TFLOP/s, or None where it is not known.

    Only half precision is known: what fp32 reaches depends on how TF32 is set.
    """
    if precision == "fp32":
        return None
    for words, peak in KNOWN_PEAKS.items():
        if all(word.lower() in device_name.lower() for word in words.split()):
            return peak
    return None


def model_flops_utilisation(
    tokens_per_second: float,
    *,
    flops_per_token: float,
    world_size: int,
    peak_tflops: float,
) -> float:
    """Return the share of all devices' peak that the model's own operations reach (MFU)."""
    return tokens_per_second * flops_per_token / (world_size * peak_tflops * 1e12)


class StepTimes:
    """The last steps' durations; their median foretells the rest of the run."""

    def __init__(self, *, window: int = 20) -> None:
        self._seconds: deque[float] = deque(maxlen=window)

    def add(self, seconds: float) -> None:
        """Take in a step."""
        self._seconds.append(seconds)

    def remaining(self, steps: int) -> float | None:
        """Return the seconds that so many steps will take; None before the first step."""
        if not self._seconds:
            return None
        return steps * statistics.median(self._seconds)


def duration(seconds: float) -> str:
    """Write a duration for people: 42s, 3m05s, 2h10m, 3d04h."""
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"


def short_number(value: float) -> str:
    """Write a quantity with three digits: 812, 12.3k, 4.56M, 1.20T."""
    size = value
    for unit in ("", "k", "M", "B"):
        if abs(size) < 999.5:
            digits = 0 if unit == "" and size == int(size) else max(0, 3 - len(str(int(abs(size)))))
            return f"{size:.{digits}f}{unit}"
        size /= 1000
    return f"{size:.2f}T"
