"""Low-rank adapters compute what a model with B A added to its weights computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import GPT2, LLAMA_GQA, MIXTRAL, adapt, batch, trained

from mds_core.config import Execution
from mds_core.config.adapters import ADAPTED, AdapterConfig
from mds_core.groups import ProcessGroups
from mds_core.models import GPT, add_adapters
from mds_core.rng import DropoutKey

CONFIG = AdapterConfig(rank=3, alpha=6.0)


def model_of(config, **options) -> GPT:
    return GPT(config, ProcessGroups.single(), seed=7, dtype=torch.float64, **options)


@pytest.mark.parametrize("config", [GPT2, LLAMA_GQA], ids=["gpt2", "llama"])
def test_adapters_add_their_product_to_the_weights(config) -> None:
    model, plain = model_of(config), model_of(config)
    tokens, _, _ = batch(config, 0)

    adapt(model, CONFIG)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            place = name.removesuffix(".weight")
            if place.rpartition(".")[2] in ADAPTED and name.endswith(".weight"):
                b = model.get_parameter(f"{place}.adapter.linear_out.weight")
                weight.add_(2.0 * b @ model.get_parameter(f"{place}.adapter.linear_in.weight"))

    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-12, atol=1e-12)


def test_at_first_they_change_nothing_and_they_alone_are_trained() -> None:
    model, plain = model_of(GPT2), model_of(GPT2)
    tokens, labels, _ = batch(GPT2, 0)

    add_adapters(model, CONFIG)
    loss = model(tokens, labels).loss_sum
    loss.backward()

    assert torch.equal(loss, plain(tokens, labels).loss_sum)
    assert set(trained(model)) == {
        f"decoder.layers.{layer}.{part}.adapter.{factor}.weight"
        for layer in range(2)
        for part in (
            *("self_attention.linear_qkv", "self_attention.linear_proj"),
            *("mlp.linear_fc1", "mlp.linear_fc2"),
        )
        for factor in ("linear_in", "linear_out")
    }
    assert all(each.grad is None for each in model.parameters() if not each.requires_grad)


def test_dropout_needs_a_key_and_ends_with_evaluation() -> None:
    model = model_of(replace(GPT2, hidden_dropout=0.0))
    adapt(model, replace(CONFIG, dropout=0.5))
    tokens, _, _ = batch(GPT2, 0)
    key = DropoutKey(seed=1, samples=torch.arange(3))

    dropped = model(tokens, dropout_key=key)
    with pytest.raises(ValueError, match="needs a dropout_key"):
        model(tokens)
    model.eval()

    assert not torch.allclose(dropped, model(tokens))


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(ValueError, match="experts have no adapters"):
        add_adapters(model_of(MIXTRAL), CONFIG)
    with pytest.raises(ValueError, match="set dropout 0"):
        add_adapters(
            model_of(GPT2, execution=Execution(sequence_chunk=4)), replace(CONFIG, dropout=0.1)
        )
    with pytest.raises(ValueError, match="choose among these, not q_proj"):
        AdapterConfig(rank=1, alpha=1.0, targets=("q_proj",))
    with pytest.raises(ValueError, match="rank 0"):
        AdapterConfig(rank=0, alpha=1.0)


def test_experts_leave_attention_to_be_adapted() -> None:
    model = model_of(MIXTRAL)

    add_adapters(model, replace(CONFIG, targets=("linear_qkv", "linear_proj")))

    assert {name.split(".")[3] for name in trained(model)} == {"self_attention"}
