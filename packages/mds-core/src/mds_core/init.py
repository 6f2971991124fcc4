"""First values of parameters: a pure function of seed, canonical name and global index.

Each rank computes its slice and nothing else, and any layout, device and dtype starts from the
same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mds_core.philox import WORDS, Key, key_of, philox, standard_normal
from mds_core.sharding import Box

__all__ = ["normal", "scaled_std"]

_CHUNK = 1 << 18  # elements computed at once; the temporaries then fit into a CPU's cache


def scaled_std(std: float, *, num_layers: int) -> float:
    """Standard deviation of the projections that write into the residual stream (Megatron's)."""
    return std / math.sqrt(2.0 * num_layers)


def normal(
    seed: int,
    name: str,
    *,
    global_shape: tuple[int, ...],
    box: Box | None = None,
    std: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a box of the normally distributed start values of one parameter.

    Args:
        seed: The run's seed.
        name: Canonical name of the parameter.
        global_shape: Shape of the whole parameter, with the true vocabulary.
        box: The wanted part; all of it when left out.
        std: Standard deviation.
        dtype: Of the result. Values are rounded to fp32 first: a float64 model equals an fp32 one.
        device: Of the result.

    Returns:
        A tensor with the box's extents.
    """
    box = box or tuple((0, extent) for extent in global_shape)
    shape = [high - low for low, high in box]
    values = torch.empty(math.prod(shape), dtype=dtype, device=device)
    key, position = key_of("init", seed, name), 0
    for starts, length in _runs(global_shape, box, device=device):
        count = starts.numel() * length
        run = _stream(key, starts, length).mul_(std).float()
        values[position : position + count] = run.flatten().to(dtype)
        position += count
    return values.view(shape)


def _runs(
    global_shape: tuple[int, ...], box: Box, *, device: torch.device | str | None
) -> Iterator[tuple[Tensor, int]]:
    """The box in row-major order, as batches of equally long consecutive stretches.

    Yields:
        First global index of each stretch [n], and the stretches' length.
    """
    dims = len(global_shape)
    cut_dim = max(
        (i for i in range(dims) if box[i] != (0, global_shape[i])), default=0 if dims else -1
    )
    inner = math.prod(global_shape[cut_dim + 1 :])
    low, high = box[cut_dim] if dims else (0, 1)
    length = (high - low) * inner
    if not length:
        return
    starts = torch.tensor([low * inner], device=device)
    stride = inner * (global_shape[cut_dim] if dims else 1)
    for dim in range(cut_dim - 1, -1, -1):
        offsets = torch.arange(*box[dim], device=device) * stride
        starts = (offsets[:, None] + starts).flatten()
        stride *= global_shape[dim]
    if starts.numel() == 1:
        for begin in range(0, length, _CHUNK):
            yield starts + begin, min(_CHUNK, length - begin)
        return
    step = max(1, _CHUNK // length)
    for first in range(0, starts.numel(), step):
        yield starts[first : first + step], length


def _stream(key: Key, starts: Tensor, length: int) -> Tensor:
    """Standard normals of the global indices ``starts[i] + j``.

    Args:
        key: Selects the stream.
        starts: [n] first indices.
        length: Extent of j.

    Returns:
        [n, length] float64.
    """
    first = starts // WORDS
    block = first[:, None] + torch.arange(length // WORDS + 2, device=starts.device)
    zero = torch.zeros_like(block[:1, :1])
    words = philox(key, (block & 0xFFFFFFFF, block >> 32, zero, zero))
    lanes = [*standard_normal(words[0], words[1]), *standard_normal(words[2], words[3])]
    values = torch.stack(lanes, dim=-1).flatten(1)  # [n, 4 * blocks], from index 4 * first on
    skipped = starts - first * WORDS
    if starts.numel() == 1:
        return values.narrow(1, int(skipped), length)
    return values.gather(1, skipped[:, None] + torch.arange(length, device=starts.device))
