"""The command preprocess: arguments to a PreprocessConfig, progress and report to the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from mds_data.commands.engines import chosen_engine, chosen_task
from mds_data.commands.errors import UsageError
from mds_data.commands.progress import ProgressLine
from mds_data.commands.provenance_options import chosen_sources
from mds_data.commands.redaction_rules import optional_rules
from mds_data.errors import DataError
from mds_data.preprocess.columns import parse_column
from mds_data.preprocess.pipeline import PreprocessConfig, Progress, SentenceConfig
from mds_data.preprocess.pipeline import preprocess as run_preprocess
from mds_data.preprocess.report import PreprocessReport
from mds_data.preprocess.workers import keep_to_one_thread
from mds_data.tokenizers import TokenizerSpec, spec_of_file
from mds_data.tokenizers.protocol import TokenizerKind

__all__ = ["config_of", "preprocess", "tokenizer_spec"]


def preprocess(arguments: argparse.Namespace) -> int:
    """Tokenise text into stores."""
    for warning in unused_flags(arguments):
        sys.stderr.write(f"preprocess: {warning}\n")
    config = config_of(arguments)
    keep_to_one_thread()
    progress = ProgressLine(sys.stderr, label="preprocess", every=arguments.log_interval)

    def show(state: Progress) -> None:
        progress.update(
            state.bytes_done,
            state.bytes_total,
            items=state.documents,
            detail=f"{state.documents:,} documents  {state.tokens / 1e6:,.2f} M tokens",
        )

    report = run_preprocess(config, engine=chosen_engine(arguments), on_progress=show)
    for line in summary(report):
        progress.finish(line)
    return 0


def summary(report: PreprocessReport) -> Iterator[str]:
    """Yield what a person wants to know in the end."""
    yield from report.problems.sentences()
    if report.redacted is not None:
        yield report.redacted.sentence()
    for key, path in report.outputs.items():
        yield (
            f"{report.documents[key]:,} documents, {report.tokens[key]:,} tokens in {path}; "
            f"look at them by: mds-data inspect {path}"
        )


def config_of(arguments: argparse.Namespace) -> PreprocessConfig:
    """Return what the arguments ask for.

    Raises:
        UsageError: They don't go together.
    """
    try:
        return PreprocessConfig(
            inputs=tuple(arguments.input),
            outputs=outputs_of(arguments),
            tokenizer=tokenizer_spec(arguments),
            append_eod=arguments.append_eod,
            split=arguments.split,
            sentences=_sentences(arguments),
            columns=tuple(parse_column(text) for text in arguments.columns),
            layout=arguments.layout,
            on_error=arguments.on_error,
            input_format=None if arguments.input_format == "auto" else arguments.input_format,
            text_unit=arguments.text_unit,
            overwrite=arguments.overwrite,
            resume=arguments.resume,
            checkpoint_batches=max(1, 2 * arguments.checkpoint_mb),
            problems=arguments.report,
            redact=optional_rules(arguments),
            task=chosen_task(arguments),
            sources=chosen_sources(arguments),
        )
    except DataError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


def outputs_of(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the store of each JSON key.

    Raises:
        UsageError: A key can't be part of a folder's name.
    """
    paths = _named_outputs(arguments)
    task = chosen_task(arguments)
    if task is None:
        return paths
    return {key: _with_end(path, task.suffix()) for key, path in paths.items()}


def _named_outputs(arguments: argparse.Namespace) -> dict[str, Path]:
    keys = list(dict.fromkeys(arguments.json_keys))
    if arguments.output is not None and len(keys) == 1:
        return {keys[0]: arguments.output}
    odd = next((key for key in keys if set(key) & set('/\\:*?"<>|')), None)
    if odd is not None:
        raise UsageError(f"the key {odd!r} can't be part of a folder's name; use --output STORE.")
    if arguments.output is not None:
        return {key: _with_end(arguments.output, f"_{key}") for key in keys}
    level = "sentence" if arguments.split_sentences else "document"
    return {key: _with_end(arguments.output_prefix, f"_{key}_{level}") for key in keys}


def _sentences(arguments: argparse.Namespace) -> SentenceConfig | None:
    if not arguments.split_sentences:
        return None
    return SentenceConfig(
        keep_newlines=arguments.keep_newlines,
        english=(arguments.lang or "english") == "english",
    )


def _with_end(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def tokenizer_spec(arguments: argparse.Namespace) -> TokenizerSpec:
    """Return the tokenizer that ``--tokenizer`` or Megatron's flags describe.

    Raises:
        UsageError: A file is missing from the flags, or there is none at all.
    """
    kind = arguments.tokenizer_type
    if kind is None and arguments.tokenizer is None:
        raise UsageError("name the tokenizer's file by --tokenizer, or its --tokenizer-type.")
    has_sentinels = kind is not None and (kind.startswith("Bert") or "SentencePiece" in kind)
    if arguments.vocab_extra_ids and not has_sentinels:
        raise UsageError("--vocab-extra-ids works with the Bert and SentencePiece tokenizer types.")
    if kind in {None, "HFTokenizer"}:
        return spec_of_file(
            arguments.tokenizer or _needed(arguments, "tokenizer_model"),
            eod_token=arguments.eod_token,
            allow_special=arguments.allow_special_tokens,
        )
    if kind == "NullTokenizer":
        return TokenizerSpec(kind="null", vocab_size=_needed(arguments, "vocab_size"))
    return _megatron_spec(arguments, kind=kind)


def _megatron_spec(arguments: argparse.Namespace, *, kind: str) -> TokenizerSpec:
    merges: Path | None = None
    if kind.startswith("Bert"):
        name, path = "bert-wordpiece", _needed(arguments, "vocab_file")
    elif kind == "GPT2BPETokenizer":
        name, path = "gpt2-bpe", _needed(arguments, "vocab_file")
        merges = _needed(arguments, "merge_file")
    else:
        # Megatron adds tokens of its own to its SentencePieceTokenizer, not to the GPT one.
        name = "sentencepiece" if kind.startswith("GPT") else "sentencepiece-megatron"
        path = arguments.tokenizer or _needed(arguments, "tokenizer_model")
    return TokenizerSpec(
        kind=cast("TokenizerKind", name),
        path=path,
        merges=merges,
        eod_token=arguments.eod_token,
        lower_case=kind != "BertWordPieceCase",
        extra_ids=arguments.vocab_extra_ids,
        allow_special=arguments.allow_special_tokens,
    )


def _needed(arguments: argparse.Namespace, name: str) -> Any:
    value = getattr(arguments, name)
    if value is None:
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"--tokenizer-type {arguments.tokenizer_type} needs {flag}.")
    return value


_WITHOUT_EFFECT = {
    "dataset_impl": "a store is always mapped; write Megatron's .bin and .idx by mds-data export",
    "chunk_size": "batches are cut by size, and the result does not depend on them",
    "partitions": "workers share the input by themselves; use --workers",
    "seq_length": "samples are cut when training reads the store, not here",
    "trust_remote_code": "no code from a model's folder is ever run",
}
_FILES_OF = {
    "vocab_file": {"GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"},
    "merge_file": {"GPT2BPETokenizer"},
    "vocab_size": {"NullTokenizer"},
    "tokenizer_model": {
        "HFTokenizer",
        "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer",
    },
}


def unused_flags(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each flag that was given and changes nothing."""
    for name, reason in _WITHOUT_EFFECT.items():
        if getattr(arguments, name) not in {None, False}:
            yield f"--{name.replace('_', '-')} changes nothing: {reason}."
    for name in ("lang", "keep_newlines"):
        if getattr(arguments, name) and not arguments.split_sentences:
            yield f"--{name.replace('_', '-')} changes nothing: it belongs to --split-sentences."
    for name, kinds in _FILES_OF.items():
        if getattr(arguments, name) is not None and arguments.tokenizer_type not in kinds:
            yield (
                f"--{name.replace('_', '-')} changes nothing: only "
                f"{', '.join(sorted(kinds))} reads it."
            )
