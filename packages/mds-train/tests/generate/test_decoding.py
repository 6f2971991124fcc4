from __future__ import annotations

import pytest
import torch

from mds_core import GPTConfig, ProcessGroups
from mds_core.models import GPT
from mds_train.generate import Sampling, generate


@pytest.fixture(scope="module", params=["learned", "rope"])
def model(request: pytest.FixtureRequest) -> GPT:
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        max_position_embeddings=32,
        position_embedding=request.param,
        init_std=0.3,
    )
    return GPT(config, ProcessGroups.single()).eval()


@torch.no_grad()
def naive(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Compute everything anew for each token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_cache_changes_nothing_also_in_a_batch_of_unequal_prompts(model: GPT) -> None:
    prompts = [[5, 9, 2, 40, 17], [3], [8, 8, 60]]

    answers = generate(model, prompts, max_new_tokens=7)

    assert answers == [naive(model, prompt, 7) for prompt in prompts]


def test_a_sequence_ends_at_the_end_token(model: GPT) -> None:
    prompts = [[5, 9, 2], [3]]
    whole = generate(model, prompts, max_new_tokens=8)
    end = whole[0][2]

    answers = generate(model, prompts, max_new_tokens=8, end_token=end)

    for answer, full in zip(answers, whole, strict=True):
        expected = full[: full.index(end)] if end in full else full
        assert answer == expected


def test_a_seed_repeats_a_sampled_answer(model: GPT) -> None:
    def sampled(seed: int) -> list[list[int]]:
        sampling = Sampling(temperature=1.0, top_k=20)
        return generate(model, [[1, 2], [3]], max_new_tokens=10, sampling=sampling, seed=seed)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_no_new_tokens_are_no_work(model: GPT) -> None:
    assert generate(model, [[1], [2, 3]], max_new_tokens=0) == [[], []]


def test_wrong_requests_are_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="A prompt has no token"):
        generate(model, [[1], []], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"max_new_tokens \(-1\)"):
        generate(model, [[1]], max_new_tokens=-1)
    if model.config.position_embedding == "learned":
        with pytest.raises(ValueError, match="need 35 positions, but the model has 32"):
            generate(model, [[1] * 5], max_new_tokens=30)
