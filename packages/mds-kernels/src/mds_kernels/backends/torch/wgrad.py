"""Weight gradients added in the dtype of their sum, which may be wider than the factors.

Letters: n tokens, i inputs, o outputs of a layer.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_BLOCK_ROWS = 2048


def wgrad_accumulate(total: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """Add ``grad_output.T @ inputs`` to total [o, i] in place."""
    with torch.no_grad():
        add_product(total, grad_output.flatten(0, -2), inputs.flatten(0, -2))


def add_product(total: Tensor, grad_output: Tensor, inputs: Tensor) -> None:
    """Add ``grad_output.T @ inputs`` to total [o, i], given [n, o] and [n, i]."""
    if total.dtype == inputs.dtype:
        total.addmm_(grad_output.T, inputs)
    elif total.device.type == "cuda":
        # The product leaves the tensor cores in fp32 and is added there.
        torch.addmm(total, grad_output.T, inputs, out_dtype=total.dtype, out=total)
    else:
        # A CPU would convert the whole product in fresh memory, page by page, before it adds it.
        product, wide = buffers(total, dtypes=(inputs.dtype, total.dtype))
        for rows in blocks(total):
            part = total[rows]
            count = len(part)
            torch.mm(grad_output[:, rows].T, inputs, out=product[:count])
            part += wide[:count].copy_(product[:count])


def buffers(matrix: Tensor, *, dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    """Return room for one block of ``matrix`` in each dtype."""
    rows = min(_BLOCK_ROWS, matrix.shape[0])
    return [matrix.new_empty(rows, *matrix.shape[1:], dtype=dtype) for dtype in dtypes]


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each small beside a vocabulary yet large for a matrix product."""
    for start in range(0, matrix.shape[0], _BLOCK_ROWS):
        yield slice(start, start + _BLOCK_ROWS)
