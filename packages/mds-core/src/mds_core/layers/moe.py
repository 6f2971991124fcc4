"""A layer's mixture of experts: a router, the experts, and what stands beside them.

Shapes: ``b`` micro batch, ``s`` sequence (this rank's positions), ``h`` hidden, ``e`` experts of
the layer, ``k`` experts that a token chooses, ``n`` tokens, ``t`` tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.collectives import copy, gather, gather_partial, reduce, reduce_scatter, scatter
from mds_core.config import Execution, GPTConfig
from mds_core.expert_plan import capacity
from mds_core.groups import ProcessGroups
from mds_core.layers.experts import Experts
from mds_core.layers.mlp import MLP
from mds_core.layers.router_noise import NoisePlace, gumbel, jittered, lots
from mds_core.layers.routing import Choice, balance_loss, choose, places, weights_of, z_loss
from mds_core.parameter import Declaration, ParallelModule
from mds_core.rng import DropoutKey

__all__ = ["MoE", "Router"]

_SEQUENCE = 1  # dimension of the positions in [b, s, ...]
_NOWHERE = -1  # expert of a choice that got no place


class Router(ParallelModule):
    """Score every expert for every token, in fp32 at least.

    Args:
        config: Shape of the model.
        experts: Their number e.
        partial_over: Ranks that each score their own positions.
        dtype: Of the weight.
        device: Of the weight.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        experts: int,
        partial_over: ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.partial_over = partial_over
        declaration = Declaration(global_shape=(experts, config.hidden_size), std=config.init_std)
        self.weight = self.declare("weight", declaration, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, e]."""
        precision = torch.promote_types(x.dtype, torch.float32)
        weight = copy(self.weight, group=self.partial_over)
        # Rounding would change which expert is chosen, so autocast stays out.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(precision), weight.to(precision))


class Coefficient(ParallelModule):
    """Shares of the experts and of the MLP beside them, for each token (PR-MoE)."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        partial_over: ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.partial_over = partial_over
        weight = Declaration(global_shape=(2, config.hidden_size), std=config.init_std)
        self.weight = self.declare("weight", weight, dtype=dtype, device=device)
        bias = Declaration(global_shape=(2,))
        self.bias = self.declare("bias", bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, 2] shares that sum to 1."""
        weight = copy(self.weight, group=self.partial_over)
        return F.linear(x, weight, copy(self.bias, group=self.partial_over)).softmax(-1)


class MoE(nn.Module):
    """Send every token to the experts that its router chooses, and sum their weighted results.

    Without a capacity no token is dropped, and the result does not depend on the layout. With one,
    a rank's tokens compete for the places, so the result depends on how samples are shared out.

    Args:
        config: Shape of the model.
        experts: Experts of this layer.
        layer: Its global number, which keys what the router draws.
        groups: Ranks that share the model; experts are shared out over ``ep``.
        execution: How to compute; with sequence parallelism inputs and outputs hold this rank's
            positions only.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        experts: int,
        layer: int,
        groups: ProcessGroups,
        execution: Execution | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        config.check_expert_parallel(groups.ep_size)
        self.config, self.groups, self.layer = config, groups, layer
        self.sequence_parallel = execution.sequence_parallel and groups.tp is not None
        self.split_experts = execution.expert_tensor_parallel
        own_positions = groups.tp if self.sequence_parallel else None
        self.router = Router(
            config, experts=experts, partial_over=own_positions, dtype=dtype, device=device
        )
        self.experts = Experts(
            config,
            count=experts,
            tp=groups.tp if self.split_experts else None,
            partial_over=None if self.split_experts else groups.tp,
            ep=groups.ep,
            activate_again=execution.computes_again("activation"),
            dtype=dtype,
            device=device,
        )
        self.shared_experts = self.coefficient = None
        if config.shared_width:
            self.shared_experts = MLP(
                config,
                width=config.shared_width,
                tp=groups.tp,
                sequence_parallel=execution.sequence_parallel,
                activate_again=execution.computes_again("activation"),
                dtype=dtype,
                device=device,
            )
        if config.moe_residual:
            self.coefficient = Coefficient(
                config, partial_over=own_positions, dtype=dtype, device=device
            )

    def forward(
        self, x: Tensor, key: DropoutKey | None = None, rows: tuple[range, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Map [b, s, h] to [b, s, h] and what each sequence's routing costs, [b].

        Args:
            x: [b, s, h].
            key: Of the micro batch; needed in training where the router draws.
            rows: Stretches of the sequence that ``x`` holds, needed then too.
        """
        place = None
        if self.training and self.config.router_draws:
            assert key is not None, "the model passes the key that its router needs"
            place = NoisePlace(key, self.layer, rows)
        scores = self._scores(x, place)
        draws = place is not None and self.config.expert_drawn
        noise = gumbel(place, experts=scores.size(-1)) if draws and place is not None else None
        probabilities, choice = choose(scores, topk=self.config.moe_topk, noise=noise)
        kept = self._kept(choice, place)
        gates = weights_of(choice.gates, kept, normalize=self._normalize)
        experts = choice.experts if kept is None else choice.experts.masked_fill(~kept, _NOWHERE)
        routed = self._routed(x, Choice(experts, gates))
        if self.shared_experts is not None:
            routed = self._with_shared(x, routed)
        return routed, self._cost(scores, probabilities, choice)

    def _scores(self, x: Tensor, place: NoisePlace | None) -> Tensor:
        """The router's scores [b, s, e]."""
        if place is not None and self.config.moe_noise == "jitter":
            x = jittered(x.to(torch.promote_types(x.dtype, torch.float32)), place)
        return self.router(x)  # type: ignore[no-any-return]

    @property
    def _normalize(self) -> bool:
        wish = self.config.moe_normalize_gates
        return self.config.moe_topk > 1 if wish is None else wish

    @torch.no_grad()
    def _kept(self, choice: Choice, place: NoisePlace | None) -> Tensor | None:
        """Which choices [b, s, k] get a place; None if all do."""
        config = self.config
        factor = config.moe_capacity_factor if self.training else config.moe_eval_capacity_factor
        if factor is None:
            return None
        policy = config.moe_drop_policy
        if policy == "random":
            policy = "position" if place is None else "probability"
            if place is not None:  # the highest lot comes first
                drawn = lots(place, choice.experts, count=self.experts.count)
                choice = Choice(choice.experts, drawn)
        own_positions = self.groups.tp if self.sequence_parallel else None
        whole = Choice(*(gather(part, group=own_positions, dim=_SEQUENCE) for part in choice))
        size = capacity(
            whole.experts.size(0) * whole.experts.size(1),
            experts=self.experts.count,
            topk=config.moe_topk,
            factor=factor,
            least=config.moe_min_capacity,
        )
        kept = places(
            Choice(*(part.flatten(0, 1) for part in whole)),
            experts=self.experts.count,
            capacity=size,
            policy=policy,
        )
        return scatter(kept.view(whole.experts.shape), group=own_positions, dim=_SEQUENCE)

    def _routed(self, x: Tensor, choice: Choice) -> Tensor:
        """The experts' weighted results for this rank's positions [b, s, h]."""
        tp = self.groups.tp
        if not self.split_experts:
            # Sequence parallelism has shared out the tokens already.
            split = None if self.sequence_parallel else tp
            own = Choice(*(scatter(part, group=split, dim=_SEQUENCE) for part in choice))
            mixed = self._mixed(scatter(x, group=split, dim=_SEQUENCE), own)
            return gather(mixed, group=split, dim=_SEQUENCE)
        if self.sequence_parallel:
            # Each rank has a part of every expert, so what comes back for a token is a partial sum.
            x = gather_partial(x, group=tp, dim=_SEQUENCE)
            gates = gather_partial(choice.gates, group=tp, dim=_SEQUENCE)
            experts = gather(choice.experts, group=tp, dim=_SEQUENCE)
            return reduce_scatter(self._mixed(x, Choice(experts, gates)), group=tp, dim=_SEQUENCE)
        choice = Choice(choice.experts, copy(choice.gates, group=tp))
        return reduce(self._mixed(copy(x, group=tp), choice), group=tp)

    def _mixed(self, x: Tensor, choice: Choice) -> Tensor:
        """Sum each token's experts' results by weight; an expert below zero gives nothing."""
        tokens, topk = x.size(0) * x.size(1), choice.experts.size(-1)
        numbers = choice.experts.flatten()
        order = numbers.argsort(stable=True)
        if self.config.moe_capacity_factor or self.config.moe_eval_capacity_factor:
            order = order[int((numbers < 0).sum()) :]
        # Every row is written once, forward and backward, so that no sum depends on a race.
        copies = x.flatten(0, 1)[:, None].expand(-1, topk, -1).flatten(0, 1)
        results = self.experts(copies[order], numbers[order])
        placed = torch.zeros_like(copies, dtype=results.dtype).index_copy(0, order, results)
        weights = choice.gates.reshape(tokens, 1, topk).to(results.dtype)
        return (weights @ placed.view(tokens, topk, -1)).view_as(x)

    def _with_shared(self, x: Tensor, routed: Tensor) -> Tensor:
        assert self.shared_experts is not None
        beside: Tensor = self.shared_experts(x)
        if self.coefficient is None:
            return routed + beside
        shares: Tensor = self.coefficient(x)
        return routed * shares[..., :1] + beside * shares[..., 1:]

    def _cost(self, scores: Tensor, probabilities: Tensor, choice: Choice) -> Tensor:
        config = self.config
        shared_by = (self.groups.ulysses, self.groups.tp if self.sequence_parallel else None)
        cost = config.moe_loss_coeff * balance_loss(
            probabilities,
            choice.experts,
            scope=config.moe_balance_scope,
            choices=config.moe_balance_choices,
            shared_by=shared_by,
        )
        if config.moe_z_loss_coeff:
            cost = cost + config.moe_z_loss_coeff * z_loss(scores, shared_by=shared_by)
        return cost
