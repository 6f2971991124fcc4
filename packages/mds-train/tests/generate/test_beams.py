from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from mds_core import GPTConfig, ProcessGroups
from mds_core.models import GPT
from mds_train.generate import BeamSearch, beam_search, generate
from mds_train.generate.beams import _State

VOCAB, LENGTH = 5, 4


@pytest.fixture(scope="module")
def model() -> GPT:
    config = GPTConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=16,
        init_std=0.5,
    )
    return GPT(config, ProcessGroups.single(), dtype=torch.float64).eval()


@torch.no_grad()
def log_probability(model: GPT, prompt: list[int], answer: tuple[int, ...]) -> float:
    logarithms = model(torch.tensor([[*prompt, *answer]]))[0].log_softmax(-1)
    first = len(prompt) - 1
    return sum(logarithms[first + i, token].item() for i, token in enumerate(answer))


def test_with_enough_beams_the_likeliest_of_all_sequences_is_found(model: GPT) -> None:
    prompt = [1, 3]
    everything = {
        answer: log_probability(model, prompt, answer)
        for answer in product(range(VOCAB), repeat=LENGTH)
    }
    best = sorted(everything, key=everything.__getitem__, reverse=True)

    search = BeamSearch(beams=VOCAB**LENGTH, length_penalty=0.0)
    found = beam_search(model, prompt, max_new_tokens=LENGTH, search=search)

    assert [beam.tokens for beam in found[:10]] == best[:10]
    assert found[0].score == pytest.approx(everything[best[0]], abs=1e-5)
    assert not found[0].ended


def test_an_end_token_ends_a_beam_and_counts_in_its_score(model: GPT) -> None:
    prompt, end = [2], 4
    search = BeamSearch(beams=VOCAB**LENGTH, length_penalty=2.0)

    found = beam_search(
        model, prompt, max_new_tokens=LENGTH, search=search, end_tokens=frozenset({end})
    )

    for beam in found[:20]:
        counted = (*beam.tokens, end) if beam.ended else beam.tokens
        expected = log_probability(model, prompt, counted) / len(counted) ** 2
        assert beam.score == pytest.approx(expected, abs=1e-5)
        assert end not in beam.tokens


def test_the_search_goes_on_while_a_longer_answer_may_become_better() -> None:
    a, b, end = 0, 1, 2
    chances = {  # of a, b and the end after what was said
        (): (0.5, 0.499, 0.001),
        (a,): (0.26, 0.0, 0.74),
        (b,): (1.0, 0.0, 0.0),
        (b, a): (0.4, 0.0, 0.6),
        (b, a, a): (0.0, 0.0, 1.0),
    }
    search = BeamSearch(beams=2, length_penalty=2.0)
    state = _State((a,), search=search, end_tokens=frozenset({end}), longest=6)

    going = True
    while going:
        rows = [chances.get(said, (0.4, 0.3, 0.3)) for said in state.running]
        going = state.advance(torch.tensor(rows).clamp_min(1e-9).log()) is not None

    # Two answers were there when its beginning was only the third best sum.
    assert state.best()[0].tokens == (b, a, a)
    assert state.best()[0].score == pytest.approx(math.log(0.499 * 0.4) / 4**2, rel=1e-4)


def test_one_beam_is_greedy(model: GPT) -> None:
    (beam,) = beam_search(model, [1, 2], max_new_tokens=6, search=BeamSearch(beams=1))

    assert [list(beam.tokens)] == generate(model, [[1, 2]], max_new_tokens=6)


def test_wrong_requests_are_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match=r"beams \(0\) must be 1 or more"):
        BeamSearch(beams=0)
    with pytest.raises(ValueError, match="A prompt has no token"):
        beam_search(model, [], max_new_tokens=1, search=BeamSearch(beams=2))
