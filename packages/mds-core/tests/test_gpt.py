from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from core_cells import BLOOM, GPT2, LLAMA_GQA, NEOX, QWEN3
from torch.nn import functional as F

from mds_core.config import Execution
from mds_core.groups import ProcessGroups
from mds_core.models import GPT, no_weight_decay
from mds_core.rng import DropoutKey
from mds_core.sharding import cut

SINGLE = ProcessGroups.single()
CONFIGS = {"gpt": GPT2, "llama-gqa": LLAMA_GQA, "qwen3": QWEN3, "neox": NEOX, "bloom": BLOOM}


def build(config, **options) -> GPT:
    """A model with values large enough that mistakes show."""
    model = GPT(config, SINGLE, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 96, (rows, length), generator=generator)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_loss_is_the_masked_cross_entropy_of_the_logits(config) -> None:
    model, window = build(config), tokens(length=13)
    inputs, labels = window[:, :-1], window[:, 1:]
    mask = torch.rand(2, 12, dtype=torch.float64)

    loss = model(inputs, labels, loss_mask=mask)

    logits = model(inputs)
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    assert logits.shape == (2, 12, config.vocab_size)
    torch.testing.assert_close(loss.losses, losses.detach())
    torch.testing.assert_close(loss.loss_sum, (losses * mask).sum())
    assert not loss.losses.requires_grad
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss.loss_sum, parameters),
        torch.autograd.grad((losses * mask).sum(), parameters),
    )


def test_padding_rows_change_nothing_and_are_never_trained() -> None:
    losses = []
    for divisible in (1, 64):
        config = replace(LLAMA_GQA, make_vocab_size_divisible_by=divisible)
        model, window = build(config), tokens(length=13)
        loss = model(window[:, :-1], window[:, 1:]).loss_sum
        loss.backward()
        losses.append(loss.item())
        rows = model.output_layer.weight.size(0)
        assert rows == config.padded_vocab_size()
        assert not model.output_layer.weight.grad[config.vocab_size :].any()
        assert not model.embedding.word_embeddings.weight.grad[config.vocab_size :].any()

    assert losses[0] == pytest.approx(losses[1], rel=1e-14)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_generating_with_a_cache_gives_the_logits_of_the_whole_sequence(config) -> None:
    model, window = build(config).eval(), tokens()
    cache = model.new_cache(2, max_length=12)

    with torch.no_grad():
        parts = [model(part, cache=cache) for part in window.split([5, 1, 1, 3, 2], dim=1)]

    torch.testing.assert_close(torch.cat(parts, dim=1), model(window))
    assert cache.length == 12


def test_a_reordered_cache_continues_the_other_rows() -> None:
    model, window = build(GPT2).eval(), tokens()
    cache = model.new_cache(2, max_length=12)

    with torch.no_grad():
        model(window[:, :11], cache=cache)
        cache.reorder(torch.tensor([1, 0]))
        last = model(window[:, 11:].flip(0), cache=cache)

    torch.testing.assert_close(last.flip(0), model(window)[:, 11:])


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), replace(GPT2, sliding_window=3)], ids=[*CONFIGS, "window"]
)
@torch.no_grad()
def test_sequences_of_different_lengths_come_and_go_in_slots(config) -> None:
    model, window = build(config).eval(), tokens(rows=3)
    slots = model.new_slots(3, max_length=12)
    whole = model(window)

    early = model(window[:1, :4], cache=slots.rows(0, 1))  # the first alone
    model(window[1:2, :7], cache=slots.rows(1, 1))  # the second joins it, longer
    both = model(torch.stack([window[0, 4:6], window[1, 7:9]]), cache=slots.rows(0, 2))
    slots.copy(1, 0)  # the first ends, the second takes its place
    slots.clear(1)
    model(window[2:, :2], cache=slots.rows(1, 1))  # the third joins
    last = model(torch.stack([window[1, 9:10], window[2, 2:3]]), cache=slots.rows(0, 2))

    torch.testing.assert_close(early, whole[:1, :4])
    torch.testing.assert_close(both, torch.stack([whole[0, 4:6], whole[1, 7:9]]))
    torch.testing.assert_close(last, torch.stack([whole[1, 9:10], whole[2, 2:3]]))
    assert slots.lengths == [10, 3, 0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_documents_do_not_see_each_other(config) -> None:
    model, window = build(config).eval(), tokens(rows=2, length=8)
    bounds = torch.tensor([0, 3, 8, 13, 16])  # rows hold documents of 3 + 5 and 5 + 3 tokens
    position_ids = torch.tensor([[*range(3), *range(5)], [*range(5), *range(3)]])

    packed = model(window, cumulative_lengths=bounds, position_ids=position_ids)

    alone = [
        model(part[None])
        for row, at in zip(window, (3, 5), strict=True)
        for part in (row[:at], row[at:])
    ]
    torch.testing.assert_close(packed.flatten(0, 1), torch.cat([x[0] for x in alone]))


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, window = build(LLAMA_GQA).eval(), tokens()
    changed = window.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 96

    before, after = model(window), model(changed)

    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_window_hides_what_lies_before_it() -> None:
    config = replace(LLAMA_GQA, num_layers=1, sliding_window=3)
    model, window = build(config).eval(), tokens()
    changed = window.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 96

    torch.testing.assert_close(model(window)[:, 3:], model(changed)[:, 3:])


def test_names_and_shapes_are_those_of_the_checkpoint_format() -> None:
    shards = GPT(QWEN3, SINGLE, device="meta").parameter_shards()

    shapes = {name: shard.global_shape for name, shard in shards.items()}
    layer = "decoder.layers.1"
    assert shapes["embedding.word_embeddings.weight"] == (97, 32)
    assert shapes[f"{layer}.self_attention.linear_qkv.weight"] == (96, 32)
    assert shapes[f"{layer}.self_attention.linear_qkv.bias"] == (96,)
    assert shapes[f"{layer}.self_attention.q_layernorm.weight"] == (12,)
    assert shapes[f"{layer}.self_attention.linear_proj.weight"] == (32, 48)
    assert shapes[f"{layer}.mlp.linear_fc1.weight"] == (96, 32)
    assert shapes[f"{layer}.mlp.linear_fc2.weight"] == (32, 48)
    assert shapes[f"{layer}.input_layernorm.weight"] == (32,)
    assert shapes[f"{layer}.pre_mlp_layernorm.weight"] == (32,)
    assert shapes["decoder.final_layernorm.weight"] == (32,)
    assert len(shapes) == 2 + 2 * 9
    assert "output_layer.weight" in GPT(LLAMA_GQA, SINGLE, device="meta").parameter_shards()


def test_shards_describe_the_parameters_they_name() -> None:
    model = build(LLAMA_GQA)
    shards = model.parameter_shards()

    for name, parameter in model.named_parameters():
        shard = shards[name]
        assert shard.local_shape == tuple(parameter.shape)
        true = parameter.detach()[tuple(slice(extent) for extent in shard.global_shape)]
        assert torch.equal(cut(shard, true), parameter.detach())


def test_a_meta_model_becomes_the_real_one() -> None:
    real = GPT(LLAMA_GQA, SINGLE, seed=3)

    model = GPT(LLAMA_GQA, SINGLE, seed=3, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.reset_parameters()

    for (name, expected), (_, actual) in zip(
        real.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(actual, expected), name


def test_a_model_of_175_billion_parameters_is_described_without_memory() -> None:
    config = replace(
        GPT2, num_layers=96, hidden_size=12288, num_attention_heads=96, vocab_size=50257
    )

    model = GPT(config, SINGLE, device="meta")

    assert sum(parameter.numel() for parameter in model.parameters()) > 174e9


def test_first_values_have_megatrons_standard_deviations() -> None:
    model = GPT(replace(GPT2, num_layers=8, hidden_size=128, num_attention_heads=4), SINGLE)
    layer = "decoder.layers.7"
    parameters = dict(model.named_parameters())

    def std(name):
        return parameters[name].std().item()

    assert std("embedding.word_embeddings.weight") == pytest.approx(0.02, rel=0.05)
    assert std(f"{layer}.self_attention.linear_qkv.weight") == pytest.approx(0.02, rel=0.05)
    assert std(f"{layer}.self_attention.linear_proj.weight") == pytest.approx(0.005, rel=0.05)
    assert std(f"{layer}.mlp.linear_fc2.weight") == pytest.approx(0.005, rel=0.05)
    assert torch.equal(parameters[f"{layer}.input_layernorm.weight"], torch.ones(128))
    assert not parameters[f"{layer}.mlp.linear_fc1.bias"].any()


@pytest.mark.parametrize(
    "execution",
    [
        Execution(recompute="full"),
        Execution(recompute="full", recompute_layers=2),
        Execution(recompute="selective"),
        Execution(attention_kernel="math"),
    ],
)
def test_the_way_to_compute_changes_no_gradient(execution) -> None:
    config = replace(QWEN3, num_layers=3, hidden_dropout=0.3)
    if execution.attention_kernel != "math":
        config = replace(config, attention_dropout=0.2)
    window, key = tokens(length=13), DropoutKey(seed=1, samples=torch.arange(2))

    def gradients(chosen):
        model = build(config, execution=chosen)
        model(window[:, :-1], window[:, 1:], dropout_key=key).loss_sum.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.testing.assert_close(gradients(execution), gradients(Execution()), rtol=1e-9, atol=1e-12)


def test_full_recomputation_keeps_less_for_the_backward_pass() -> None:
    def kept(execution):
        model, sizes = build(replace(GPT2, num_layers=4), execution=execution), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            model(tokens(length=16), tokens(length=16))
        return sum(sizes)

    full, selective, plain = (
        kept(Execution(recompute=kind, attention_kernel="math"))
        for kind in ("full", "selective", "none")
    )
    assert full < selective < plain


def test_dropout_acts_in_training_only_and_needs_its_key() -> None:
    config = replace(GPT2, hidden_dropout=0.5)
    model, plain = build(config), build(GPT2)
    key = DropoutKey(seed=1, samples=torch.arange(2))

    assert torch.equal(model.eval()(tokens()), plain.eval()(tokens()))
    dropped = model.train()(tokens(), dropout_key=key)
    assert torch.equal(dropped, model(tokens(), dropout_key=key))
    assert not torch.allclose(dropped, plain(tokens()))
    with pytest.raises(ValueError, match="forward needs a dropout_key"):
        model(tokens())


def test_positions_beyond_the_learned_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="max_position_embeddings is 16"):
        build(GPT2)(tokens(length=17))


def test_bfloat16_stays_close_to_float32() -> None:
    model = GPT(LLAMA_GQA, SINGLE)
    half = GPT(LLAMA_GQA, SINGLE, dtype=torch.bfloat16)
    window = tokens(length=13)

    expected = model(window[:, :-1], window[:, 1:]).loss_sum
    loss = half(window[:, :-1], window[:, 1:]).loss_sum
    loss.backward()

    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    assert half(window).dtype == torch.bfloat16


def test_biases_and_norms_are_not_decayed() -> None:
    model = GPT(replace(GPT2, qk_norm=True), SINGLE, device="meta")

    free = {name for name, p in model.named_parameters() if no_weight_decay(name, p.shape)}

    assert all("norm" in name or name.endswith("bias") for name in free)
    assert len(free) == len([n for n, p in model.named_parameters() if p.dim() == 1])
