"""Random float64 inputs of the cases; only those that get a gradient require one."""

import torch
from torch import Generator, Tensor

__all__ = ["far", "fixed", "labels", "normal", "strided"]


def normal(generator: Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Return normal values that get a gradient."""
    values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return values.requires_grad_()


def fixed(generator: Generator, *shape: int) -> Tensor:
    """Return values from 0 to 1 that get no gradient."""
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def strided(generator: Generator, rows: int, columns: int) -> Tensor:
    """Return normal values of which no two in a row are neighbours in memory."""
    return normal(generator, columns, 2 * rows).detach().T[::2].requires_grad_()


def far(generator: Generator, rows: int, columns: int) -> Tensor:
    """Return values of which every row lies elsewhere, up to 1e4 from zero."""
    middle = torch.linspace(-1e4, 1e4, rows, dtype=torch.float64)
    return (normal(generator, rows, columns).detach() + middle[:, None]).requires_grad_()


def labels(generator: Generator, tokens: int, vocab_size: int) -> Tensor:
    """Return labels of which every seventh is ignored."""
    labels = torch.randint(0, vocab_size, (tokens,), generator=generator)
    labels[::7] = -100
    return labels
