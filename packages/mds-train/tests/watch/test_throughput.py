from __future__ import annotations

import pytest

from mds_train.watch.throughput import (
    StepTimes,
    duration,
    model_flops_utilisation,
    peak_of,
    short_number,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (42, "42s"), (185, "3m05s"), (7800, "2h10m"), (273_600, "3d04h")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8, "8"),
        (812, "812"),
        (12_345, "12.3k"),
        (4_560_000, "4.56M"),
        (1.2e12, "1.20T"),
        (0.5, "0.50"),
    ],
)
def test_quantities_have_three_digits(value: float, text: str) -> None:
    assert short_number(value) == text


def test_the_peak_is_known_by_name_and_only_for_bf16() -> None:
    assert peak_of("NVIDIA H200", precision="bf16") == 989.0
    assert peak_of("NVIDIA H100 PCIe", precision="bf16") == 756.0
    assert peak_of("NVIDIA A100-SXM4-80GB", precision="bf16") == 312.0
    assert peak_of("NVIDIA H200", precision="fp32") is None
    assert peak_of("", precision="bf16") is None


def test_utilisation_is_the_share_of_all_devices() -> None:
    share = model_flops_utilisation(1000, flops_per_token=1e9, world_size=2, peak_tflops=1.0)

    assert share == pytest.approx(0.5)


def test_the_rest_is_foretold_by_the_median_of_late_steps() -> None:
    times = StepTimes(window=3)
    assert times.remaining(10) is None

    for seconds in (100.0, 1.0, 2.0, 3.0):
        times.add(seconds)

    assert times.remaining(10) == 20.0
