from __future__ import annotations

import pytest
import torch

from mds_core import GPTConfig, ProcessGroups
from mds_core.models import GPT
from mds_train.generate import ContinuousBatch, Request, Sampling, generate


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


def test_a_sequence_that_joins_later_gets_tokens_before_the_others_end(model: GPT) -> None:
    batch = ContinuousBatch(model, slots=2, max_length=32)
    long = batch.add(Request(prompt=(5, 9, 2), max_new_tokens=12))
    for _ in range(4):
        batch.step()
    short = batch.add(Request(prompt=(3, 4, 4, 1), max_new_tokens=3))

    order = []
    while batch.active or batch.waiting:
        batch.step()
        order += [run for run in (long, short) if run.finish_reason and run not in order]

    assert order == [short, long]
    assert long.answer == naive(model, [5, 9, 2], 12)
    assert short.answer == naive(model, [3, 4, 4, 1], 3)


def test_who_else_is_in_the_batch_changes_nothing_that_is_drawn(model: GPT) -> None:
    sampling = Sampling(temperature=1.2, top_k=30)
    requests = [
        Request(prompt=(n, 7, 2 * n), max_new_tokens=2 + 3 * n, sampling=sampling, seed=n)
        for n in range(1, 6)
    ]

    def answers(slots: int) -> list[list[int]]:
        batch = ContinuousBatch(model, slots=slots, max_length=32)
        runs = [batch.add(request) for request in requests]
        while batch.active or batch.waiting:
            batch.step()
        return [run.answer for run in runs]

    assert answers(1) == answers(2) == answers(5)


def test_samples_of_one_prompt_share_the_work_on_it(
    model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    forward = GPT.forward_stage

    def counted(self: GPT, x: torch.Tensor, **options: object) -> torch.Tensor:
        computed.append(x.numel())
        return forward(self, x, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(GPT, "forward_stage", counted)
    batch = ContinuousBatch(model, slots=4, max_length=32)
    sampling = Sampling(temperature=1.0)
    runs = [
        batch.add(Request(prompt=(1,) * 9, max_new_tokens=2, sampling=sampling, seed=seed))
        for seed in range(3)
    ]
    batch.step()
    batch.step()

    assert computed == [9, 3]
    assert all(run.finish_reason == "length" for run in runs)


def test_prompts_of_one_length_are_read_together_but_not_mixed_up(model: GPT) -> None:
    prompts = [[5, 9], [7, 1], [5, 9], [3, 3, 3], [5, 9], [5, 9]]

    answers = generate(model, prompts, max_new_tokens=5)

    assert answers == [naive(model, prompt, 5) for prompt in prompts]


def test_a_cancelled_sequence_leaves_its_slot_to_the_next(model: GPT) -> None:
    batch = ContinuousBatch(model, slots=2, max_length=32)
    runs = [batch.add(Request(prompt=(n, 8), max_new_tokens=9)) for n in range(4)]
    batch.step()
    batch.step()

    batch.end(runs[0], "cancelled")
    batch.end(runs[2], "cancelled")  # it has not begun
    while batch.active or batch.waiting:
        batch.step()

    assert [run.finish_reason for run in runs] == ["cancelled", "length", "cancelled", "length"]
    assert runs[1].answer == naive(model, [1, 8], 9)
    assert runs[3].answer == naive(model, [3, 8], 9)
    assert len(runs[0].tokens) == 2


@torch.no_grad()
def test_likelihoods_are_those_of_the_whole_sequence(model: GPT) -> None:
    batch = ContinuousBatch(model, slots=1, max_length=32)
    run = batch.add(Request(prompt=(5, 9, 2), max_new_tokens=4, logprobs=2, prompt_logprobs=True))
    while batch.active or batch.waiting:
        batch.step()

    whole = [5, 9, 2, *run.answer]
    logarithms = model(torch.tensor([whole]))[0].log_softmax(-1)
    told = [*run.prompt_tokens, *run.tokens]
    assert [token.id for token in told] == whole
    assert told[0].logprob is None
    for place, token in enumerate(told[1:]):
        assert token.logprob == pytest.approx(logarithms[place, token.id].item(), abs=1e-5)
        assert [each for each, _ in token.top] == logarithms[place].topk(2).indices.tolist()


def test_tokens_that_the_model_does_not_have_are_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="has the token 61, but the model's vocabulary has 61"):
        generate(model, [[1, 61]], max_new_tokens=1)
