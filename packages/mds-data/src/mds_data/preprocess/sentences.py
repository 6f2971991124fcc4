"""Cut a text into sentences by rules: nothing to download, and the same cuts everywhere.

A sentence ends at ``. ! ?`` (and their full-width kin) before white space and what can begin
another one, or at a blank line. English abbreviations, initials and enumerations end none.
"""

from __future__ import annotations

import re

__all__ = ["split_sentences"]

_TITLES = "mr mrs ms dr prof sr jr st gen col sgt capt lt rev hon"
_LATIN = "vs etc e.g i.e cf al eds approx est a.m p.m ph.d"
_NAMES = "inc ltd co corp dept univ u.s u.k"
_MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"
_ABBREVIATIONS = frozenset(f"{_TITLES} {_LATIN} {_NAMES} {_MONTHS}".split())
_REFERENCES = "no nos p pp vol ch sec fig figs eq eqs"
_BEFORE_NUMBERS = frozenset(_REFERENCES.split())
_NEAR = 64
# Possessive and anchored at the first stop of a run: a line of a million dots takes linear time.
_BREAK = re.compile(
    r"""
    (?P<blank> \n[ \t\r]*+\n\s*+ )                                  # a paragraph ends
    | (?P<wide> [\u3002\uff01\uff1f\uff61]+[\u300d\u300f\u201d\u2019)]* \s* )  # no space needed
    | (?P<end> (?<![.!?\u2026]) [.!?\u2026]++ [\"'\u201d\u2019)\]]*+ )
      \s++ (?= ["'\u201c\u2018(\[]* (?P<next> \S) )
    """,
    re.VERBOSE,
)


def split_sentences(text: str, *, keep_newlines: bool = False, english: bool = True) -> list[str]:
    """Return the sentences of a text.

    Args:
        text: The text.
        keep_newlines: Leave the white space after a sentence in it, so that all sentences together
            are the text; it is cut off otherwise.
        english: Let no English abbreviation end a sentence.
    """
    sentences, start = [], 0
    for match in _BREAK.finditer(text):
        if match["end"] is not None and not _ends(
            text[max(start, match.start() - _NEAR) : match.start()], match, english=english
        ):
            continue
        sentences.append(text[start : match.end()])
        start = match.end()
    sentences.append(text[start:])
    if keep_newlines:
        return [sentence for sentence in sentences if sentence]
    return [cut for sentence in sentences if (cut := sentence.strip())]


def _ends(before: str, match: re.Match[str], *, english: bool) -> bool:
    """True if this stop ends a sentence, given what stands before and after it."""
    following = match["next"]
    if following.islower():
        return False
    if not match["end"].startswith("."):
        return True
    words = before.rsplit(maxsplit=1)
    word = words[-1].lstrip("\"'(\u201c\u2018[") if words else ""
    if len(word) <= 1 and (not word or word.isalpha() or word.isdigit()):
        return False  # an initial, or "1." before an item
    known = _BEFORE_NUMBERS if following.isdigit() else _ABBREVIATIONS
    return not (english and word.lower() in known)
