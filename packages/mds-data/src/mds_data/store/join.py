"""Join stores into one that has its own files: the bytes that one writer of all would have written.

`merge` needs no copy but keeps segments; here the tokens are copied, and neither gaps nor
segments are left. The stores of a job array come in the order of its tasks, whatever was given.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mds_data.errors import StoreError
from mds_data.store.columns import column_labels
from mds_data.store.download import local_sources
from mds_data.store.folder import read_manifest
from mds_data.store.merge import common_vocabulary
from mds_data.store.origins import kept_inputs
from mds_data.store.records import Manifest
from mds_data.store.repack import copy_documents, kept_tokenizer
from mds_data.store.split import split_ranges
from mds_data.store.token_store import TokenStore, open_store
from mds_data.store.writer import StoreWriter

__all__ = ["join_stores", "task_order"]

_TASK = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_EXAMPLES = 20
_COUNTED = {"report", "redaction", "task"}
"""What tasks of one job array have each for itself."""


def task_order(sources: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The sources, in the order of their tasks if a job array wrote them.

    Raises:
        StoreError: A task is missing, stands there twice, or is of another job array.
    """
    paths = [Path(source) for source in sources]
    tasks = [_task(path) for path in paths]
    known = [task for task in tasks if task is not None]
    if not known:
        return paths
    counts = {count for _, count in known}
    if len(known) < len(paths) or len(counts) > 1:
        raise StoreError(
            f"{', '.join(map(str, paths))}: some are tasks of a job array and others are not, or "
            f"of another one; merge the tasks of one job array by themselves"
        )
    numbers = [number for number, _ in known]
    missing = sorted(set(range(1, counts.pop() + 1)) - set(numbers))
    if missing or len(set(numbers)) < len(numbers):
        what = f"task {missing[0]} is missing" if missing else "a task stands there twice"
        raise StoreError(f"{', '.join(map(str, paths))}: {what}; give the store of every task once")
    return [path for _, path in sorted(zip(numbers, paths, strict=True))]


def _task(path: Path) -> tuple[int, int] | None:
    if not path.is_dir():
        return None
    transforms = read_manifest(path)[0].provenance.get("transforms") or [{}]
    text = transforms[0].get("task") if isinstance(transforms[0], dict) else None
    match = _TASK.fullmatch(text) if isinstance(text, str) else None
    return (int(match[1]), int(match[2])) if match else None


def join_stores(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    split: str | None = None,
) -> Manifest:
    """Copy stores, one after the other, into a new one without segments.

    Args:
        sources: Stores, in folders or at URLs, or Megatron pairs, with the same vocabulary, end
            token and tokenizer.
        target: The new store's folder; it must not exist yet.
        split: The split of all documents together; that of the sources if they agree.

    Raises:
        StoreError: The sources don't go together.
    """
    with ExitStack() as stack:
        paths = task_order(stack.enter_context(local_sources(sources, beside=target)))
        vocab_size = common_vocabulary(paths)
        stores = [stack.enter_context(open_store(path)) for path in paths]
        return _join(stores, target, vocab_size=vocab_size, split=split)


def _join(
    stores: Sequence[TokenStore],
    target: str | os.PathLike[str],
    *,
    vocab_size: int,
    split: str | None,
) -> Manifest:
    first = stores[0].manifest
    splits = [store.manifest.split for store in stores]
    kept = splits[0] if all(each == splits[0] for each in splits) else None
    _check_extras(stores)
    columns = {name: stores[0].column(name).dtype for name in stores[0].columns}
    with StoreWriter(
        target,
        vocab_size=vocab_size,
        eod_id=first.eod_id,
        layout=first.layout,
        split=kept if split is None else split_ranges(split),
        tokenizer=kept_tokenizer(stores[0]),
        provenance=_provenance([kept_inputs(store) for store in stores]),
        columns=columns,
        sentences=stores[0].has_sentences,
    ) as writer:
        for store in stores:
            for name in columns:
                writer.add_labels(name, column_labels(store, name).values())
            copy_documents(store, writer, first=0, stop=len(store))
        if not writer.num_documents:
            raise StoreError(f"{target}: there is no document in any of the sources")
        return writer.commit()


def _check_extras(stores: Sequence[TokenStore]) -> None:
    """Raise StoreError if some stores keep columns or sentences that others lack."""
    kinds = {(store.columns, store.has_sentences) for store in stores}
    if len(kinds) > 1:
        raise StoreError(
            f"{', '.join(str(store.path) for store in stores)}: keep different columns, or "
            f"sentences in part only; write them alike, or merge without --rewrite"
        )


def _provenance(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where all documents come from; one run's facts if the parts are its tasks."""
    inputs = [each for part in parts for each in part.get("inputs", ())]
    transforms = [part.get("transforms", []) for part in parts]
    asked = [
        {key: value for key, value in each[0].items() if key not in _COUNTED}
        for each in transforms
        if len(each) == 1 and "task" in each[0]
    ]
    if len(asked) == len(parts) and all(each == asked[0] for each in asked):
        reports = [each[0].get("report", {}) for each in transforms]
        run = {**asked[0], "report": _joined(reports)}
        if all("redaction" in each[0] for each in transforms):
            run["redaction"] = _summed([each[0]["redaction"] for each in transforms])
        return {"inputs": inputs, "transforms": [run]}
    join = {"name": "join", "arguments": {"sources": len(parts)}}
    return {"inputs": inputs, "transforms": [*transforms[0], join]}


def _summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts, and groups of counts, added up by name."""
    result: dict[str, Any] = {}
    for part in parts:
        for name, found in part.items():
            known = result.get(name)
            if isinstance(found, Mapping):
                result[name] = _summed([known or {}, found])
            else:
                result[name] = (known or 0) + found
    return result


def _joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts added up, and the first places of all."""
    result: dict[str, Any] = {}
    for report in reports:
        for kind, found in report.items():
            known = result.setdefault(kind, {"count": 0, "first": []})
            known["count"] += found["count"]
            known["first"] = [*known["first"], *found["first"]][:_EXAMPLES]
    return dict(sorted(result.items()))
