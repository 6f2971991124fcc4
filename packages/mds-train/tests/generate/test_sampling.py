from __future__ import annotations

import pytest
import torch

from mds_train.generate.sampling import (
    Sampling,
    filtered_probabilities,
    next_token,
    penalized,
)


def choose(logits: torch.Tensor, sampling: Sampling, *, seed: int = 0) -> int:
    return next_token(logits, sampling=sampling, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1)])
def test_greedy_takes_the_most_likely(sampling: Sampling) -> None:
    assert choose(torch.tensor([0.0, 3.0, 1.0]), sampling) == 1


def test_top_k_keeps_the_k_most_likely() -> None:
    probabilities = filtered_probabilities(
        torch.tensor([[1.0, 4.0, 3.0, 2.0]]), sampling=Sampling(top_k=2)
    )

    assert (probabilities[0] > 0).tolist() == [False, True, True, False]
    assert probabilities.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, 1), (0.45, 1), (0.55, 2), (0.85, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: int) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])

    left = filtered_probabilities(probabilities.log(), sampling=Sampling(top_p=top_p))

    assert int((left > 0).sum()) == kept


def test_a_decaying_top_p_falls_with_each_token_down_to_its_bound() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    sampling = Sampling(top_p=0.99, top_p_decay=0.5, top_p_bound=0.3)

    kept = [
        int((filtered_probabilities(probabilities.log(), sampling=sampling, count=n) > 0).sum())
        for n in range(3)
    ]

    assert kept == [4, 1, 1]
    assert [sampling.nucleus(count) for count in range(3)] == [0.99, 0.495, 0.3]


@pytest.mark.parametrize(("min_p", "kept"), [(0.05, 4), (0.2, 3), (0.5, 2), (0.7, 1), (1.0, 1)])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p: float, kept: int) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])

    left = filtered_probabilities(probabilities.log(), sampling=Sampling(min_p=min_p))

    assert int((left > 0).sum()) == kept


def test_penalties_and_biases_change_the_logits_of_what_was_said() -> None:
    logits = torch.tensor([1.0, 2.0, -3.0, 4.0])

    def changed(**options: object) -> list[float]:
        sampling = Sampling(**options)  # type: ignore[arg-type]
        return penalized(logits, sampling=sampling, prompt=[2], answer=[1, 1]).tolist()

    assert changed(repetition_penalty=2.0) == [1.0, 1.0, -6.0, 4.0]
    assert changed(presence_penalty=0.5) == [1.0, 1.5, -3.0, 4.0]
    assert changed(frequency_penalty=0.5) == [1.0, 1.0, -3.0, 4.0]
    assert changed(logit_bias=((0, 7.0), (3, -1.0))) == [8.0, 2.0, -3.0, 3.0]
    assert changed(never_after=((1, 3), (2, 0))) == [1.0, 2.0, -3.0, float("-inf")]


def test_draws_follow_the_temperature() -> None:
    logits, generator = torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=0.5)

    draws = [next_token(logits, sampling=sampling, generator=generator) for _ in range(5000)]

    expected = torch.sigmoid(torch.tensor(2.0)).item()
    assert sum(draws) / len(draws) == pytest.approx(expected, abs=0.02)


def test_a_seed_repeats_the_draw() -> None:
    logits = torch.zeros(10_000)

    assert choose(logits, Sampling()) == choose(logits, Sampling())
    assert choose(logits, Sampling()) != choose(logits, Sampling(), seed=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, r"temperature \(-1\.0\) must not be negative"),
        ({"temperature": float("nan")}, r"temperature \(nan\)"),
        ({"top_k": -1}, r"top_k \(-1\) must not be negative"),
        ({"top_p": 0.0}, r"top_p \(0\.0\) must be above 0"),
        ({"min_p": 1.5}, r"min_p \(1\.5\) must lie between 0 and 1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty \(0\.0\) must be above 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]
