"""The experts of a layer: many MLPs, each for the tokens that chose it, shared out over ranks.

Shapes: ``h`` hidden, ``f`` width of an expert, ``t`` tensor-parallel size, ``m`` rows, one for each
token and each expert that it chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mds_core.collectives import copy, exchange_rows
from mds_core.config import GPTConfig
from mds_core.groups import group_rank, group_size
from mds_core.init import scaled_std
from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from mds_core.layers.mlp import ACTIVATIONS
from mds_core.memory import again

__all__ = ["Expert", "Experts"]


class Expert(nn.Module):
    """One MLP, split over tensor-parallel ranks or whole on each.

    Args:
        config: Shape of the model.
        tp: Ranks that share it; None for one.
        partial_over: Ranks that hold it whole and give it other tokens.
        activate_again: Compute the activation again in the backward pass.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        tp: ProcessGroup | None,
        partial_over: ProcessGroup | None,
        activate_again: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.activation, self.gated = ACTIVATIONS[config.activation], config.gated
        self.tp, self.partial_over, self.activate_again = tp, partial_over, activate_again
        blocks = 2 if config.gated else 1
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            blocks * config.expert_width,
            tp=tp,
            bias=config.add_bias,
            std=config.init_std,
            blocks=blocks,
            dtype=dtype,
            device=device,
        )
        self.linear_fc2 = RowParallelLinear(
            config.expert_width,
            config.hidden_size,
            tp=tp,
            bias=config.add_bias,
            std=scaled_std(config.init_std, num_layers=config.num_layers),
            dtype=dtype,
            device=device,
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Map [m, h] to [m, h], of which each tensor-parallel rank gives a summand.

        Entering and leaving the split layers is the caller's: once for all experts.
        """
        wide = self._product(self.linear_fc1, rows, self.linear_fc1.bias)
        return again(self._narrow, wide, active=self.activate_again)

    def _narrow(self, wide: Tensor) -> Tensor:
        if self.gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = self.activation(gate) * up
        else:
            wide = self.activation(wide)
        if self.tp is None:
            return self._product(self.linear_fc2, wide, self.linear_fc2.bias)
        narrow = self._product(self.linear_fc2, wide, None)
        if self.linear_fc2.bias is None:
            return narrow
        # Added by one rank, before the sum; the others take part so that gradients agree.
        bias = copy(self.linear_fc2.bias, group=self.tp)
        return narrow + bias * float(group_rank(self.tp) == 0)

    def _product(
        self,
        linear: ColumnParallelLinear | RowParallelLinear,
        rows: Tensor,
        bias: nn.Parameter | None,
    ) -> Tensor:
        if self.partial_over is None:
            return linear.multiply(rows, linear.weight, bias)
        weight = copy(linear.weight, group=self.partial_over)
        own = None if bias is None else copy(bias, group=self.partial_over)
        return torch.nn.functional.linear(rows, weight, own)


class Experts(nn.Module):
    """This rank's experts, and the exchange that brings them the rows of all ranks.

    Args:
        config: Shape of the model.
        count: Experts of the layer over all ranks.
        tp: Ranks that share each expert; None for one.
        partial_over: Ranks that hold the experts whole and give them other tokens.
        ep: Ranks that share out the experts; None for one.
        activate_again: Compute the experts' activations again in the backward pass.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        count: int,
        tp: ProcessGroup | None,
        partial_over: ProcessGroup | None,
        ep: ProcessGroup | None,
        activate_again: bool,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.count, self.ep = count, ep
        share = count // group_size(ep)
        first = group_rank(ep) * share
        self.local_experts = nn.ModuleDict(
            {
                str(number): Expert(
                    config,
                    tp=tp,
                    partial_over=partial_over,
                    activate_again=activate_again,
                    dtype=dtype,
                    device=device,
                )
                for number in range(first, first + share)
            }
        )

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Send every row through its expert.

        Args:
            rows: [m, h].
            experts: [m] int64 numbers, rising.

        Returns:
            [m, h], of which each tensor-parallel rank gives a summand.
        """
        counts = torch.bincount(experts, minlength=self.count)
        if self.ep is None:
            return self._run(rows, counts.tolist())
        by_rank = counts.view(self.ep.size(), -1)  # [ranks, experts of each]
        arriving = torch.empty_like(by_rank)
        dist.all_to_all_single(arriving, by_rank.contiguous(), group=self.ep)
        given = cast("list[int]", by_rank.sum(1).tolist())
        taken = cast("list[int]", arriving.sum(1).tolist())
        received = exchange_rows(rows, group=self.ep, given=given, taken=taken)
        # Rows come by rank and then by expert; within an expert ranks keep their order.
        numbers = torch.arange(by_rank.size(1), device=rows.device).repeat(self.ep.size())
        order = numbers.repeat_interleave(arriving.flatten()).argsort(stable=True)
        results = self._run(received[order], arriving.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange_rows(results[back], group=self.ep, given=taken, taken=given)

    def _run(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Every expert runs, also without rows: its parameters then get a gradient of zero."""
        parts = torch.split(rows, list(counts))
        results = [
            expert(part) for expert, part in zip(self.local_experts.values(), parts, strict=True)
        ]
        return torch.cat(results)
