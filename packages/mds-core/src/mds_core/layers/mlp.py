"""The feed-forward half of a layer, plain or gated, split over tensor-parallel ranks.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden, ``f`` MLP width, ``t`` tensor-parallel
size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.config import GPTConfig
from mds_core.init import scaled_std
from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from mds_core.layers.lora import AdapterDropout
from mds_core.memory import again

__all__ = ["ACTIVATIONS", "MLP"]


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "relu2": _relu_squared,
        "silu": F.silu,
        "swiglu": F.silu,
        "geglu": F.gelu,
        "geglu_tanh": partial(F.gelu, approximate="tanh"),
    }
)


class MLP(nn.Module):
    """Widen, activate, narrow. A gated one multiplies the activated gate with the up projection.

    Args:
        config: Shape of the model.
        width: Between the two projections; the configuration's if None.
        tp: Ranks that share the layer; None for one.
        sequence_parallel: Inputs and outputs hold this rank's positions only.
        activate_again: Compute the activation again in the backward pass.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        width: int | None = None,
        tp: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        activate_again: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        width = width or config.ffn_width
        self.activation = ACTIVATIONS[config.activation]
        self.gated, self.activate_again = config.gated, activate_again
        blocks = 2 if config.gated else 1
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            blocks * width,
            tp=tp,
            bias=config.add_bias,
            std=config.init_std,
            blocks=blocks,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            tp=tp,
            bias=config.add_bias,
            std=scaled_std(config.init_std, num_layers=config.num_layers),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, dropping: AdapterDropout | None = None) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism s is s / t outside."""
        return self.narrow(self.linear_fc1(x, dropping), dropping)

    def narrow(self, wide: Tensor, dropping: AdapterDropout | None = None) -> Tensor:
        """Go on from the first projection, [b, s, f / t], or [b, s, 2 f / t]: gate and up."""
        return again(self._narrow, wide, dropping, active=self.activate_again)

    def _narrow(self, wide: Tensor, dropping: AdapterDropout | None) -> Tensor:
        if not self.gated:
            return self.linear_fc2(self.activation(wide), dropping)  # type: ignore[no-any-return]
        gate, up = wide.chunk(2, dim=-1)
        return self.linear_fc2(self.activation(gate) * up, dropping)  # type: ignore[no-any-return]
