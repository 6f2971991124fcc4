"""The YAML of configurations is read as usual; whatever can do more than hold values is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_ckpt.files.plain_yaml import YamlError, parse

BLOCK = """--- # a dump
name: tiny
hf_config:
  org: none
  name: 'it''s # no comment'
numbers:
- 1
- 2.5e-4
- - 3
  - .5
layers:
  - kind: a
    size: 0
  - kind: b
empty:
flags: {on: true, off: False, none: ~, list: [1, "x, y",]}
url: http://host/x:y  # a comment
"""


def test_block_and_flow_forms() -> None:
    assert parse(BLOCK.encode()) == {
        "name": "tiny",
        "hf_config": {"org": "none", "name": "it's # no comment"},
        "numbers": [1, 0.00025, [3, 0.5]],
        "layers": [{"kind": "a", "size": 0}, {"kind": "b"}],
        "empty": None,
        "flags": {"on": True, "off": False, "none": None, "list": [1, "x, y"]},
        "url": "http://host/x:y",
    }


def test_json_with_comments_and_trailing_commas() -> None:
    text = b'# c\n{\n  "a": 1e-4, # d\n  b: [[["global"], 12]],\n  "c": {"d": true,},\n}\n'

    assert parse(text) == {"a": 1e-4, "b": [[["global"], 12]], "c": {"d": True}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x 1", "line 1: '&x 1' is more than plain YAML"),
        ("a: *x", "more than plain"),
        ("a: !!python/object/apply:os.system [x]", "more than plain"),
        ("a: |\n  text", "more than plain"),
        ("a: 1\nb: 2\na: 3", "line 3: 'a' stands there twice"),
        ("{a: 1, a: 2}", "twice"),
        ("a: 1\n   b: 2", "indentation fits nothing"),
        ("a:\n\tb: 1", "tab"),
        ("{a: 1", "neither a comma"),
        ("a: [1, 2]]", "something follows"),
        ("just words", "neither a key"),
        ("[" * 10_000, "nested too deeply"),
        ("- " * 10_000 + "x", "nested too deeply"),
        ('a: "broken', "broken"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(YamlError, match=words.replace("'", ".").replace("*", ".")):
        parse(text.encode())


def test_bytes_that_are_no_text_or_too_many() -> None:
    with pytest.raises(YamlError, match="not UTF-8"):
        parse(b"a: \xff")
    with pytest.raises(YamlError, match="bytes"):
        parse(b" " * (5 << 20))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab12 :-#{}[],\"'\n\t&*!|>%", max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    with contextlib.suppress(YamlError):
        parse(text.encode())
