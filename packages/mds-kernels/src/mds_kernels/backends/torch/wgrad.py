"""Weight gradients added in the dtype of their sum, which may be wider than the factors.

Letters: n tokens, i inputs, o outputs of a layer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ROWS = 8192


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
        for rows in blocks(total):
            total[rows] += grad_output[:, rows].T @ inputs


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each small beside a vocabulary yet large for a matrix product."""
    for start in range(0, matrix.shape[0], _BLOCK_ROWS):
        yield slice(start, start + _BLOCK_ROWS)
