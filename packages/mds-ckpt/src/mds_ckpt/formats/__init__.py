"""The formats that can be opened, and the one function that opens any of them.

To add a format, add one module to this folder with a module-level ``FORMAT``::

    FORMAT = Format(name="litgpt", title="LitGPT", detect=detect, open=open_litgpt)

``detect(path)`` looks at names (and, where names don't settle it, at the first bytes) and never
raises on foreign files; ``open(path, options)`` returns a
:class:`~mds_ckpt.checkpoint.Checkpoint` with canonical names or raises
:class:`~mds_ckpt.errors.RejectedError`. ``plan`` is there if the format can also be written.
``check`` finds what is missing or damaged; without it, verifying reads every tensor. There is no
list to extend: modules are found by looking into the folder. They are imported before numpy is
needed, so they import it (and rich) inside functions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.checks import Problem, read_every_tensor
from mds_ckpt.errors import RejectedError, UnknownFormatError, UsageError
from mds_ckpt.escape import printable
from mds_ckpt.plan import Options, Plan
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.spelling import did_you_mean

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = ["Format", "Problem", "all_formats", "open_checkpoint"]

_MOST_LOOKED_AT = 1000
_MOST_NAMED = 5


def refuse_read_options(options: ReadOptions | None, format_name: str) -> None:
    """UsageError if the user answers a question that a format does not leave open."""
    asked = options or ReadOptions()
    if asked.qkv_layout is not None or asked.replicated != "assert":
        raise UsageError(
            f"{format_name} has one row order and no copies; "
            f"leave --qkv-layout and --replicated away"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A checkpoint format: how it is recognised and opened."""

    name: str
    """Word for ``--from`` and ``--to``."""
    title: str
    """What people call it."""
    detect: Callable[[Path], bool]
    """Whether a path looks like this format. Cheap; False for anything else, also for damage."""
    open: Callable[[Path, ReadOptions | None], Checkpoint]
    """Open a path of this format. What the user says of open questions is None if nothing."""
    plan: Callable[[Checkpoint, Options], Plan] | None = None
    """How to write a checkpoint in this format; None if that is not possible."""
    check: Callable[[Checkpoint, bool], Iterator[Problem]] = read_every_tensor
    """What is wrong with an opened checkpoint; reads data only if the second argument is true."""
    answers: tuple[str, ...] = ()
    """Facts of the model that its files may lack, and that ``--from NAME:FACT=VALUE`` states."""


def all_formats() -> Mapping[str, Format]:
    """Every format of this package by name, in alphabetical order of their modules."""
    found: dict[str, Format] = {}
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        candidate = getattr(importlib.import_module(module.name), "FORMAT", None)
        if isinstance(candidate, Format):
            found[candidate.name] = candidate
    return found


def open_checkpoint(
    path: str | Path,
    *,
    format: str | None = None,
    options: ReadOptions | None = None,
    key: KeySource | None = None,
    expect: str | None = None,
) -> Checkpoint:
    """Open a checkpoint of any known format.

    Args:
        path: A checkpoint's folder or file, or a folder of checkpoints (the newest good one is
            taken).
        format: Name of the format where it is ambiguous; by default it is detected. Facts of the
            model that its files don't hold may follow: ``"torch_dist:num_attention_heads=4"``.
        options: What the format leaves open, such as the row order of a fused projection.
        key: Where the key of an encrypted checkpoint comes from; a plain one needs none.
        expect: SHA-256 that the (plain) manifest of an mds checkpoint must have, so that an older
            state that somebody put back is refused.

    Returns:
        The checkpoint. No tensor data was read.

    Raises:
        UnknownFormatError: If nothing recognises the path.
        RejectedError: If the checkpoint is damaged, hostile, or needs what we can't do.
        SealedError: If it is encrypted and ``key`` does not open it, or ``expect`` differs.
    """
    path = Path(path)
    if key is not None or expect is not None:
        options = replace(options or ReadOptions(), key=key, expect=expect)
    checkpoint = _opened(path, format, options)
    if options is not None and options.adapter is not None:
        from mds_ckpt.adapter import with_adapter

        checkpoint = with_adapter(checkpoint, options.adapter)
    if expect is not None and checkpoint.format != "mds":
        raise UsageError(f"{checkpoint.format} has no manifest whose digest could be expected")
    return checkpoint


def _opened(path: Path, format: str | None, options: ReadOptions | None) -> Checkpoint:
    formats = all_formats()
    if format is not None:
        name, _, words = format.partition(":")
        if name not in formats:
            listed = f"no format is called '{name}'; known are {', '.join(formats)}"
            raise UsageError(listed + did_you_mean(name, formats))
        if words:
            facts = _facts(words, formats[name])
            options = replace(options or ReadOptions(), model=facts)
        return formats[name].open(path, options)
    if not path.exists():
        raise RejectedError(path, "there is no such file or folder", remedy="check the path")
    matching = [candidate for candidate in formats.values() if candidate.detect(path)]
    if len(matching) == 1:
        return matching[0].open(path, options)
    if matching:
        names = " and ".join(candidate.name for candidate in matching)
        raise RejectedError(path, f"it looks like {names}", remedy="say which one with --from")
    below = _checkpoints_below(path, list(formats.values()))
    if below:
        listed = ", ".join(f"'{printable(name)}'" for name in below[:_MOST_NAMED])
        more = f" and {len(below) - _MOST_NAMED} more" if len(below) > _MOST_NAMED else ""
        raise UnknownFormatError(
            path,
            f"it is no checkpoint itself; checkpoints lie in its folders {listed}{more}",
            remedy=f"name one of them, such as {printable(str(path / below[0]))}",
        )
    raise UnknownFormatError(
        path,
        f"no reader recognises it; known formats are {', '.join(formats)}",
        remedy="name the folder that holds the checkpoint's files, or say the format with --from",
    )


def _checkpoints_below(path: Path, formats: Iterable[Format]) -> list[str]:
    """Names of folders in ``path`` that some format recognises."""
    if not path.is_dir():
        return []
    entries = [entry for _, entry in zip(range(_MOST_LOOKED_AT), path.iterdir(), strict=False)]
    folders = sorted(entry for entry in entries if entry.is_dir() and not entry.is_symlink())
    return [each.name for each in folders if any(format.detect(each) for format in formats)]


def _facts(words: str, format: Format) -> dict[str, int | float | str]:
    """What ``FACT=VALUE,...`` behind a format's name says; UsageError if it makes no sense."""
    facts: dict[str, int | float | str] = {}
    for word in words.split(","):
        fact, is_given, value = word.partition("=")
        if fact not in format.answers or not is_given or fact in facts:
            known = (
                f"it takes {', '.join(format.answers)}" if format.answers else "it takes no facts"
            )
            raise UsageError(f"--from {format.name} can't be told '{word}'; {known}")
        facts[fact] = _number_or_word(value)
    return facts


def _number_or_word(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
