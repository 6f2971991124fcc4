from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mds_core import GPTConfig, ProcessGroups
from mds_core.models import GPT
from mds_train.errors import InputError
from mds_train.evaluate.perplexity import measure_perplexity, read_texts, windows
from mds_train.evaluate.scoring import Passage, score
from mds_train.evaluate.wikitext import detokenize


@pytest.fixture(scope="module")
def model() -> GPT:
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=16,
        init_std=0.3,
    )
    return GPT(config, ProcessGroups.single()).eval()


def encode(text: str) -> list[int]:
    return list(text.encode())


@given(st.integers(0, 200), st.integers(1, 40), st.data())
def test_each_token_but_the_first_is_scored_once_with_the_context_that_fits(
    size: int, length: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, length))
    tokens = list(range(size))

    found = list(windows(tokens, length=length, stride=stride))

    assert [token for each in found for token in each.tokens[each.start :]] == tokens[1:]
    for number, each in enumerate(found):
        assert len(each.tokens) <= length + 1
        assert list(each.tokens) == list(range(each.tokens[0], each.tokens[-1] + 1))
        if number:
            assert len(each.tokens) == length + 1  # nothing that fits is left out
            assert len(each.tokens) - each.start <= stride


@torch.no_grad()
def naive(model: GPT, tokens: list[int], *, length: int, stride: int) -> float:
    """Sum of the losses, each token with the context that the definition gives it."""
    total, scored = 0.0, 1
    while scored < len(tokens):
        stop = min(length + 1 if scored == 1 else scored + stride, len(tokens))
        for place in range(scored, stop):
            begin = max(stop - length - 1, 0)
            logits = model(torch.tensor([tokens[begin:place]]))[0, -1]
            total -= logits.double().log_softmax(-1)[tokens[place]].item()
        scored = stop
    return total


@pytest.mark.parametrize("stride", [16, 5, 1])
def test_perplexities_are_means_over_tokens_words_and_bytes(model: GPT, stride: int) -> None:
    text = "The fox said , well , that it was Ærø .\n"

    found = measure_perplexity(model, [text], encode=encode, length=16, stride=stride)

    total, tokens = naive(model, encode(text), length=16, stride=stride), len(text.encode()) - 1
    assert (found.tokens, found.words, found.bytes) == (tokens, 10, tokens + 1)
    assert found.loss == pytest.approx(total / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert found.word_perplexity == pytest.approx(math.exp(total / 10), rel=1e-4)
    assert found.byte_perplexity == pytest.approx(math.exp(total / (tokens + 1)), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / (tokens + 1) / math.log(2), rel=1e-5)


def test_with_a_token_before_it_the_first_one_counts(model: GPT) -> None:
    texts = ["One two", "three"]

    found = measure_perplexity(model, texts, encode=encode, length=16, stride=16, begin=0)

    total = sum(naive(model, [0, *encode(text)], length=16, stride=16) for text in texts)
    assert (found.tokens, found.words) == (12, 3)
    assert found.loss == pytest.approx(total / 12, rel=1e-5)


def test_the_batch_and_its_filling_change_nothing(model: GPT) -> None:
    random = torch.Generator().manual_seed(4)
    passages = [
        Passage(torch.randint(0, 256, (size,), generator=random).tolist(), size // 2)
        for size in (16, 3, 9, 2, 12, 12, 5)
    ]

    alone = list(score(model, passages, batch_size=1))
    together = list(score(model, passages, batch_size=4))

    for one, other in zip(alone, together, strict=True):
        assert one.logprob == pytest.approx(other.logprob, rel=1e-5)
        assert (one.is_greedy, one.count) == (other.is_greedy, other.count)


def test_wikitext_is_put_together_again() -> None:
    given_text = (
        ' = Title = \n He paid 1 @,@ 000 @-@ odd ( half ) ; " so , " he said . It \'s N .\n'
    )

    assert detokenize(given_text) == (
        ' = Title =\nHe paid 1,000-odd (half); "so," he said. It\'s 1 .\n'
    )


def test_words_and_bytes_are_those_before_cleaning(model: GPT) -> None:
    text = "1 @,@ 000 , said"

    found = measure_perplexity(model, [text], encode=encode, length=16, stride=16, clean=detokenize)

    assert (found.tokens, found.words, found.bytes) == (len("1,000, said") - 1, 4, 16)


def test_what_cannot_be_measured_is_refused(model: GPT, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too short"):
        measure_perplexity(model, ["x"], encode=encode, length=16, stride=16)
    with pytest.raises(ValueError, match=r"stride \(17\) must lie between 1 and the window \(16\)"):
        list(windows([1, 2], length=16, stride=17))
    path = tmp_path / "texts.jsonl"
    for content, message in (
        (b'{"text": "a"}\n{"t": 1}\n', 'line 2: there is no "text"'),
        (b"{\n", "line 1: not JSON"),
        (b"\xff", "not a text in UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_texts(path)


def test_texts_are_a_file_or_its_lines(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("One\nTwo\n")
    lines.write_text('{"text": "One\\u2028"}\n\n{"page": "Two"}\n')

    assert read_texts(plain) == ["One\nTwo\n"]
    assert read_texts(lines) == ["One\u2028", "Two"]
