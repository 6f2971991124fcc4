"""Logging of one process: every rank writes logs/rank-N.log, rank 0 also speaks on the console.

Code anywhere in the packages says ``logging.getLogger(__name__).info("A sentence.")`` and nothing
else; this is the one place that decides where it goes. The rank's file gets everything with
tracebacks, as text or as one JSON object a line; the console gets our own messages and other
libraries' warnings, without tracebacks.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FILE_ONLY", "ConsoleHandler", "JsonFormatter", "logging_to"]

FILE_ONLY: Mapping[str, object] = {"file_only": True}
"""Pass as ``extra=`` what belongs into the file but not on the console, such as a traceback."""

_OUR_PREFIX = "mds_"
_TEXT_FORMAT = "%(asctime)s %(levelname)s rank %(rank)d %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, rank, logger, message, traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        moment = datetime.fromtimestamp(record.created, tz=UTC)
        entry: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "rank": getattr(record, "rank", 0),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class ConsoleHandler(logging.Handler):
    """Prints messages through the run's console, so that they stand above a progress display."""

    def __init__(self, console: Console, *, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._console = console

    def filter(self, record: logging.LogRecord) -> bool:
        """Let our own messages through from INFO, those of other libraries from WARNING."""
        ours = record.name.startswith(_OUR_PREFIX)
        # Python's warnings speak to developers; the file has them.
        theirs_matter = record.levelno >= logging.WARNING and record.name != "py.warnings"
        if getattr(record, "file_only", False) or not (ours or theirs_matter):
            return False
        return bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message: plain for information, with its level in front otherwise."""
        message = record.getMessage()
        if record.levelno > logging.INFO:
            message = f"{record.levelname.lower()}: {message}"
        style = "yellow" if record.levelno == logging.WARNING else ""
        style = "red" if record.levelno >= logging.ERROR else style
        from rich.text import Text

        # A style given to print() itself would colour the progress bar too.
        self._console.print(Text(message, style=style), soft_wrap=True)


class _FileHandler(logging.FileHandler):
    """Loses lines silently when the disk is full: the run itself reports that, once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the library's name)
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self._rank
        return True


@contextmanager
def logging_to(
    run_dir: Path | None,
    *,
    rank: int,
    console: Console | None,
    json_lines: bool = False,
    level: int = logging.INFO,
) -> Iterator[None]:
    """Send this process's log to ``run_dir/logs/rank-N.log`` and, if given, to the console.

    Args:
        run_dir: folder of the run; None writes no file.
        rank: this process's rank; it stands in every line and in the file's name.
        console: rank 0's console; None on the other ranks.
        json_lines: write the file as JSON lines instead of text.
        level: the least level that is kept.
    """
    handlers: list[logging.Handler] = []
    if run_dir is not None:
        handlers.append(_file_handler(run_dir, rank=rank, json_lines=json_lines))
    if console is not None:
        handlers.append(ConsoleHandler(console, level=level))
    root = logging.getLogger()
    earlier_level = root.level
    root.setLevel(level)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(capture=True)
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        root.setLevel(earlier_level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def _file_handler(run_dir: Path, *, rank: int, json_lines: bool) -> logging.Handler:
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = _FileHandler(folder / f"rank-{rank}.log", encoding="utf-8")
    handler.setFormatter(JsonFormatter() if json_lines else logging.Formatter(_TEXT_FORMAT))
    handler.addFilter(_RankFilter(rank))
    return handler
