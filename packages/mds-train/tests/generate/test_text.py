from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mds_train.generate.text import TextStream, stop_strings


def bytes_tokenizer() -> Tokenizer:
    """A token a byte, so that most characters need several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = bytes_tokenizer()


def streamed(text: str, *, stop: tuple[str, ...] = (), prompt: str = "") -> list[str]:
    stream = TextStream(TOKENIZER, prompt=TOKENIZER.encode(prompt).ids, stop=stop)
    parts = []
    for token in TOKENIZER.encode(text).ids:
        parts.append(stream.push(token))
        if stream.stopped:
            break
    parts.append(stream.flush())
    assert "".join(parts) == stream.text
    return parts


@given(st.text(), st.text(max_size=5))
def test_the_pieces_together_are_the_text(text: str, prompt: str) -> None:
    assert "".join(streamed(text, prompt=prompt)) == text


@given(st.text(alphabet="abcé"), st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]

    shown = "".join(streamed(text, stop=tuple(stops)))

    expected = text[: min(places)] if places else text
    # A string that is complete first ends the text, also where a longer one has begun before it.
    assert shown == expected or any(text[len(shown) :].startswith(stop) for stop in stops)


def test_a_character_is_shown_when_it_is_whole() -> None:
    assert streamed("aé€")[:6] == ["a", "", "é", "", "", "€"]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    assert streamed("abxabab!", stop=("abab",)) == ["", "", "abx", "", "", "", "", ""]
    assert streamed("aba", stop=("abab",)) == ["", "", "", "aba"]


def test_bytes_that_are_no_character_are_shown_in_the_end() -> None:
    stream = TextStream(TOKENIZER)
    broken = TOKENIZER.encode("€").ids[0]

    assert stream.push(broken) == ""
    assert stream.flush() == "\ufffd"


def test_the_space_of_a_first_word_is_kept() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1}, unk_token="▁Hello"))
    tokenizer.decoder = decoders.Metaspace()
    stream = TextStream(tokenizer, prompt=[0])

    assert stream.push(1) == " world"


def test_useless_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="A stop string is empty"):
        stop_strings(["a", ""])
    with pytest.raises(ValueError, match="There are 100 stop strings"):
        stop_strings(["a"] * 100)
