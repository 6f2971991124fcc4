"""Bytes that one layer keeps for its backward pass, counted by running it on fake tensors.

The very layer that would train runs on tensors without data, in process groups without peers; what
autograd saves is added up. So the number follows the code: tensor and sequence parallelism,
grouped queries, gates, recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from mds_core.config import GPTConfig
from mds_core.groups import Layout, ProcessGroups
from mds_core.layers.attention import Context, Memory
from mds_core.models import GPT
from mds_core.models.block import Build, Stack
from mds_core.partition import Stage
from mds_train.config import TrainConfig
from mds_train.model_building import execution_of, parameter_dtype

__all__ = ["LayerCounter", "layer_bytes"]


class LayerCounter:
    """`layer_bytes` that counts each kind of layer once, whatever the micro batch is."""

    def __init__(self) -> None:
        self._counted: dict[tuple[object, ...], int] = {}

    def __call__(self, config: TrainConfig) -> int:
        """Bytes saved by one layer of one rank for one micro batch."""
        if config.parallel.in_a_ring:
            config = _without_the_ring(config)
        parallel, memory, train = config.parallel, config.memory, config.train
        key = (
            *(parallel.tp_size, parallel.sequence_parallel, parallel.ulysses_size),
            *(memory, train.precision, config.data.seq_length, config.model),
            config.data.decoder_seq_length,
        )
        if key not in self._counted:
            one = replace(config, train=replace(train, micro_batch_size=1))
            self._counted[key] = layer_bytes(one)
        return self._counted[key] * train.micro_batch_size


def _without_the_ring(config: TrainConfig) -> TrainConfig:
    """One of its ranks by itself: it keeps its own positions of all heads."""
    parallel, data = config.parallel, config.data
    return replace(
        config,
        parallel=replace(parallel, ulysses_size=1, sequence_sharing="ulysses"),
        data=replace(
            data,
            seq_length=data.seq_length // parallel.ulysses_size,
            curriculum_start_length=None,
            curriculum_steps=None,
        ),
    )


def layer_bytes(config: TrainConfig) -> int:
    """Bytes saved by one dense layer of one rank for one micro batch.

    Of a T5 it is a layer of the encoder with its share of the decoder's layers.

    Args:
        config: The run; its tensor parallel and Ulysses degrees, precision and recomputation count.

    Returns:
        Bytes of all tensors that autograd keeps, weights excepted.
    """
    parallel = config.parallel
    layout = Layout(tp_size=parallel.tp_size, ulysses_size=parallel.ulysses_size)
    if layout.world_size > 1 and dist.is_initialized():
        # torch has one default group, and a process that trains has a real one.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as elsewhere:
            return elsewhere.submit(layer_bytes, config).result()
    with _fake_groups(layout) as groups:
        if config.model.family == "gpt":
            return _saved_bytes(config, groups)
        encoder = _bytes_of_stack(config, groups, decoder=False)
        if config.model.family == "bert":
            return encoder
        model = config.model
        share = (model.decoder_num_layers or model.num_layers) / model.num_layers
        return encoder + round(share * _bytes_of_stack(config, groups, decoder=True))


@contextmanager
def _fake_groups(layout: Layout) -> Iterator[ProcessGroups]:
    if layout.world_size == 1:
        yield ProcessGroups.single()
        return
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=FakeStore())
    try:
        yield ProcessGroups.build(layout)
    finally:
        dist.destroy_process_group()


def _saved_bytes(config: TrainConfig, groups: ProcessGroups) -> int:
    model = GPT(
        _one_of_three_layers(config.model.core()),
        groups,
        stage=Stage(index=1, count=3, layers=range(1, 2)),
        dtype=parameter_dtype(config),
        device="meta",
        execution=execution_of(config),
    )
    return _kept_by(
        model,
        inputs=lambda: _inputs(config),
        run=lambda given: model.forward_stage(given[0], position_ids=given[1]),
    )


def _bytes_of_stack(config: TrainConfig, groups: ProcessGroups, *, decoder: bool) -> int:
    """What one layer keeps that sees both directions, or one that attends to such ones too."""
    core = replace(config.model.core(), hidden_dropout=0.0, attention_dropout=0.0)
    build = Build(core, groups, execution_of(config), parameter_dtype(config), "meta")
    stack = Stack(build, layers=range(1), final=False, decoder=decoder)
    queries = config.data.decoder_seq_length if decoder else None
    length = queries or config.data.seq_length

    def run(given: Sequence[Tensor]) -> object:
        hidden, seen, *memory = given
        context = Context(
            rotation=None,
            mask=None if decoder else seen,
            dropout=None,
            cache=None,
            rows=(range(hidden.size(1)),),
            memory=Memory(memory[0], seen) if memory else None,
        )
        return stack(hidden, context)

    return _kept_by(stack, inputs=lambda: _seen_inputs(config, length, decoder=decoder), run=run)


def _seen_inputs(config: TrainConfig, length: int, *, decoder: bool) -> tuple[Tensor, ...]:
    """A stream, what its queries see of the encoder's positions, and for a decoder the latter."""
    parallel, size = config.parallel, config.train.micro_batch_size
    share = parallel.tp_size if parallel.sequence_parallel else 1

    def stream(positions: int) -> Tensor:
        shape = (size, positions // share, config.model.hidden_size)
        return torch.zeros(shape, dtype=parameter_dtype(config), requires_grad=True)

    source = config.data.seq_length
    seen = torch.ones(size, 1, 1, source, dtype=torch.bool).expand(-1, 1, length, -1)
    return (stream(length), seen, *((stream(source),) if decoder else ()))


def _kept_by(
    model: nn.Module,
    *,
    inputs: Callable[[], Sequence[Tensor]],
    run: Callable[[Sequence[Tensor]], object],
) -> int:
    """Bytes that autograd keeps of a pass on fake tensors, but for what all layers share."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, tensor)
        return tensor

    with mode:
        model.to_empty(device="cpu")
        given = inputs()
    shared = {each.untyped_storage()._cdata for each in (*model.parameters(), *given[1:])}
    with mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run(given)
    del result
    return sum(
        tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in shared
    )


def _one_of_three_layers(model: GPTConfig) -> GPTConfig:
    """The same layer without what stands around it; experts are counted as a dense layer."""
    position = "none" if model.position_embedding == "learned" else model.position_embedding
    return replace(
        model,
        num_layers=3,
        position_embedding=position,
        num_experts=None,
        layer_experts=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _inputs(config: TrainConfig) -> tuple[Tensor, Tensor]:
    parallel = config.parallel
    own = config.data.seq_length // parallel.ulysses_size
    share = parallel.tp_size if parallel.sequence_parallel else 1
    hidden = torch.zeros(
        (config.train.micro_batch_size, own // share, config.model.hidden_size),
        dtype=parameter_dtype(config),
        requires_grad=True,
    )
    return hidden, torch.arange(config.data.seq_length)[None]
