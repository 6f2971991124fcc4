"""DeepSpeed's CPU Adam: vectorised AdamW in C++ for weights in the host's memory.

It is compiled by its first user and kept in torch's folder for extensions.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from mds_train.config import OptimizerConfig
from mds_train.exchange import gather_from_all

__all__ = ["cpu_adam_or_torch"]

logger = logging.getLogger(__name__)


def cpu_adam_or_torch(
    fallback: torch.optim.Optimizer, *, config: OptimizerConfig
) -> torch.optim.Optimizer:
    """DeepSpeed's CPU Adam over another optimizer's groups; that one where it cannot be compiled.

    Collective: all ranks take the same one.

    Args:
        fallback: Torch's AdamW over all parameters.
        config: Its settings.
    """
    built, why = _build(fallback.param_groups, config=config)
    complaints = [each for each in gather_from_all(why) if each]
    if built is None or complaints:
        logger.warning(
            "DeepSpeed's CPU Adam cannot be compiled here, so torch's AdamW takes the steps "
            '(optimizer.implementation = "torch" says so at once): %s',
            complaints[0],
        )
        return fallback
    return built


def _build(
    groups: list[dict[str, Any]], *, config: OptimizerConfig
) -> tuple[torch.optim.Optimizer | None, str]:
    own = [
        {key: group[key] for key in ("name", "kind", "expert", "names", "params", "weight_decay")}
        for group in groups
    ]
    try:
        # The class keeps one C++ object for all groups, whose settings each step overwrites.
        optimizer = DeepSpeedCPUAdam(
            own,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            adamw_mode=True,
        )
    except (RuntimeError, OSError) as error:
        return None, str(error.__cause__ or error).strip().splitlines()[0]
    return optimizer, ""
