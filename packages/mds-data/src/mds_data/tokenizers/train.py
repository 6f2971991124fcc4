"""Train a tokenizer on texts: byte-level BPE, WordPiece or Unigram.

The same texts give the same file, byte for byte, in every process. Where the tokenizers library
numbers its first tokens in hash order (WordPiece), the alphabet is counted here and handed over
sorted; where it adds floats in hash order (Unigram), SentencePiece's trainer does the work.
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from mds_data.tokenizers.protocol import ModelFile, TokenizerError

__all__ = ["TrainedModel", "train_tokenizer"]

TrainedModel = Literal["bpe", "wordpiece", "unigram"]

_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ALPHABET_SIZE = 1000
"""Characters that WordPiece keeps; rarer ones become [UNK], as in BERT's own vocabularies."""


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    model: TrainedModel = "bpe",
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    min_frequency: int = 2,
    lower_case: bool = True,
) -> ModelFile:
    """Train a tokenizer of exactly ``vocab_size`` tokens.

    Args:
        texts: The corpus. WordPiece reads it twice, so an iterator is kept in memory for it.
        vocab_size: Size of the vocabulary, special tokens included.
        model: ``bpe`` (byte-level, as GPT-2), ``wordpiece`` (as BERT) or ``unigram``.
        special_tokens: Take the first ids; the first of them ends a document.
        min_frequency: How often a pair must stand in the corpus to become a token (not unigram).
        lower_case: Lower the case and strip accents (wordpiece only).

    Returns:
        ``tokenizer.json``, or ``tokenizer.model`` (SentencePiece) for unigram.

    Raises:
        TokenizerError: The corpus is too small, or the vocabulary can't hold the alphabet.
    """
    special = list(dict.fromkeys(special_tokens))
    if model == "bpe":
        return _train_bpe(texts, vocab_size=vocab_size, special=special, frequency=min_frequency)
    if model == "unigram":
        return _train_unigram(texts, vocab_size=vocab_size, special=special)
    return _train_wordpiece(
        texts if iter(texts) is not texts else list(texts),
        vocab_size=vocab_size,
        special=[*special, *(t for t in _BERT_SPECIAL if t not in special)],
        frequency=min_frequency,
        lower_case=lower_case,
    )


def _train_bpe(
    texts: Iterable[str], *, vocab_size: int, special: list[str], frequency: int
) -> ModelFile:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _check_room(vocab_size, least=len(alphabet) + len(special), what="the 256 bytes")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=frequency,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(_non_empty(texts), trainer)
    _check_size(backend.get_vocab_size(), vocab_size=vocab_size)
    return ModelFile("tokenizer.json", backend.to_str(pretty=True).encode())


def _train_wordpiece(
    texts: Iterable[str], *, vocab_size: int, special: list[str], frequency: int, lower_case: bool
) -> ModelFile:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    alphabet, inner = _wordpiece_alphabet(normalizer.normalize_str(text) for text in texts)
    first = [*special, *alphabet, *inner]
    _check_room(vocab_size, least=len(first), what="the alphabet of this corpus")
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # As special tokens the letters get their numbers first and in our order; the library would
    # number the inner ones in the order of a hash table, another one in every process.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=frequency,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(_non_empty(texts), trainer)
    vocabulary = learner.get_vocab(with_added_tokens=True)
    _check_size(len(vocabulary), vocab_size=vocab_size)
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(special)
    return ModelFile("tokenizer.json", backend.to_str(pretty=True).encode())


def _wordpiece_alphabet(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the most frequent characters, and those of them that stand inside words as ``##c``."""
    counts: Counter[str] = Counter()
    neighbours: set[tuple[str, str]] = set()
    for text in texts:
        counts.update(text)
        neighbours.update(pairwise(text))
    ranked = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    alphabet = sorted(ranked[:_ALPHABET_SIZE])
    inner = {b for a, b in neighbours if _in_word(a) and _in_word(b)}
    return alphabet, [f"##{c}" for c in alphabet if c in inner]


def _in_word(character: str) -> bool:
    ascii_symbol = character.isascii() and not character.isalnum()
    punctuation = ascii_symbol or unicodedata.category(character).startswith("P")
    return not punctuation and not character.isspace()


def _train_unigram(texts: Iterable[str], *, vocab_size: int, special: list[str]) -> ModelFile:
    import sentencepiece

    if not special:
        raise TokenizerError("a unigram tokenizer needs a special token to end a document with.")
    model = io.BytesIO()
    failures: list[Exception] = []
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts, failures),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            # Together these three make the tokenizer lossless: any text decodes to itself.
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            eos_piece=special[0],
            control_symbols=special[1:],
            max_sentence_length=2**20,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failures:  # SentencePiece turns what the corpus raises into an error of its own.
            raise failures[0] from None
        raise TokenizerError(_sentencepiece_reason(str(error), vocab_size=vocab_size)) from error
    return ModelFile("tokenizer.model", model.getvalue())


def _sentencepiece_reason(message: str, *, vocab_size: int) -> str:
    most = re.search(r"value <= (\d+)", message)
    if most:
        return _too_small(int(most[1]), vocab_size=vocab_size)
    least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)
    if least:
        return _no_room(vocab_size, least=int(least[1]), what="the alphabet of this corpus")
    return f"SentencePiece could not train on this corpus: {message.splitlines()[0]}"


def _lines(texts: Iterable[str], failures: list[Exception]) -> Iterator[str]:
    # SentencePiece holds the corpus by sentences and never looks across one; a line stands for one.
    try:
        for text in texts:
            yield from (line for line in text.split("\n") if line)
    except (ValueError, OSError) as error:
        failures.append(error)
        raise


def _non_empty(texts: Iterable[str]) -> Iterator[str]:
    return (text for text in texts if text)


def _check_room(vocab_size: int, *, least: int, what: str) -> None:
    if vocab_size < least:
        raise TokenizerError(_no_room(vocab_size, least=least, what=what))


def _no_room(vocab_size: int, *, least: int, what: str) -> str:
    return (
        f"a vocabulary of {vocab_size} has no room for the special tokens and {what}; "
        f"ask for at least {least}."
    )


def _check_size(size: int, *, vocab_size: int) -> None:
    if size < vocab_size:
        raise TokenizerError(_too_small(size, vocab_size=vocab_size))


def _too_small(size: int, *, vocab_size: int) -> str:
    return (
        f"the corpus is too small for a vocabulary of {vocab_size}: it gives only {size} tokens. "
        f"Add text, or ask for {size}."
    )
