"""SentencePiece models (unigram or BPE), as they are or with the tokens that Megatron adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from mds_data.tokenizers.protocol import ModelFile, TokenIds, TokenizerError, read_model_file

__all__ = ["SentencePieceTokenizer", "load_sentencepiece_tokenizer"]

_MEGATRON_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer:
    """A SentencePiece model, and tokens added after its vocabulary."""

    def __init__(
        self,
        content: bytes,
        *,
        name: str,
        added: Sequence[str] = (),
        eod_token: str | None = None,
        allow_special: bool = False,
    ) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        self.kind = "sentencepiece-megatron" if _MEGATRON_TOKENS[0] in added else "sentencepiece"
        self.name = name
        self.file = ModelFile("tokenizer.model", content)
        self.fingerprint = self.file.sha256
        self._base_size: int = self._processor.get_piece_size()
        known = {self._processor.id_to_piece(i): i for i in range(self._base_size)}
        fresh = [token for token in dict.fromkeys(added) if token not in known]
        self._added = dict(
            zip(fresh, range(self._base_size, self._base_size + len(fresh)), strict=True)
        )
        self._spelling = {i: token for token, i in self._added.items()}
        self.vocab_size = self._base_size + len(self._added)
        self.eod_id = self._find_eod({**known, **self._added}, eod_token=eod_token)
        self.splits_at_words = not any(_crosses_words(piece) for piece in known)
        if allow_special:
            raise TokenizerError(
                "SentencePiece never reads control tokens from text; drop --allow-special-tokens."
            )

    def _find_eod(self, known: dict[str, int], *, eod_token: str | None) -> int | None:
        if eod_token is None:
            eos: int = self._processor.eos_id()
            return eos if eos >= 0 else None
        if eod_token not in known:
            raise TokenizerError(f"{self.name} has no token {eod_token!r} to end a document with.")
        return known[eod_token]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        ids: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return ids

    def encode_ids(self, texts: Sequence[str]) -> Sequence[TokenIds]:
        """Return the same in the form that costs least."""
        return self.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, added tokens in their spelling."""
        parts: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if token < self._base_size:
                run.append(token)
                continue
            parts += [self._processor.decode(run), self._spelling.get(token, f"<{token}>")]
            run = []
        return "".join([*parts, self._processor.decode(run)])

    def pieces(self) -> list[str]:
        """Return the spelling of every id, added tokens last."""
        return [*map(self._processor.id_to_piece, range(self._base_size)), *self._added]

    def special_ids(self) -> dict[str, int]:
        """Return the ids of control tokens and added ones, by spelling."""
        spell, is_control = self._processor.id_to_piece, self._processor.is_control
        control = {spell(number): number for number in range(self._base_size) if is_control(number)}
        return control | self._added


def load_sentencepiece_tokenizer(
    path: Path,
    *,
    megatron_tokens: bool = False,
    eod_token: str | None = None,
    extra_ids: int = 0,
    allow_special: bool = False,
) -> SentencePieceTokenizer:
    """Load ``tokenizer.model``, or the folder that holds it.

    Args:
        path: The file or its folder.
        megatron_tokens: Add ``<CLS> <SEP> <EOD> <MASK>`` where the model lacks them, as Megatron's
            SentencePieceTokenizer does; ``<EOD>`` then ends a document.
        eod_token: Token that ends a document; the model's end-of-sentence token when left out.
        extra_ids: Number of T5's sentinels ``<extra_id_0>``... to add.
        allow_special: Refused; SentencePiece has no such mode.

    Raises:
        TokenizerError: The file is not a SentencePiece model.
    """
    if path.is_dir():
        path = path / "tokenizer.model"
    added = [
        *(_MEGATRON_TOKENS if megatron_tokens else ()),
        *(f"<extra_id_{i}>" for i in range(extra_ids)),
    ]
    content = read_model_file(path)
    if not content:
        raise TokenizerError(f"{path} is not a SentencePiece model: it is empty.")
    try:
        return SentencePieceTokenizer(
            content,
            name=path.name,
            added=added,
            eod_token=eod_token or ("<EOD>" if megatron_tokens else None),
            allow_special=allow_special,
        )
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from error


def _crosses_words(piece: str) -> bool:
    body = piece.strip("\N{LOWER ONE EIGHTH BLOCK}")
    return "\N{LOWER ONE EIGHTH BLOCK}" in body or (
        bool(body) and piece.endswith("\N{LOWER ONE EIGHTH BLOCK}")
    )
