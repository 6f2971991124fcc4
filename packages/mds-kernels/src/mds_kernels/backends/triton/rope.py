"""Rotary position embedding of queries and keys in one launch.

Letters: n heads, d head dim, r rotated channels.
"""

from torch import Tensor

from mds_kernels.backends.fused.rope import FAKES
from mds_kernels.backends.fused.rope import rope as with_gradient
from mds_kernels.backends.torch import rope as plain
from mds_kernels.backends.triton.kernels.rope import rope as kernel
from mds_kernels.backends.triton.launch import next_power_of_two, on_device_of, passes

HEADS = 4
"""Heads that a program turns at a time."""


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate query [..., n, d] and key [..., n_kv, d]; angles that differ by head by torch."""
    same_places = query.shape[:-2] == key.shape[:-2] and query.shape[-1] == key.shape[-1]
    if not same_places or (cos.dim() > 1 and cos.shape[-2] != 1):
        return plain.rope(query, key, cos, sin, interleaved=interleaved)
    return with_gradient(query, key, cos, sin, interleaved=interleaved, kernels="triton")


@passes(FAKES)
def _rope(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,  # noqa: FBT001 - a graph op's arguments are positional
    back: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    turned = query.new_empty(query.shape), key.new_empty(key.shape)
    if not query.numel():
        return turned
    q, k = _by_position(query), _by_position(key)
    outer, inner, heads, dim = q.shape
    places = (*query.shape[:-2], 1)
    cosines, sines = (_by_position(angles.expand(*places, -1))[:, :, 0] for angles in (cos, sin))
    if sines.stride() != cosines.stride():
        cosines, sines = cosines.contiguous(), sines.contiguous()
    half = cos.shape[-1]
    with on_device_of(query):
        kernel[(outer * inner,)](
            q,
            k,
            cosines,
            sines,
            *turned,
            inner,
            *q.stride()[:3],
            *k.stride()[:3],
            *cosines.stride()[:2],
            heads,
            k.shape[2],
            dim,
            half,
            INTERLEAVED=interleaved,
            BACK=back,
            HEADS=HEADS,
            HALF=next_power_of_two(half),
            REST=next_power_of_two(dim - 2 * half),
        )
    return turned


def _by_position(x: Tensor) -> Tensor:
    """Return [outer, inner, n, d] with neighbouring channels, a view where that is possible."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    leading = x.shape[:-2]
    if len(leading) == 2:
        return x
    if len(leading) < 2:
        return x.reshape(1, *(leading or (1,)), *x.shape[-2:])
    return x.reshape(leading[0], -1, *x.shape[-2:])
