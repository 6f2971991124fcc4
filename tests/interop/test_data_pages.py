"""The page that makes samples works as it stands, one block after the other in one folder."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import tokenizers

from mds_data.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "make-samples.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's own inputs lie: two languages, conversations, a tokenizer with marks."""
    monkeypatch.chdir(tmp_path)
    Path("train.en").write_text("one\ntwo\n")
    Path("train.de").write_text("eins\nzwei\n")
    chat = {"prompt": "One and one?", "completion": "Two."}
    Path("chat.jsonl").write_text(json.dumps(chat) + "\n")
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
    model = tokenizers.models.WordPiece({m: n for n, m in enumerate(marks)}, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save("wordpiece-marks.json")
    return tmp_path


@pytest.mark.timeout(300)
def test_every_block_runs(folder: Path) -> None:
    kinds = []
    for kind, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        kinds.append(kind)
        if kind == "python":
            Path("example.py").write_text(code)
            runpy.run_path("example.py")
            continue
        for line in code.splitlines():
            program, *arguments = shlex.split(line.removeprefix("$ "))
            assert program == "mds-data"
            assert main(arguments) == 0, line
    assert kinds.count("console") == 5
    assert kinds.count("python") == 5
