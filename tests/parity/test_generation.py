"""Generation gives the tokens of transformers' generate: greedy, drawn from a seed, beam search."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from generation_ranks import END, NEW, PROMPTS, answers, generated_by_all_ranks
from hf_folders import FAMILIES, write_folder

from mds_kernels.testing import run_ranks
from mds_train.generate import (
    BeamSearch,
    ContinuousBatch,
    Request,
    Sampling,
    beam_search,
    generate,
    load_model,
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp(request.param), family=request.param)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def their_tokens(model, prompt: list[int], *, seed: int = 0, **options) -> list[int]:
    torch.manual_seed(seed)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW,
        pad_token_id=END,
        top_k=options.pop("top_k", 0),
        **options,
    )
    answer = output[0, len(prompt) :].tolist()
    return answer[: answer.index(END)] if END in answer else answer


def test_greedy_tokens_are_theirs(folder: Path, theirs) -> None:
    ours = generate(load_model(folder), PROMPTS, max_new_tokens=NEW, end_token=END)

    assert ours == [their_tokens(theirs, prompt, do_sample=False) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.1, "min_p": 0.1, "top_k": 100, "top_p": 0.95},
        {"temperature": 0.9, "repetition_penalty": 1.4, "top_p": 0.9},
    ],
    ids=["plain", "top-k", "top-p", "min-p", "penalty"],
)
def test_a_seed_draws_the_tokens_that_it_draws_there(folder: Path, theirs, options: dict) -> None:
    ours = generate(
        load_model(folder),
        PROMPTS,
        max_new_tokens=NEW,
        sampling=Sampling(**options),
        seed=100,
        end_token=END,
    )

    assert ours == [
        their_tokens(theirs, prompt, seed=100 + number, do_sample=True, **options)
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize(
    ("beams", "penalty", "early", "repetition"),
    [(3, 1.0, False, 1.0), (4, 2.0, True, 1.0), (2, 0.0, False, 1.3), (5, -1.0, False, 1.0)],
)
def test_beam_search_finds_their_answers(
    folder: Path, theirs, beams: int, penalty: float, early: bool, repetition: float
) -> None:
    search = BeamSearch(
        beams=beams, length_penalty=penalty, early_stopping=early, repetition_penalty=repetition
    )
    model, ends = load_model(folder), frozenset({END, 12, 77})
    for prompt in PROMPTS:
        output = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            pad_token_id=END,
            eos_token_id=sorted(ends),
            do_sample=False,
            num_beams=beams,
            num_return_sequences=beams,
            length_penalty=penalty,
            early_stopping=early,
            repetition_penalty=repetition,
            return_dict_in_generate=True,
            output_scores=True,
        )

        ours = beam_search(model, prompt, max_new_tokens=NEW, search=search, end_tokens=ends)

        scores = [beam.score for beam in ours]
        assert scores == pytest.approx(output.sequences_scores.tolist(), rel=1e-4)
        for beam, sequence in zip(ours, output.sequences.tolist(), strict=True):
            answer = sequence[len(prompt) :]
            assert list(beam.tokens) == answer[: len(beam.tokens)]


def test_likelihoods_are_theirs(folder: Path, theirs) -> None:
    batch = ContinuousBatch(load_model(folder), slots=2, max_length=64)
    runs = [
        batch.add(Request(prompt=tuple(prompt), max_new_tokens=8, logprobs=3, prompt_logprobs=True))
        for prompt in PROMPTS
    ]
    while batch.active or batch.waiting:
        batch.step()

    for prompt, run in zip(PROMPTS, runs, strict=True):
        whole = torch.tensor([[*prompt, *run.answer]])
        with torch.no_grad():
            logarithms = theirs(whole).logits[0].log_softmax(-1)
        expected = logarithms[:-1].gather(1, whole[0, 1:, None])[:, 0]
        told = [*run.prompt_tokens, *run.tokens]
        actual = torch.tensor([token.logprob for token in told[1:]])
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_ranks_that_share_the_model_generate_what_one_does(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, family="llama")

    together = run_ranks(generated_by_all_ranks, 2, str(folder))

    alone = answers(load_model(folder))
    assert together == [alone, alone]
