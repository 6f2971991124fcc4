"""Rotary position embedding of queries and keys in one call.

Letters: n heads, d head dim, r rotated channels (r <= d, even).
"""

import torch
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = ["rope", "rope_reference"]


def rope(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first ``r`` channels of each head by its position's angles, in fp32.

    Args:
        query: [..., n, d], for instance [s, b, n, d].
        key: [..., n_kv, d].
        cos: Broadcastable to query[..., : r / 2] and key[..., : r / 2], for instance
            [s, 1, 1, r / 2].
        sin: As ``cos``.
        interleaved: Pair channels (0, 1), (2, 3), ... as GPT-J does; else (0, r / 2),
            (1, r / 2 + 1), ... as GPT-NeoX and Llama in transformers do.
        backend: The backend to use, or None for the registry's choice.

    Returns:
        Query and key, rotated, in their dtypes. The backward pass keeps only ``cos`` and ``sin``,
        which get no gradient.
    """
    for name, tensor in (("query", query), ("key", key)):
        if 2 * cos.shape[-1] > tensor.shape[-1]:
            raise ValueError(
                f"cos has {cos.shape[-1]} angles and rotates {2 * cos.shape[-1]} channels; {name} "
                f"{tuple(tensor.shape)} has {tensor.shape[-1]}."
            )
    run = implementation("rope", device=query.device.type, dtype=query.dtype, backend=backend)
    result: tuple[Tensor, Tensor] = run(query, key, cos, sin, interleaved=interleaved)
    return result


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate one tensor in float64 as complex numbers, an independent way to the same."""
    angles = cos.shape[-1]
    rotated, rest = x.double()[..., : 2 * angles], x.double()[..., 2 * angles :]
    if interleaved:
        real, imaginary = rotated[..., 0::2], rotated[..., 1::2]
    else:
        real, imaginary = rotated.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.complex(cos.double(), sin.double())
    if interleaved:
        return torch.cat([torch.view_as_real(turned).flatten(-2), rest], dim=-1)
    return torch.cat([turned.real, turned.imag, rest], dim=-1)
