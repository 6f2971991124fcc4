"""The commands that write stores of parts: arguments to a config, progress to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from mds_data.commands.engines import default_workers
from mds_data.commands.errors import UsageError
from mds_data.commands.preprocess import tokenizer_spec
from mds_data.commands.progress import ProgressLine
from mds_data.commands.provenance_options import chosen_sources
from mds_data.commands.redaction_rules import optional_rules
from mds_data.commands.text import new_file
from mds_data.errors import DataError
from mds_data.paired.conversations import SFTConfig
from mds_data.paired.conversations import preprocess_sft as run_preprocess_sft
from mds_data.paired.drops import Drop
from mds_data.paired.encode import PairFilter
from mds_data.paired.nmt import NMTConfig
from mds_data.paired.nmt import preprocess_nmt as run_preprocess_nmt
from mds_data.paired.pipeline import PartsConfig, PartsProgress, PartsReport
from mds_data.preprocess.workers import keep_to_one_thread

__all__ = ["preprocess_nmt", "preprocess_sft"]

Config = TypeVar("Config")
OnDrops = Callable[[Sequence[Drop]], None]


def preprocess_nmt(arguments: argparse.Namespace) -> int:
    """Tokenise parallel text into a store of pairs."""
    if arguments.dataset_impl is not None:
        sys.stderr.write("preprocess-nmt: --dataset-impl changes nothing: a store is mapped.\n")
    config = _checked(_nmt_config, arguments)
    keep_to_one_thread()
    progress = _Progress(arguments, unit="pairs")
    with _report_file(arguments.report, overwrite=arguments.overwrite) as keep:
        report = run_preprocess_nmt(config, on_progress=progress.show, on_drops=keep)
    progress.finish(report)
    return 0


def preprocess_sft(arguments: argparse.Namespace) -> int:
    """Tokenise conversations into a store of parts read and parts learned."""
    config = _checked(_sft_config, arguments)
    keep_to_one_thread()
    progress = _Progress(arguments, unit="conversations")
    with _report_file(arguments.report, overwrite=arguments.overwrite) as keep:
        report = run_preprocess_sft(config, on_progress=progress.show, on_drops=keep)
    progress.finish(report)
    return 0


def _sft_config(arguments: argparse.Namespace) -> SFTConfig:
    if arguments.allow_special_tokens:
        raise UsageError(
            "--allow-special-tokens would let a message forge a turn; the template's own marks "
            "become special tokens without it."
        )
    return SFTConfig(
        writing=writing_config(arguments),
        inputs=tuple(arguments.input),
        template=arguments.chat_template,
        max_length=arguments.max_length,
    )


def _nmt_config(arguments: argparse.Namespace) -> NMTConfig:
    return NMTConfig(
        writing=writing_config(arguments),
        source=arguments.source,
        target=arguments.target,
        inputs=tuple(arguments.input or ()),
        input_format=None if arguments.input_format == "auto" else arguments.input_format,
        keys=(arguments.source_key, arguments.target_key),
        filter=PairFilter(
            min_length=arguments.min_length,
            max_length=arguments.max_length,
            max_ratio=arguments.max_ratio,
        ),
    )


def writing_config(arguments: argparse.Namespace) -> PartsConfig:
    """Where and how to write."""
    return PartsConfig(
        output=arguments.output or arguments.output_prefix,
        tokenizer=tokenizer_spec(arguments),
        split=arguments.split,
        layout=arguments.layout,
        workers=default_workers() if arguments.workers is None else arguments.workers,
        on_error=arguments.on_error,
        overwrite=arguments.overwrite,
        redact=optional_rules(arguments),
        sources=chosen_sources(arguments),
    )


def _checked(make: Callable[[argparse.Namespace], Config], arguments: argparse.Namespace) -> Config:
    try:
        return make(arguments)
    except DataError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _report_file(path: Path | None, *, overwrite: bool) -> Iterator[OnDrops | None]:
    if path is None:
        yield None
        return
    with new_file(path, overwrite=overwrite) as file:

        def keep(drops: Sequence[Drop]) -> None:
            for drop in drops:
                file.write(json.dumps(asdict(drop)).encode() + b"\n")

        yield keep


class _Progress:
    """Shows how far a run is, and at the end what it kept and dropped."""

    def __init__(self, arguments: argparse.Namespace, *, unit: str) -> None:
        self._line = ProgressLine(sys.stderr, label=arguments.command, every=arguments.log_interval)
        self._unit = unit

    def show(self, state: PartsProgress) -> None:
        self._line.update(
            state.bytes_done,
            state.bytes_total,
            items=state.documents,
            detail=f"{state.documents:,} {self._unit}  {state.tokens / 1e6:,.2f} M tokens",
        )

    def finish(self, report: PartsReport) -> None:
        for line in report.drops.sentences():
            self._line.finish(line)
        if report.redacted is not None:
            self._line.finish(report.redacted.sentence())
        self._line.finish(
            f"{report.documents:,} {self._unit}, {report.tokens:,} tokens in {report.output}; "
            f"look at them by: mds-data inspect {report.output}"
        )
