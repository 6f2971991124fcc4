"""The picture that ``inspect`` draws of a checkpoint: a tree in which equal layers stand once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mds_ckpt.escape import printable

MOST_ROWS = 2000
"""Lines of tensors that are drawn."""
_MOST_BESIDE = 3
"""Tensors that stand on one line, such as a weight and its bias."""
_DEEPEST = 12
"""Dots of a name at which the tree branches."""
_SIZES = ("bytes", "KB", "MB", "GB", "TB")


def draw(summary: Mapping[str, Any]) -> Tree:
    """The tree of a summary from :func:`mds_ckpt.inspection.summary`."""
    title = Text.assemble((summary["title"], "bold"), f"  {printable(summary['path'])}")
    tree = Tree(title)
    tree.add(_progress(summary))
    tree.add(_model(summary["model"]))
    if summary["parallel"]:
        tree.add(Text("written on  " + _pairs(summary["parallel"])))
    sizes = tree.add(_sizes(summary))
    for state, totals in summary["states"].items():
        kinds = ", ".join(f"{d} {size(n)}" for d, n in totals["bytes_by_dtype"].items())
        sizes.add(Text(f"{printable(state)}  {totals['tensors']} tensors, {kinds}"))
    _add_tensors(tree, summary["tensors"])
    if summary["companions"]:
        tree.add(Text("beside them  " + ", ".join(map(printable, summary["companions"]))))
    for note in summary["notes"]:
        tree.add(Text(f"note  {printable(note, longest=2000)}", style="yellow"))
    for problem in summary["problems"]:
        where = problem["file"] if problem["tensor"] is None else problem["tensor"]
        line = f"problem  {printable(where)}: {printable(problem['reason'])}"
        tree.add(Text(line, style="bold red"))
    if not summary["problems"]:
        tree.add(Text("nothing is missing", style="green"))
    return tree


def _progress(summary: Mapping[str, Any]) -> Text:
    parts = ["no step" if summary["step"] is None else f"step {summary['step']:,}"]
    if summary["counters"]:
        parts.append(_pairs(summary["counters"]))
    if summary["producer"]:
        producer = f"{summary['producer']['name']} {summary['producer']['version']}"
        parts.append(f"by {printable(producer)}, {printable(summary['created'])}")
    return Text("  ".join(parts))


def _model(model: Mapping[str, Any]) -> Text:
    words = {
        "num_layers": "layers",
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "num_key_value_heads": "key/value heads",
        "ffn_hidden_size": "MLP width",
        "max_position_embeddings": "positions",
    }
    sizes = {word: model["config"].get(key) for key, word in words.items()}
    parts = [f"{value:,} {word}" for word, value in sizes.items() if type(value) is int]
    vocabulary = f"{model['vocab_size']:,} words"
    if model["padded_vocab_size"] is not None:
        vocabulary += f" (padded to {model['padded_vocab_size']:,})"
    tied = "tied" if model["tied_embeddings"] else "untied"
    return Text(f"model {printable(model['family'])}  {', '.join([*parts, vocabulary, tied])}")


def _sizes(summary: Mapping[str, Any]) -> Text:
    total = sum(totals["bytes"] for totals in summary["states"].values())
    text = f"{summary['num_params']:,} parameters, {size(total)}"
    if summary["files"]:
        text += f" in {len(summary['files'])} files"
    return Text(text)


def _pairs(members: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{printable(str(key))} {value:,}" if type(value) is int else printable(f"{key} {value}")
        for key, value in members.items()
    )


def size(nbytes: float) -> str:
    """Bytes in the unit that gives one to three digits before the point."""
    for unit in _SIZES:
        if nbytes < 1000 or unit == _SIZES[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("the loop returns")


# Tensors -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Branch:
    children: dict[str, _Branch] = field(default_factory=dict)
    leaf: str | None = None

    def leaves(self) -> dict[str, str]:
        """Children that are tensors and nothing else, if they are few enough for one line."""
        found = {
            name: child.leaf
            for name, child in self.children.items()
            if child.leaf is not None and not child.children
        }
        return found if len(found) <= _MOST_BESIDE else {}


def _add_tensors(tree: Tree, tensors: Sequence[Mapping[str, Any]]) -> None:
    root = _Branch()
    usual = Counter(tuple(tensor["states"]) for tensor in tensors).most_common(1)
    rows = _rows(tensors, usual=usual[0][0] if usual else ())
    for name, label in rows[:MOST_ROWS]:
        branch = root
        for part in name.split(".", maxsplit=_DEEPEST):
            branch = branch.children.setdefault(part, _Branch())
        branch.leaf = label
    _grow(tree, root)
    if len(rows) > MOST_ROWS:
        more = f"and {len(rows) - MOST_ROWS:,} more; pick some with --tensor, or use --json"
        tree.add(Text(more))


def _rows(tensors: Iterable[Mapping[str, Any]], *, usual: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names with ranges for numbers, such as ``layers.0-3``, and what all of them are.

    States are named where they are not the ``usual`` ones.
    """
    groups: dict[tuple[tuple[str, ...], str], list[tuple[int, ...]]] = {}
    for tensor in tensors:
        texts, numbers = _split_numbers(tensor["name"])
        states = tuple(tensor["states"])
        label = f"{tensor['dtype']} {tensor['shape']}"
        if states != usual:
            label += f" with {' '.join(map(printable, states))}"
        groups.setdefault((texts, label), []).append(numbers)
    return [(_joined(texts, numbers), label) for (texts, label), numbers in groups.items()]


def _split_numbers(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """``a.3.b`` as ``("a.", ".b")`` and ``(3,)``."""
    parts = re.split(r"(?<=\.)(\d{1,9})(?=\.)", name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _joined(texts: Sequence[str], numbers: Sequence[tuple[int, ...]]) -> str:
    ranges = [_ranges(set(values)) for values in zip(*numbers, strict=True)]
    return "".join(text + value for text, value in zip(texts, [*ranges, ""], strict=True))


def _ranges(values: set[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2,5``."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ",".join("-".join(map(str, run)) for run in runs)


def _grow(tree: Tree, branch: _Branch) -> None:
    for part, child in branch.children.items():
        name, last = part, child
        while last.leaf is None and len(last.children) == 1:
            ((part_below, last),) = last.children.items()
            name += f".{part_below}"
        label = Text(printable(name))
        leaves = last.leaves()
        if last.leaf is not None:
            label.append(f"  {last.leaf}", style="cyan")
        elif len(leaves) == len(last.children):
            label.append("  " + ", ".join(f"{printable(n)} {w}" for n, w in leaves.items()), "cyan")
            last = _Branch()
        _grow(tree.add(label), last)


def statistics_table(tensors: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each tensor and state with what :func:`mds_ckpt.inspection.statistics` found."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for column in ("norm", "min", "max", "mean", "nan", "inf", "zero"):
        table.add_column(column, justify="right")
    for tensor in tensors:
        for state, found in tensor["stats"].items():
            name = tensor["name"] if state == "weight" else f"{tensor['name']} ({state})"
            table.add_row(Text(printable(name)), *map(_number, found.values()))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
