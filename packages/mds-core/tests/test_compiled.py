"""torch.compile takes the models without experts as one graph, dropout included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import CELLS, GPT2, Cell, batch, build, t5_loss

from mds_core.groups import ProcessGroups
from mds_core.models import T5
from mds_core.rng import DropoutKey


@pytest.mark.parametrize("name", ["gpt-dropout", "llama-gqa-sequence-parallel-selective", "t5"])
def test_a_step_is_one_graph(name) -> None:
    cell = replace(CELLS[name], dtype=torch.float32)
    model = build(cell, ProcessGroups.single())
    tokens, labels, mask = batch(cell.config, 0)

    def loss(tokens, labels, mask, samples):
        key = DropoutKey(seed=1, samples=samples)
        if isinstance(model, T5):
            return t5_loss(model, tokens, labels, mask=mask, key=key)
        return model(tokens, labels, loss_mask=mask, dropout_key=key).loss_sum

    inputs = (tokens, labels, mask.float(), torch.arange(3))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")

    for samples in (inputs[-1], inputs[-1] + 7):  # the next step's masks are not the first's
        given = (*inputs[:-1], samples)
        expected, actual = gradient(model, loss(*given)), gradient(model, compiled(*given))
        torch.testing.assert_close(actual, expected)


def gradient(model, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_a_compiled_model_refuses_a_padding_row_too() -> None:
    model = build(Cell(config=replace(GPT2, vocab_size=90)), ProcessGroups.single())
    compiled = torch.compile(model.embedding.word_embeddings, fullgraph=True, backend="aot_eager")
    assert model.embedding.word_embeddings.weight.size(0) > 90

    compiled(torch.tensor([[0, 89]]))
    with pytest.raises(RuntimeError, match="a token id is outside the vocabulary"):
        compiled(torch.tensor([[0, 90]]))
