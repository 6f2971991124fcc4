from __future__ import annotations

from pathlib import Path

import pytest

from mds_train.errors import InputError
from mds_train.generate.prompts import read_prompts


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = written(tmp_path / "p.txt", "One\n\nTwo \\n lines\r\nÆ".encode())

    assert list(read_prompts(path)) == ["One", "Two \n lines", "Æ"]


def test_json_lines_name_their_prompt(tmp_path: Path) -> None:
    path = written(tmp_path / "p.jsonl", b'{"prompt": "a\\nb", "id": 1}\n\n{"prompt": ""}\n')

    assert list(read_prompts(path)) == ["a\nb", ""]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: there is no text "prompt"'),
        (b"[1]\n", "line 1: there is no text"),
        (b"{\n", "line 1: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'{"prompt": "\xff"}\n', "not a text in UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = written(tmp_path / "p.jsonl", content)

    with pytest.raises(InputError, match=message):
        list(read_prompts(path))
