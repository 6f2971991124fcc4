"""The command analyze: measure a store's samples, write the index, show what came out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from mds_data.commands.engines import chosen_engine, chosen_task
from mds_data.commands.errors import UsageError
from mds_data.commands.output import write
from mds_data.commands.progress import ProgressLine
from mds_data.datasets.gpt import GPTDataset
from mds_data.difficulty.analysis import Documents, TokenRows
from mds_data.difficulty.analysis import analyze as run_analyze
from mds_data.difficulty.index import DifficultyIndex, check_free, write_index
from mds_data.preprocess.task import task_stretch
from mds_data.store.token_store import TokenStore, open_store

__all__ = ["analyze"]


def analyze(arguments: argparse.Namespace) -> int:
    """Measure every sample or document of a store."""
    names = list(dict.fromkeys(arguments.metric))
    engine, task = chosen_engine(arguments), chosen_task(arguments)
    output = arguments.output
    if task is not None:
        output = output.with_name(output.name + task.suffix())
    check_free(output, overwrite=arguments.overwrite)
    with open_store(arguments.store.absolute()) as store:  # workers may be elsewhere
        rows, facts = _rows(store, arguments)
        progress = ProgressLine(sys.stderr, label="analyze", unit=f"{arguments.unit}s")
        part = task_stretch(len(rows), task)
        values = run_analyze(rows, names, engine=engine, part=part, on_progress=progress.update)
        index = write_index(
            output,
            values,
            store=store,
            unit=arguments.unit,
            arguments=facts,
            task=task,
            overwrite=arguments.overwrite,
        )
    progress.finish(f"{len(part):,} {arguments.unit}s measured in {output}")
    write(_table(index))
    return 0


def _rows(store: TokenStore, arguments: argparse.Namespace) -> tuple[TokenRows, dict[str, object]]:
    if arguments.unit == "document":
        if arguments.seq_length is not None:
            raise UsageError("--seq-length belongs to --unit sample; leave it out.")
        return Documents(store, arguments.split), {"split": arguments.split}
    if arguments.seq_length is None:
        raise UsageError("samples need --seq-length, as the training run has it.")
    facts = {
        "seq_length": arguments.seq_length,
        "split": arguments.split,
        "order": arguments.order,
        "seed": arguments.seed,
        "num_samples": arguments.num_samples,
    }
    return GPTDataset(store, **facts), facts


def _table(index: DifficultyIndex) -> Iterator[str]:
    width = max(map(len, index.metrics))
    yield f"{'':{width}}  {'lowest':>12}  {'mean':>12}  {'highest':>12}"
    for name, record in index.metrics.items():
        numbers = (record["minimum"], record["mean"], record["maximum"])
        shown = "  ".join("-".rjust(12) if n is None else f"{n:12,.2f}" for n in numbers)
        yield f"{name:{width}}  {shown}"
