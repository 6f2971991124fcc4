from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import T5_SHAPE, refusal
from torch.nn import functional as F

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.models import T5
from mds_core.partition import stages_of
from mds_core.rng import DropoutKey

SINGLE = ProcessGroups.single()


def build(config=T5_SHAPE) -> T5:
    """A model with values large enough that mistakes show."""
    model = T5(config, SINGLE, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
        model.output_layer.bias[: config.vocab_size].normal_()
    return model


def words(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(seed))


def test_the_losses_are_the_cross_entropies_of_the_logits() -> None:
    model, tokens, target, labels = build(), words(12), words(7, 1), words(7, 2)
    mask = torch.rand(2, 7, dtype=torch.float64)

    loss = model(tokens, target, labels, loss_mask=mask)

    logits = model(tokens, target)
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    assert logits.shape == (2, 7, 97)
    torch.testing.assert_close(loss.losses, losses.detach())
    torch.testing.assert_close(loss.loss_sum, (losses * mask).sum())


def test_a_later_decoder_token_changes_no_earlier_score() -> None:
    model, tokens, target = build(), words(12), words(7, 1)
    changed = target.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 97

    torch.testing.assert_close(model(tokens, changed)[:, :5], model(tokens, target)[:, :5])


def test_every_encoder_token_changes_every_score() -> None:
    model, tokens, target = build(), words(12), words(7, 1)
    changed = tokens.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 97

    difference = (model(changed, target) - model(tokens, target)).abs().amax(-1)
    assert (difference > 1e-6).all()


def test_padding_of_the_encoder_changes_no_score() -> None:
    model, tokens, target = build(), words(12), words(7, 1)
    padding_mask = torch.ones(2, 12, dtype=torch.bool)
    padding_mask[:, 9:] = False

    padded = model(tokens, target, padding_mask=padding_mask)

    torch.testing.assert_close(padded, model(tokens[:, :9], target))


def test_encoding_once_and_decoding_gives_the_hidden_states_of_a_forward_pass() -> None:
    model, tokens, target = build(), words(12), words(7, 1)

    hidden = model.decode(target, model.encode(tokens))

    table = model.embedding.word_embeddings.weight
    logits = F.linear(hidden, table, model.output_layer.bias)[..., :97]
    torch.testing.assert_close(logits, model(tokens, target))


def test_both_stacks_drop_differently() -> None:
    config = replace(T5_SHAPE, hidden_dropout=0.5, decoder_num_layers=2)
    model = T5(config, SINGLE, dtype=torch.float64)
    key, tokens = DropoutKey(seed=1, samples=torch.arange(2)), words(8)
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            for parameter in stack.layers.parameters():
                parameter.zero_()  # what is left is the embedding

    encoded = model.encode(tokens, dropout_key=key)
    decoded = model.decode(tokens, encoded, dropout_key=key)

    assert not torch.allclose(encoded, decoded)
    torch.testing.assert_close(model.eval().encode(tokens), model.decode(tokens, encoded))


@pytest.mark.parametrize(
    "config",
    [
        T5_SHAPE,
        replace(T5_SHAPE, num_key_value_heads=2, activation="geglu", embedding_norm=True),
        replace(T5_SHAPE, add_bias=False, normalization="rmsnorm", decoder_num_layers=3),
    ],
)
def test_the_parameter_count_is_that_of_the_built_model(config) -> None:
    shards = T5(config, SINGLE, device="meta").parameter_shards().values()

    assert config.num_params() == sum(torch.Size(shard.global_shape).numel() for shard in shards)


def test_the_operations_are_those_of_the_matrix_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(T5_SHAPE, vocab_size=96)
    model = T5(config, SINGLE, execution=Execution(attention_kernel="math")).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(words(12), words(8, 1))

    # The formula counts three passes and, of the decoder's own pairs, those that are seen.
    hidden_pairs = 8 * 8 - 8 * 9 // 2
    unseen = 2 * 2 * 2 * 32 * hidden_pairs
    forward = 2 * config.flops_per_sample(12, decoder_length=8) / 3
    assert counter.get_total_flops() == forward + unseen


def test_operations_per_token_are_not_defined() -> None:
    assert "Ask flops_per_sample for both lengths" in refusal(lambda: T5_SHAPE.flops_per_token(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"position_embedding": "rope"},
            r"position_embedding \('rope'\) must be 'learned' for a T5",
        ),
        ({"tie_embeddings": False}, r"tie_embeddings \(False\) must be True for a T5"),
        ({"num_experts": 4}, r"num_experts \(4\) must be None for a T5"),
        ({"decoder_num_layers": 0}, r"decoder_num_layers \(0\) must be at least 1"),
    ],
)
def test_what_a_t5_does_not_have_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(T5_SHAPE, **changes)


def test_an_axis_that_a_t5_cannot_split_over_is_refused() -> None:
    groups = ProcessGroups(layout=Layout(ulysses_size=2), rank=0)

    with pytest.raises(ValueError, match="ulysses_size is 2, but a T5 splits over tp_size"):
        T5(T5_SHAPE, groups)


def test_a_whole_model_on_stages_and_a_stage_without_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="T5 would build the whole model on each"):
        T5(T5_SHAPE, ProcessGroups(layout=Layout(pp_size=2), rank=0))
    first = stages_of([1, T5_SHAPE.stacked_layers - 1])[0]
    stage = T5(T5_SHAPE, ProcessGroups.single(), stage=first)
    with pytest.raises(ValueError, match="stage 0 of 2 has no head"):
        stage.loss(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="position 16 has no vector"):
        build()(words(17), words(4))


def test_a_record_of_a_t5_is_read_back() -> None:
    assert type(T5_SHAPE).from_record(T5_SHAPE.record()) == T5_SHAPE.resolved()
