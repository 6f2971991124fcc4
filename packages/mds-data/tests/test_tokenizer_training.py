"""Training: exact sizes, the same bytes in every process, clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from text_material import text

from mds_data.tokenizers import TokenizerError, load_tokenizer, spec_of_file
from mds_data.tokenizers.train import train_tokenizer

SIZES = {"bpe": 300, "wordpiece": 80, "unigram": 290}
TEXTS = [text(n) for n in range(50)]


@pytest.mark.parametrize("model", list(SIZES))
def test_the_vocabulary_has_the_size_asked_for(tmp_path: Path, model: str) -> None:
    file = train_tokenizer(TEXTS, vocab_size=SIZES[model], model=model)
    path = tmp_path / file.name
    path.write_bytes(file.content)

    tokenizer = load_tokenizer(spec_of_file(path))

    assert tokenizer.vocab_size == SIZES[model]
    assert tokenizer.eod_id is not None
    assert len(tokenizer.encode_batch([text(1)])[0]) < len(text(1))


@pytest.mark.parametrize("model", list(SIZES))
def test_another_process_learns_the_same_file(model: str) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from text_material import text; "
        "from mds_data.tokenizers.train import train_tokenizer; "
        "print(train_tokenizer([text(n) for n in range(50)], "
        "vocab_size=int(sys.argv[3]), model=sys.argv[2]).sha256)"
    )
    arguments = [str(Path(__file__).parent), model, str(SIZES[model])]

    digests = {
        subprocess.run(
            [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()
        for _ in range(2)
    }

    assert digests == {train_tokenizer(TEXTS, vocab_size=SIZES[model], model=model).sha256}


@pytest.mark.parametrize("model", list(SIZES))
def test_a_corpus_that_is_too_small_is_refused_with_the_size_it_can_give(model: str) -> None:
    with pytest.raises(TokenizerError, match="too small for a vocabulary of 90000") as caught:
        train_tokenizer(TEXTS, vocab_size=90_000, model=model)

    possible = int(str(caught.value).rstrip(".").rsplit(" ", 1)[-1])
    assert train_tokenizer(TEXTS, vocab_size=possible, model=model).content


@pytest.mark.parametrize("model", list(SIZES))
def test_a_vocabulary_without_room_for_the_alphabet_is_refused(model: str) -> None:
    with pytest.raises(TokenizerError, match="no room for the special tokens and"):
        train_tokenizer(TEXTS, vocab_size=12, model=model)


@pytest.mark.parametrize("model", list(SIZES))
def test_an_empty_corpus_is_refused(model: str) -> None:
    with pytest.raises(TokenizerError):
        train_tokenizer([], vocab_size=1000, model=model)


def test_special_tokens_take_the_first_ids(tmp_path: Path) -> None:
    special = ["<|endoftext|>", "<|user|>"]
    path = tmp_path / "tokenizer.json"

    path.write_bytes(train_tokenizer(TEXTS, vocab_size=300, special_tokens=special).content)

    tokenizer = load_tokenizer(spec_of_file(path, allow_special=True))
    assert tokenizer.encode_batch(["<|endoftext|><|user|>"]) == [[0, 1]]


def test_wordpiece_keeps_case_when_asked(tmp_path: Path) -> None:
    texts = ["Paris Paris paris"] * 3
    path = tmp_path / "tokenizer.json"

    path.write_bytes(
        train_tokenizer(iter(texts), vocab_size=18, model="wordpiece", lower_case=False).content
    )

    tokenizer = load_tokenizer(spec_of_file(path))
    upper, lower = tokenizer.encode_batch(["Paris", "paris"])
    assert upper != lower


def test_an_error_of_the_text_source_reaches_the_caller() -> None:
    def texts():
        yield "some text"
        raise ValueError("line 2 is broken")

    with pytest.raises(ValueError, match="line 2 is broken"):
        train_tokenizer(texts(), vocab_size=300)
