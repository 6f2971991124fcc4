from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from mds_core import GPTConfig, ProcessGroups
from mds_core.models import GPT
from mds_train.errors import InputError
from mds_train.evaluate.lambada import last_token, last_word, measure_lambada
from mds_train.generate import generate


@pytest.fixture(scope="module")
def model() -> GPT:
    config = GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=128,
        max_position_embeddings=32,
        init_std=0.3,
    )
    return GPT(config, ProcessGroups.single()).eval()


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def test_the_strict_way_asks_for_the_whole_last_word() -> None:
    passage = last_word("he ate an apple \n", encode)

    assert decode(passage.tokens[: passage.start]) == "he ate an"
    assert decode(passage.tokens[passage.start :]) == " apple"


def test_the_loose_way_asks_for_the_last_token() -> None:
    passage = last_token("he ate an apple", encode)

    assert decode(passage.tokens[passage.start :]) == "e"


@pytest.mark.parametrize("strict", [True, False])
def test_the_accuracy_is_the_share_that_greedy_decoding_gets_right(
    model: GPT, strict: bool
) -> None:
    beginnings = ["he ate", "then the", "a b c"]
    known = []
    for text in beginnings:  # what the model itself would say, as a last "word" of bytes
        (answer,) = generate(model, [encode(text)], max_new_tokens=1)
        known.append(([*encode(text), *answer], len(encode(text))))
    texts = [decode(tokens) for tokens, _ in known] + ["he ate xyz"]

    found = measure_lambada(model, texts, encode=encode, strict=strict, length=32)

    expected = []
    for text in texts:
        passage = last_word(text, encode) if strict else last_token(text, encode)
        wanted = list(passage.tokens[passage.start :])
        context = list(passage.tokens[: passage.start])
        (answer,) = generate(model, [context], max_new_tokens=len(wanted))
        expected.append(answer == wanted)
    assert found.passages == 4
    assert found.correct == sum(expected)
    assert strict or found.correct == 3
    assert found.accuracy == found.correct / 4


@torch.no_grad()
def test_what_a_long_passage_has_in_front_is_cut_off(model: GPT) -> None:
    text = "word " * 20 + "end"

    found = measure_lambada(model, [text], encode=encode, strict=True, length=32)

    tokens = encode(text)[-33:]
    logarithms = model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    loss = -sum(logarithms[place - 1, tokens[place]].item() for place in range(29, 33))
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_passage_of_one_word_is_refused(model: GPT) -> None:
    with pytest.raises(InputError, match="Passage 2 has nothing before its last word: 'word'"):
        measure_lambada(model, ["a b", "word"], encode=encode, strict=True, length=32)
    with pytest.raises(InputError, match="There is no passage"):
        measure_lambada(model, [], encode=encode, strict=False, length=32)
