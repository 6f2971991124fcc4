"""Tokenizers: text stays text, ids equal those of the original, broken files are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from text_material import byte_tokenizer, golden, small_tokenizer, text

from mds_data.tokenizers import (
    Tokenizer,
    TokenizerError,
    TokenizerSpec,
    load_tokenizer,
    spec_of_file,
    spec_of_store_file,
)

MODELS = {"bpe": "tokenizer.json", "wordpiece": "tokenizer.json", "unigram": "tokenizer.model"}


def saved(folder: Path, model: str) -> Path:
    path = folder / MODELS[model]
    path.write_bytes(small_tokenizer(model))
    return path


def load(path: Path, **options: object) -> Tokenizer:
    return load_tokenizer(spec_of_file(path, **options))


@pytest.mark.parametrize("model", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "sample",
    [
        "",
        " ",
        "a",
        "two\nlines\r\n",
        "  spaces  everywhere ",
        "Grüße 🙂 中文",
        "NUL\0inside",
        "\ttab",
    ],
)
def test_text_comes_back_unchanged(tmp_path: Path, model: str, sample: str) -> None:
    tokenizer = load(saved(tmp_path, model))

    (ids,) = tokenizer.encode_batch([sample])

    assert tokenizer.decode(ids) == sample
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("model", list(MODELS))
def test_the_spelling_of_a_special_token_is_text(tmp_path: Path, model: str) -> None:
    tokenizer = load(saved(tmp_path, model))

    (ids,) = tokenizer.encode_batch(["before <|endoftext|> after"])

    assert tokenizer.eod_id is not None
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode([tokenizer.eod_id]).strip() in {"<|endoftext|>", ""}


def test_special_tokens_can_be_allowed(tmp_path: Path) -> None:
    tokenizer = load(saved(tmp_path, "bpe"), allow_special=True)

    (ids,) = tokenizer.encode_batch(["before <|endoftext|> after"])

    assert ids.count(tokenizer.eod_id) == 1


def test_an_eod_token_that_the_file_calls_ordinary_is_not_reachable_from_text(
    tmp_path: Path,
) -> None:
    description = json.loads(small_tokenizer())
    description["added_tokens"][0]["special"] = False
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))

    tokenizer = load(path)

    assert tokenizer.eod_id not in tokenizer.encode_batch(["x <|endoftext|> y"])[0]


def test_truncation_padding_and_dropout_of_the_file_are_not_applied(tmp_path: Path) -> None:
    plain = load(saved(tmp_path, "bpe")).encode_batch([text(1, words=200), "a"])
    description = json.loads(small_tokenizer())
    description["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    description["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    description["model"]["dropout"] = 0.5
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(description))

    assert load(path).encode_batch([text(1, words=200), "a"]) == plain


def test_the_end_token_is_the_named_one_or_the_configured_one_or_a_usual_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer())

    usual = load(path).eod_id
    named = load(path, eod_token="A").eod_id
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "B"}}')
    configured = load(tmp_path).eod_id

    assert (usual, named, configured) == (256, ord("A"), ord("B"))
    with pytest.raises(TokenizerError, match=r"no token 'nowhere'.*--eod-token"):
        load(path, eod_token="nowhere")


@pytest.mark.parametrize("model", list(MODELS))
def test_the_kept_file_makes_the_same_tokenizer_again(tmp_path: Path, model: str) -> None:
    first = load(saved(tmp_path, model))
    kept = tmp_path / f"kept-{first.file.name}"
    kept.write_bytes(first.file.content)

    again = load_tokenizer(spec_of_store_file(kept, kind=first.kind))

    assert again.fingerprint == first.fingerprint
    assert again.encode_batch([text(3)]) == first.encode_batch([text(3)])


def test_gpt2_bpe_gives_the_ids_of_the_original() -> None:
    folder = golden("fixtures") / "datasets"
    spec = TokenizerSpec(
        kind="gpt2-bpe",
        path=folder / "gpt2bpe-vocab.json",
        merges=folder / "gpt2bpe-merges.txt",
    )
    tokenizer = load_tokenizer(spec)
    texts = [json.loads(line)["text"] for line in (folder / "pydoc.jsonl").open(encoding="utf-8")]

    ids = [i for each in tokenizer.encode_batch(texts) for i in [*each, tokenizer.eod_id]]

    assert np.array_equal(ids, np.fromfile(folder / "pydoc_text_document.bin", "<u2"))


def test_bert_wordpiece_gives_the_ids_of_the_original() -> None:
    folder = golden("fixtures") / "datasets"
    spec = TokenizerSpec(kind="bert-wordpiece", path=folder / "bertwp-vocab.txt")
    tokenizer = load_tokenizer(spec)
    documents = [json.loads(line)["text"] for line in (folder / "pydoc_ss.jsonl").open()]
    golden_ids = np.fromfile(folder / "pydocss_text_sentence.bin", "<u2")

    sentences = [sentence for document in documents for sentence in document]
    ids = [i for each in tokenizer.encode_batch(sentences) for i in each]

    assert np.array_equal(ids, golden_ids)


def test_bert_is_cased_or_uncased_and_adds_megatrons_tokens(tmp_path: Path) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cafe", "Cafe", "##s"]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(vocabulary) + "\n")

    uncased = load_tokenizer(TokenizerSpec(kind="bert-wordpiece", path=path, extra_ids=3))
    cased = load_tokenizer(TokenizerSpec(kind="bert-wordpiece", path=path, lower_case=False))

    assert uncased.encode_batch(["Cafés Xyz [MASK]"]) == [[5, 7, 1, 1, 1, 1]]
    assert cased.encode_batch(["Cafes"]) == [[6, 7]]
    assert (cased.vocab_size, uncased.vocab_size) == (10, 13)
    assert uncased.decode([10]) == "<extra_id_0>"
    assert uncased.eod_id is None


def test_megatrons_sentencepiece_adds_its_tokens_after_the_vocabulary(tmp_path: Path) -> None:
    path = saved(tmp_path, "unigram")
    plain = load_tokenizer(TokenizerSpec(kind="sentencepiece", path=path))

    megatron = load_tokenizer(TokenizerSpec(kind="sentencepiece-megatron", path=path))

    assert plain.eod_id == 1
    assert megatron.vocab_size == plain.vocab_size + 4
    assert megatron.eod_id == plain.vocab_size + 2
    assert megatron.decode([megatron.eod_id]) == "<EOD>"


def test_a_model_may_have_its_version_at_the_end_of_its_name(tmp_path: Path) -> None:
    path = saved(tmp_path, "unigram")

    renamed = path.rename(tmp_path / "tokenizer.model.v3")

    assert load_tokenizer(spec_of_file(renamed)).kind == "sentencepiece"


def test_the_null_tokenizer_reads_numbers_and_checks_them() -> None:
    tokenizer = load_tokenizer(TokenizerSpec(kind="null", vocab_size=100))

    assert tokenizer.encode_batch(["0 7\n99"]) == [[0, 7, 99]]
    assert tokenizer.decode([0, 7]) == "0 7"
    assert (tokenizer.eod_id, tokenizer.vocab_size) == (100, 101)
    with pytest.raises(ValueError, match="token id 100 is not between 0 and 99"):
        tokenizer.encode_batch(["1 100"])
    with pytest.raises(ValueError, match="is no token id"):
        tokenizer.encode_batch(["one"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", "not a JSON tokenizer file"),
        ("tokenizer.json", b"[" * 100_000, "not a JSON tokenizer file"),
        ("tokenizer.json", b"\xff\xfe", "not a JSON tokenizer file"),
        ("tokenizer.json", b'{"hello": 1}', 'the member "model" is missing'),
        ("tokenizer.json", b'{"model": 5}', "not a tokenizer of the tokenizers library"),
        ("tokenizer.model", b"hello", "not a SentencePiece model"),
        ("tokenizer.model", b"", "not a SentencePiece model"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(TokenizerError, match=message) as caught:
        load(path)

    assert str(path) in str(caught.value)


def test_a_missing_file_says_that_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded"):
        load(tmp_path / "meta-llama")


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        ("[]", "", "must map each token to a number"),
        ('{"a": -1}', "", "must map each token to a number"),
        ("{", "", "not a GPT-2 vocabulary"),
        ('{"a": 0}', "a b c", "line 1: a merge is two tokens"),
        ('{"a": 0}', "#version: 0.2\na b\n", "don't make a BPE model"),
        ('{"a": 0}', "", "no token '<|endoftext|>'"),
    ],
)
def test_broken_gpt2_files_are_named(tmp_path: Path, vocab: str, merges: str, message: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    spec = TokenizerSpec(
        kind="gpt2-bpe", path=tmp_path / "vocab.json", merges=tmp_path / "merges.txt"
    )

    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(spec)

    assert message in str(caught.value)


def test_a_bert_vocabulary_must_hold_its_special_tokens(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\nword\n")

    with pytest.raises(TokenizerError, match=r"\[CLS\], \[SEP\], \[MASK\] must stand in it"):
        load_tokenizer(TokenizerSpec(kind="bert-wordpiece", path=path))


def test_a_spec_needs_its_files() -> None:
    with pytest.raises(TokenizerError, match="needs its file"):
        TokenizerSpec(kind="sentencepiece")
    with pytest.raises(TokenizerError, match="two files"):
        TokenizerSpec(kind="gpt2-bpe", path=Path("vocab.json"))
    with pytest.raises(TokenizerError, match="at least 1"):
        TokenizerSpec(kind="null", vocab_size=0)
