"""Attention in tiles against attention at once, and what a long sequence then costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import BLOOM, DROPPING, GPT2, LLAMA_GQA, QWEN3, Cell, build, refusal
from torch.utils._python_dispatch import TorchDispatchMode

from mds_core.config import Execution
from mds_core.groups import ProcessGroups
from mds_core.layers.attention import attention_mask, math_attention
from mds_core.layers.ring import ring_attention, zigzag
from mds_core.layers.tiles import Tiles, Visibility, tiles_of
from mds_core.rng import DropoutKey

SINGLE = ProcessGroups.single()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("size", [None, 1, 3, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_tiles_attend_as_one_piece_does(window, size, packed) -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 11, 8), (2, 2, 11, 8), (2, 2, 11, 8)]
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    cut = [x.detach().clone().requires_grad_() for x in whole]
    documents = torch.tensor([[0] * 4 + [1] * 7, [2] * 6 + [3] * 5]) if packed else None
    weights = torch.randn(2, 4, 11, 8, dtype=torch.float64)

    expected = math_attention(*whole, mask=attention_mask(11, window=window, documents=documents))
    tiles = Tiles(
        places=((range(11),),),
        own=0,
        size=size,
        visibility=Visibility(window=window, documents=documents),
    )
    actual = ring_attention(*cut, tiles, group=None)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()

    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [QWEN3, LLAMA_GQA, BLOOM], ids=["qwen3", "llama", "bloom"])
def test_a_chunked_model_has_the_gradients_of_a_whole_one(config) -> None:
    config = replace(config, **DROPPING)
    window = torch.randint(0, 96, (2, 17), generator=torch.Generator().manual_seed(0))
    key = DropoutKey(seed=1, samples=torch.arange(2))

    def gradients(execution):
        model = build(Cell(config=config, execution=execution), SINGLE)
        bounds = torch.tensor([0, 5, 16, 20, 32])
        result = model(window[:, :-1], window[:, 1:], dropout_key=key, cumulative_lengths=bounds)
        result.loss_sum.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    chunked = Execution(sequence_chunk=5, recompute="full", offload_activations=True)
    torch.testing.assert_close(gradients(chunked), gradients(Execution()), rtol=1e-9, atol=1e-12)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("kind", ["chunked", "whole"])
def test_no_tensor_of_a_chunked_model_grows_with_the_square_of_the_sequence(kind) -> None:
    config = replace(GPT2, position_embedding="rope", vocab_size=64, hidden_dropout=0.1)
    execution = Execution(
        sequence_chunk=8 if kind == "chunked" else None,
        attention_kernel="math" if kind == "whole" else "auto",
    )
    model = build(Cell(config=config, execution=execution, dtype=torch.float32), SINGLE)
    largest = {}
    for length in (128, 256):
        tokens = torch.zeros(1, length, dtype=torch.int64)
        with Largest() as seen:
            key = DropoutKey(seed=1, samples=torch.arange(1))
            model(tokens, tokens, dropout_key=key).loss_sum.backward()
        largest[length] = seen.elements

    growth = largest[256] / largest[128]
    assert growth <= 2.0 if kind == "chunked" else growth == 4.0


def test_every_rank_of_a_ring_sees_equally_many_pairs() -> None:
    places = zigzag(64, ranks=4)
    sizes = []
    for own in range(4):
        tiles = Tiles(places=places, own=own, size=None, visibility=Visibility())
        seen = [
            sum(column <= row for row in rows for column in columns)
            for place in range(4)
            for _, rows, _, columns in tiles.pairs(place)
        ]
        sizes.append(sum(seen))

    assert sizes == [64 * 65 // 2 // 4] * 4
    assert sorted(p for place in places for rows in place for p in rows) == list(range(64))


def test_tiles_cover_the_stretches_in_order() -> None:
    cut = list(tiles_of([range(5), range(20, 24)], size=3))

    assert [list(p) for _, p in cut] == [[0, 1, 2], [3, 4], [20, 21, 22], [23]]
    assert [at.stop - at.start for at, _ in cut] == [3, 2, 3, 1]
    assert [at.start for at, _ in cut] == [0, 3, 5, 8]


def test_tiles_that_a_window_hides_are_skipped() -> None:
    visibility = Visibility(window=4)

    assert visibility.sees_nothing(range(8, 12), range(5))
    assert not visibility.sees_nothing(range(8, 12), range(6))
    assert visibility.sees_nothing(range(4), range(4, 8))


def test_generation_works_for_a_model_of_tiles() -> None:
    plain = build(Cell(config=LLAMA_GQA), SINGLE).eval()
    execution = Execution(sequence_sharing="ring", sequence_chunk=4)
    model = build(Cell(config=LLAMA_GQA, execution=execution), SINGLE).eval()
    tokens = torch.randint(0, 96, (1, 7), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, max_length=8)

    first = model(tokens[:, :6], cache=cache)
    second = model(tokens[:, 6:], cache=cache)

    torch.testing.assert_close(torch.cat([first, second], 1), plain(tokens))


def test_what_tiles_cannot_do_is_refused() -> None:
    assert "cannot attend in tiles" in refusal(
        lambda: Execution(sequence_chunk=4, attention_kernel="fused")
    )
    assert "sequence_sharing ('star') is unknown" in refusal(
        lambda: Execution(sequence_sharing="star")
    )
    assert "sequence_chunk (0) must be at least 1" in refusal(lambda: Execution(sequence_chunk=0))
    assert "are for causal models, not for a T5" in refusal(
        lambda: Execution(sequence_chunk=4).check_short("T5")
    )
