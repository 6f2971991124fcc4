from __future__ import annotations

import pytest
import torch
from torch import nn

from mds_train.optimizers.lion import Lion


def by_the_paper(
    weight: torch.Tensor, gradients: list[torch.Tensor], *, lr: float, decay: float
) -> torch.Tensor:
    """Algorithm 2 of the paper, one step a gradient, betas 0.9 and 0.95."""
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        direction = (0.9 * mean + 0.1 * gradient).sign()
        weight = weight - lr * (direction + decay * weight)
        mean = 0.95 * mean + 0.05 * gradient
    return weight


def test_steps_are_those_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    gradients = [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(5)]
    parameter = nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)

    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()

    expected = by_the_paper(start, gradients, lr=0.01, decay=0.1)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=0)
    assert list(optimizer.state[parameter]) == ["exp_avg"]


def test_a_parameter_without_a_gradient_stays() -> None:
    still, moving = (nn.Parameter(torch.ones(2)) for _ in range(2))
    moving.grad = torch.tensor([1.0, -1.0])

    Lion([still, moving], lr=0.1).step()

    assert still.tolist() == [1.0, 1.0]
    assert moving.tolist() == pytest.approx([0.9, 1.1])


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        Lion([nn.Parameter(torch.ones(1))], lr=0.1).step(lambda: 0.0)
