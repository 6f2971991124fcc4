from __future__ import annotations

import pytest
import torch

from mds_train.generate.sampling import Sampling, filtered_probabilities, next_tokens


def choose(logits: torch.Tensor, sampling: Sampling, *, seed: int = 0) -> torch.Tensor:
    return next_tokens(logits, sampling=sampling, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=1)])
def test_greedy_takes_the_most_likely(sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])

    assert choose(logits, sampling).tolist() == [1, 0]


def test_top_k_keeps_the_k_most_likely() -> None:
    probabilities = filtered_probabilities(
        torch.tensor([[1.0, 4.0, 3.0, 2.0]]), sampling=Sampling(top_k=2)
    )

    assert (probabilities[0] > 0).tolist() == [False, True, True, False]
    assert probabilities.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, 1), (0.55, 2), (0.85, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: int) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])

    left = filtered_probabilities(probabilities.log(), sampling=Sampling(top_p=top_p))

    assert int((left > 0).sum()) == kept


def test_draws_follow_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0]]).expand(20_000, 2)

    share = choose(logits, Sampling(temperature=0.5)).double().mean()

    assert share.item() == pytest.approx(torch.sigmoid(torch.tensor(2.0)).item(), abs=0.01)


def test_a_seed_repeats_the_draw() -> None:
    logits = torch.zeros(50, 100)

    assert torch.equal(choose(logits, Sampling()), choose(logits, Sampling()))
    assert not torch.equal(choose(logits, Sampling()), choose(logits, Sampling(), seed=1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, r"temperature \(-1\.0\) must not be negative"),
        ({"top_k": -1}, r"top_k \(-1\) must not be negative"),
        ({"top_p": 0.0}, r"top_p \(0\.0\) must be above 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]
