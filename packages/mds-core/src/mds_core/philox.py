"""Counter-based random numbers in torch's integer arithmetic: Philox 4x32-10 (Salmon et al., 2011).

The value at a counter is a pure function of key and counter, so a slice of a stream is the stream
of the slice. Words are kept in int64 tensors; every device gives the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["WORDS", "Key", "key_of", "philox", "splitmix", "standard_normal"]

Key = tuple[int, int]
"""Two 32-bit words that select a stream."""

WORDS = 4
"""Random words that one counter gives."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's constants as signed numbers
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_HALF_PI = 1.5707963267948966
_LOG_SERIES = tuple(
    2.0 / n for n in range(21, 0, -2)
)  # 2 artanh(s) / s, highest power of s^2 first
_SIN_SERIES = (
    *(1.0 / 355687428096000, -1.0 / 1307674368000, 1.0 / 6227020800, -1.0 / 39916800),
    *(1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6, 1.0),
)
_COS_SERIES = (
    *(1.0 / 20922789888000, -1.0 / 87178291200, 1.0 / 479001600, -1.0 / 3628800),
    *(1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2, 1.0),
)


def key_of(*parts: int | str) -> Key:
    """Derive a key from a seed and what the stream is for, equal on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


# What torch.compiler.assume_constant_result does; calling that imports the whole compiler, for
# seconds, wherever this package is imported. The parts are plain values, on which dynamo guards.
key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def philox(key: Key, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four random words for every counter.

    Args:
        key: Selects the stream.
        counter: Four int64 tensors with values in [0, 2^32), of shapes that broadcast.

    Returns:
        Four int64 tensors with values in [0, 2^32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product needs 64 bits; int64 wraps, and the mask drops the sign that >> drags in.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def splitmix(seeds: Tensor, steps: Tensor) -> Tensor:
    """Return what SplitMix64 (Steele et al., 2014) gives ``steps`` after ``seeds``.

    It takes a tenth of Philox's operations, so that a stream started by Philox can be long.

    Args:
        seeds: int64, the first state of each stream.
        steps: int64, of a shape that broadcasts with ``seeds``.

    Returns:
        int64 with 64 random bits each, of the broadcast shape, contiguous.
    """
    x = (seeds + (steps + 1) * _GAMMA).contiguous()
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x.bitwise_xor_((x >> shift) & ((1 << 64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def standard_normal(radius_word: Tensor, angle_word: Tensor) -> tuple[Tensor, Tensor]:
    """Turn two words into two independent standard normals (Box and Muller).

    Only +, *, / and sqrt of float64 occur, which IEEE 754 rounds alike everywhere: logarithms and
    sines of libraries differ in the last bit between devices, and within a vector and its tail.

    Args:
        radius_word: int64 with values in [0, 2^32).
        angle_word: The same shape, likewise.

    Returns:
        Two float64 tensors of that shape.
    """
    radius = torch.sqrt(_log((radius_word.double() + 0.5) * 2.0**-32) * -2.0)
    # A turn is 2^32; two bits say the quadrant, the rest is an angle in [-pi/4, pi/4).
    quadrant = ((angle_word + 2**29) >> 30) & 3
    angle = ((angle_word + 2**29) & (2**30 - 1)).double().sub(2**29 - 0.5).mul(_HALF_PI * 2.0**-30)
    square = angle * angle
    sine, cosine = _horner(square, _SIN_SERIES) * angle, _horner(square, _COS_SERIES)
    swap, negative_cosine, negative_sine = quadrant & 1, (quadrant + 1) >> 1 & 1, quadrant >> 1
    x = torch.where(swap.bool(), sine, cosine) * (1 - 2 * negative_cosine)
    y = torch.where(swap.bool(), cosine, sine) * (1 - 2 * negative_sine)
    return radius * x, radius * y


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of float64 numbers in (0, 1)."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    power = exponent.double() - low.double()
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return _horner(s * s, _LOG_SERIES) * s + power * _LN_2


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total.mul_(x).add_(coefficient)
    return total
