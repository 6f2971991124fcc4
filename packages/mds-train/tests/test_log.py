from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from mds_train.log import FILE_ONLY, logging_to


def console() -> Console:
    return Console(file=io.StringIO(), highlight=False, width=40)


def shown(printed: Console) -> str:
    assert isinstance(printed.file, io.StringIO)
    return printed.file.getvalue()


def test_each_rank_writes_its_own_file_and_only_the_given_console_speaks(tmp_path: Path) -> None:
    printed = console()
    with logging_to(tmp_path, rank=0, console=printed):
        logging.getLogger("mds_train.loop").info("A sentence that is longer than forty letters.")
    with logging_to(tmp_path, rank=1, console=None):
        logging.getLogger("mds_train.loop").info("Other.")

    assert shown(printed) == "A sentence that is longer than forty letters.\n"
    assert "INFO rank 0 mds_train.loop: A sentence" in (tmp_path / "logs/rank-0.log").read_text()
    assert "rank 1 mds_train.loop: Other." in (tmp_path / "logs/rank-1.log").read_text()


def test_the_console_hears_other_libraries_only_from_warnings_on(tmp_path: Path) -> None:
    printed = console()
    with logging_to(tmp_path, rank=0, console=printed):
        logging.getLogger("other").info("chatter")
        logging.getLogger("other").warning("careful")
        logging.getLogger("py.warnings").warning("deprecated")
        logging.getLogger("mds_train").error("a trace", extra=FILE_ONLY)

    assert shown(printed) == "warning: careful\n"
    text = (tmp_path / "logs/rank-0.log").read_text()
    assert all(word in text for word in ("chatter", "careful", "deprecated", "a trace"))


def test_json_lines_hold_the_message_and_the_traceback(tmp_path: Path) -> None:
    with logging_to(tmp_path, rank=3, console=None, json_lines=True):
        try:
            raise ValueError("bad")
        except ValueError:
            logging.getLogger("mds_train").exception("It failed.")

    entry = json.loads((tmp_path / "logs/rank-3.log").read_text())
    assert (entry["level"], entry["rank"], entry["message"]) == ("error", 3, "It failed.")
    assert "ValueError: bad" in entry["traceback"]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = list(logging.getLogger().handlers), logging.getLogger().level
    with pytest.raises(ValueError, match="stop"), logging_to(tmp_path, rank=0, console=console()):
        raise ValueError("stop")

    assert (list(logging.getLogger().handlers), logging.getLogger().level) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_loses_lines_but_prints_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").symlink_to("/dev/full")

    with logging_to(tmp_path, rank=0, console=None):
        logging.getLogger("mds_train").info("A line.")

    assert capsys.readouterr() == ("", "")
