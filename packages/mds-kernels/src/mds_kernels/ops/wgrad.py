"""Add a linear layer's weight gradient to a main gradient in fp32.

Letters: n tokens, i inputs, o outputs of the layer.
"""

import torch
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = ["wgrad_accumulate", "wgrad_accumulate_reference"]


def wgrad_accumulate(
    total: Tensor, grad_output: Tensor, inputs: Tensor, *, backend: str | None = None
) -> None:
    """Add ``grad_output.T @ inputs`` to ``total`` in place, so that many micro batches sum in fp32.

    Args:
        total: [o, i] fp32, or the dtype of the inputs; changed in place, without a graph.
        grad_output: [n, o].
        inputs: [n, i] in the dtype of ``grad_output``.
        backend: The backend to use, or None for the registry's choice.
    """
    expected = (grad_output.shape[-1], inputs.shape[-1])
    if total.shape != expected or grad_output.shape[:-1] != inputs.shape[:-1]:
        raise ValueError(
            f"grad_output must be [n, o], inputs [n, i] and total [o, i]; got "
            f"{tuple(grad_output.shape)}, {tuple(inputs.shape)} and {tuple(total.shape)}."
        )
    if total.dtype not in (torch.float32, inputs.dtype) or grad_output.dtype != inputs.dtype:
        raise ValueError(
            f"total is {total.dtype}, grad_output {grad_output.dtype} and inputs {inputs.dtype}; "
            f"the last two must be equal, and total that or float32."
        )
    run = implementation(
        "wgrad_accumulate", device=inputs.device.type, dtype=inputs.dtype, backend=backend
    )
    run(total, grad_output, inputs)


def wgrad_accumulate_reference(total: Tensor, grad_output: Tensor, inputs: Tensor) -> Tensor:
    """Return the new total in float64; nothing is changed."""
    return total.double() + grad_output.double().T @ inputs.double()
