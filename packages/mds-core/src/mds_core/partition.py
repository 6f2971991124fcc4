"""Which layers each pipeline stage holds. Pure arithmetic, no ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Self

from mds_core.bert_config import BertConfig
from mds_core.config import GPTConfig
from mds_core.t5_config import T5Config

__all__ = ["Stage", "balance", "balance_split", "parameter_costs", "stages_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One of the successive parts of a model; the first embeds, the last has the head."""

    index: int
    count: int
    layers: range
    """Global numbers of its layers."""

    @classmethod
    def whole(cls, num_layers: int) -> Self:
        """A model in one piece."""
        return cls(index=0, count=1, layers=range(num_layers))

    @property
    def first(self) -> bool:
        """Whether it takes the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it gives the loss."""
        return self.index == self.count - 1


def stages_of(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Stages with the given numbers of layers, in order.

    >>> [stage.layers for stage in stages_of([3, 2])]
    [range(0, 3), range(3, 5)]
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"stage sizes {list(sizes)}: every stage needs at least one layer.")
    bounds = [0, *accumulate(sizes)]
    return tuple(
        Stage(index=index, count=len(sizes), layers=range(start, stop))
        for index, (start, stop) in enumerate(pairwise(bounds))
    )


def balance(costs: Sequence[float], *, count: int) -> tuple[Stage, ...]:
    """Stages whose dearest is as cheap as possible, and the rest as even as that allows.

    Args:
        costs: Of each layer: ones, parameters, measured seconds. What the embedding costs is part
            of the first layer's, what the head costs part of the last's.
        count: Number of stages.
    """
    if not 1 <= count <= len(costs):
        raise ValueError(
            f"{len(costs)} layers do not make {count} stages of at least one layer; choose fewer "
            f"stages or more layers."
        )
    return _balanced(tuple(float(cost) for cost in costs), count)


@lru_cache(maxsize=64)  # whoever compares layouts asks for the same stages hundreds of times
def _balanced(costs: tuple[float, ...], count: int) -> tuple[Stage, ...]:
    sums = [0.0, *accumulate(costs)]
    limit = _cheapest(sums, count, limit=math.inf, power=math.inf)[0]
    # The tolerance lets sums that differ by rounding only count as equal.
    _, cuts = _cheapest(sums, count, limit=limit * (1 + 1e-9), power=2.0)
    return stages_of([stop - start for start, stop in pairwise(cuts)])


def balance_split(costs: Sequence[float], *, counts: tuple[int, int], at: int) -> tuple[Stage, ...]:
    """As `balance`, but no stage holds layers of both sides of a cut: a T5's two stacks.

    Args:
        costs: Of each layer.
        counts: Stages before the cut, and behind it.
        at: Number of the first layer behind the cut.
    """
    before = balance(costs[:at], count=counts[0])
    behind = balance(costs[at:], count=counts[1])
    return stages_of([len(stage.layers) for stage in (*before, *behind)])


def _cheapest(
    sums: Sequence[float], count: int, *, limit: float, power: float
) -> tuple[float, list[int]]:
    """Cut into ``count`` parts below ``limit`` with the least maximum, or sum of powers.

    Args:
        sums: Running sums of the costs, beginning with 0.
        count: Number of parts.
        limit: Most that one part may cost.
        power: Exponent of the summed costs; infinity compares the largest.

    Returns:
        The least value, and the cuts from 0 to the number of layers.
    """
    total = len(sums) - 1
    best: list[tuple[float, list[int]]] = [(0.0, [0])] + [(math.inf, [])] * total
    for part in range(1, count + 1):
        row: list[tuple[float, list[int]]] = [(math.inf, [])] * (total + 1)
        for stop in range(part, total + 1):
            for start in range(stop - 1, part - 2, -1):
                cost = sums[stop] - sums[start]
                if cost > limit or (math.isinf(power) and cost > row[stop][0]):
                    break  # parts that begin earlier cost more
                before = best[start][0]
                value = max(before, cost) if math.isinf(power) else before + cost**power
                if value <= row[stop][0] and not math.isinf(value):
                    row[stop] = (value, [*best[start][1], stop])
        best = row
    return best[total]


def parameter_costs(config: GPTConfig) -> tuple[float, ...]:
    """Parameters of each layer, those of embedding and head with the first and last layer.

    A T5's decoder follows its encoder, and its first layer counts what it embeds with.
    """
    costs = [float(config.num_layer_params(layer)) for layer in range(config.num_layers)]
    vocabulary = config.vocab_size * config.hidden_size
    norm = config.hidden_size * (1 if config.normalization == "rmsnorm" else 2)
    embedding = vocabulary + (norm if config.embedding_norm else 0)
    if config.position_embedding == "learned":
        embedding += config.max_position_embeddings * config.hidden_size
    costs[0] += embedding
    if isinstance(config, BertConfig):
        costs[0] += config.num_token_types * config.hidden_size
        costs[-1] += config.num_head_params()
    if isinstance(config, T5Config):
        costs[-1] += norm
        costs += [float(config.decoder_layer_params())] * config.decoder_layers
        costs[config.num_layers] += embedding
        costs[-1] += config.vocab_size
    costs[-1] += vocabulary + norm
    return tuple(costs)
