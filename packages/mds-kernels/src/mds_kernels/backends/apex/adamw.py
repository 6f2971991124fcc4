"""AdamW of NVIDIA apex: one launch for all parameters."""

from collections.abc import Iterable, Mapping
from importlib import import_module

from torch import Tensor
from torch.optim import Optimizer

from mds_kernels.apex_state import why_not_apex

_EXTENSION = "amp_C"


def why_not(_device: str, _environment: Mapping[str, str]) -> str | None:
    """Return why apex's optimizers can't be used on this machine, or None."""
    return why_not_apex(_EXTENSION)


def adamw(
    parameters: Iterable[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Optimizer:
    """Return an optimizer whose weight decay is decoupled."""
    module = import_module("apex.optimizers")
    optimizer: Optimizer = module.FusedAdam(
        list(parameters),
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        adam_w_mode=True,
    )
    return optimizer
