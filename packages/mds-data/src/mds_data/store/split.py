"""Splits of a dataset's documents: Megatron's split string, ranges by name, document numbers."""

from collections.abc import Mapping

__all__ = ["split_bounds", "split_ranges", "split_weights"]

_NAMES = ("train", "valid", "test")


def split_weights(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test from ``"969,30,1"`` (or ``"969/30/1"``), adding up to 1.

    Missing shares are 0, and what follows the third is left out, as in the original.
    """
    separator = "," if "," in split else "/"
    try:
        weights = [float(part) for part in split.split(separator)]
    except ValueError:
        raise ValueError(
            f"split {split!r} must be numbers with commas between, such as '969,30,1'"
        ) from None
    weights = [*weights, 0.0, 0.0][:3]
    total = sum(weights)
    if min(weights) < 0 or not 0 < total < float("inf"):
        raise ValueError(f"split {split!r} must hold no negative share and at least one positive")
    train, valid, test = (weight / total for weight in weights)
    return train, valid, test


def split_ranges(
    split: str | Mapping[str, tuple[float, float]] | None,
) -> dict[str, tuple[float, float]] | None:
    """Ranges of the document count, in fractions, that a manifest keeps."""
    if split is None:
        return None
    if not isinstance(split, str):
        for name, (start, stop) in split.items():
            if not 0 <= start <= stop <= 1:
                raise ValueError(f"split {name!r} must be 0 <= start <= stop <= 1")
        return {name: (float(start), float(stop)) for name, (start, stop) in split.items()}
    ranges, start = {}, 0.0
    weights = split_weights(split)
    for index, name in enumerate(_NAMES):
        last = not any(weights[index + 1 :])
        stop = 1.0 if last else min(1.0, start + weights[index])
        ranges[name] = (start, stop)
        start = stop
    return ranges


def split_bounds(split: str, *, documents: int) -> tuple[int, int, int, int]:
    """Document numbers at which train, valid and test begin and end, rounded as the original does.

    Returns:
        Start of train, start of valid, start of test, end of test (the document count).
    """
    bounds = [0]
    for weight in split_weights(split):
        bounds.append(bounds[-1] + round(weight * float(documents)))
    surplus = bounds[-1] - documents
    _, valid, test, end = (bound - surplus for bound in bounds)
    return 0, max(valid, 0), max(test, 0), end
