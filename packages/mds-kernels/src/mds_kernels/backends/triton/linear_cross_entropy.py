"""The chunked driver with Triton's arithmetic between the matrix products."""

from torch import Tensor

from mds_kernels.backends.torch import linear_cross_entropy as driver
from mds_kernels.objective import Objective


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor | None,
    *,
    objective: Objective,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses, and [n] the losses, detached."""
    return driver.linear_cross_entropy(
        hidden,
        weight,
        labels,
        loss_weights,
        objective=objective,
        recompute=recompute,
        arithmetic="triton",
    )
