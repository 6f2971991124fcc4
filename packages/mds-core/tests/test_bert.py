from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import BERT
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.models import Bert
from mds_core.partition import stages_of

SINGLE = ProcessGroups.single()
POST_NORM = replace(BERT, residual_post_layernorm=True)


def build(config=BERT) -> Bert:
    """A model with values large enough that mistakes show."""
    model = Bert(config, SINGLE, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
        model.output_layer.bias[: config.vocab_size].normal_()
    return model


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(0, 96, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [BERT, POST_NORM], ids=["pre-norm", "post-norm"])
def test_the_losses_are_the_cross_entropies_of_the_logits(config) -> None:
    model, words, labels = build(config), tokens(), tokens().flip(1)
    mask, binary_labels = torch.rand(2, 12, dtype=torch.float64), torch.tensor([1, 0])

    loss = model(words, labels, loss_mask=mask, binary_labels=binary_labels)

    logits = model(words)
    losses = F.cross_entropy(logits.words.mT, labels, reduction="none")
    assert logits.words.shape == (2, 12, config.vocab_size)
    torch.testing.assert_close(loss.losses, losses.detach())
    torch.testing.assert_close(loss.loss_sum, (losses * mask).sum())
    binary = F.cross_entropy(logits.binary, binary_labels, reduction="sum")
    torch.testing.assert_close(loss.binary_sum, binary)


def test_the_pooled_vector_is_what_the_binary_head_reads() -> None:
    model, words, types = build(), tokens(), tokens() % 2
    seen = torch.ones(2, 12, dtype=torch.bool).index_fill(1, torch.tensor([10, 11]), value=False)

    pooled = model.pooled(words, token_types=types, padding_mask=seen)

    logits = model(words, token_types=types, padding_mask=seen)
    torch.testing.assert_close(model.binary_head(pooled), logits.binary)
    with pytest.raises(ValueError, match="has no pooler"):
        build(replace(BERT, binary_head=False)).pooled(words)


def test_a_later_token_changes_earlier_scores() -> None:
    model, words = build(), tokens()
    changed = words.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 96

    assert not torch.allclose(model(words).words[:, 0], model(changed).words[:, 0])


def test_padding_changes_no_score_of_a_token() -> None:
    model, words = build(), tokens()
    padding_mask = torch.ones(2, 12, dtype=torch.bool)
    padding_mask[:, 9:] = False

    padded, short = model(words, padding_mask=padding_mask), model(words[:, :9])

    torch.testing.assert_close(padded.words[:, :9], short.words)
    torch.testing.assert_close(padded.binary, short.binary)


def test_the_type_of_a_token_matters() -> None:
    model, words = build(), tokens()

    second = model(words, token_types=torch.ones_like(words))

    assert not torch.allclose(model(words).words, second.words)


@pytest.mark.parametrize("config", [BERT, replace(BERT, binary_head=False, num_token_types=3)])
def test_the_parameter_count_is_that_of_the_built_model(config) -> None:
    shards = Bert(config, SINGLE, device="meta").parameter_shards().values()

    assert config.num_params() == sum(torch.Size(shard.global_shape).numel() for shard in shards)


def test_without_the_binary_head_there_is_no_binary_score() -> None:
    model = build(replace(BERT, binary_head=False))

    assert model(tokens()).binary is None
    assert model(tokens(), tokens(), binary_labels=torch.tensor([0, 1])).binary_sum is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding": "rope"}, r"position_embedding \('rope'\) must be 'learned'"),
        ({"tie_embeddings": False}, r"tie_embeddings \(False\) must be True for a BERT"),
        ({"sliding_window": 4}, r"sliding_window \(4\) must be None for a BERT"),
        ({"num_experts": 4}, r"num_experts \(4\) must be None for a BERT"),
        ({"num_token_types": 0}, r"num_token_types \(0\) must be at least 1"),
    ],
)
def test_what_a_bert_does_not_have_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BERT, **changes)


def test_an_axis_that_a_bert_cannot_split_over_is_refused() -> None:
    groups = ProcessGroups(layout=Layout(ulysses_size=2), rank=0)

    with pytest.raises(ValueError, match="ulysses_size is 2, but a BERT splits over tp_size"):
        Bert(BERT, groups)


def test_a_whole_model_on_stages_and_a_stage_without_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="Bert would build the whole model on each"):
        Bert(BERT, ProcessGroups(layout=Layout(pp_size=2), rank=0))
    first = stages_of([1, BERT.stacked_layers - 1])[0]
    stage = Bert(BERT, ProcessGroups.single(), stage=first)
    with pytest.raises(ValueError, match="stage 0 of 2 has no head"):
        stage.loss(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="position 16 has no vector"):
        build()(tokens(length=17))


def test_flops_are_those_of_the_matrix_products_that_run() -> None:
    model = Bert(BERT, SINGLE, execution=Execution(attention_kernel="math"))

    with FlopCounterMode(display=False) as counter:
        model(tokens()[:1])

    # 2 operations a multiplication; the padded rows of the vocabulary do not count.
    surplus = 2 * 12 * BERT.hidden_size * (BERT.padded_vocab_size() - BERT.vocab_size)
    assert BERT.flops_per_token(12) * 12 == 3 * (counter.get_total_flops() - surplus)
