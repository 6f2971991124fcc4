r"""Make look-alikes plain before the search: digits of other scripts, wide signs, invisible ones.

People hide an address from robots with a zero-width space, and input methods write wide digits.
Text that was once a string of JSON or code has ``\n`` and ``\u0040`` where it had a line's end
and an at sign, which would join a value to the letter before it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate

from mds_data.privacy.findings import Finding

__all__ = ["Folded", "fold"]

# Zero of each script whose ten digits stand in a row: Arabic, Persian, Indic, Thai, wide ...
_ZEROS = (0x660, 0x6F0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xE50, 0xFF10)
_SIGNS = {
    0xFF20: "@",
    0xFE6B: "@",
    0xFF0E: ".",
    0xFF0D: "-",
    0xFF0B: "+",
    0xFF1A: ":",
    0xFF0F: "/",
    0xFF08: "(",
    0xFF09: ")",
    0xFF1D: "=",
    0x3000: " ",
    **dict.fromkeys((0x2011, 0x2212, 0xFE63), "-"),
    **dict.fromkeys((0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008, 0x200A), " "),
}
_PLAIN = {
    **{zero + digit: str(digit) for zero in _ZEROS for digit in range(10)},
    **{0xFF21 + letter: chr(0x41 + letter) for letter in range(26)},
    **{0xFF41 + letter: chr(0x61 + letter) for letter in range(26)},
    **_SIGNS,
}
_LOOK_ALIKES = re.compile(f"[{''.join(map(chr, _PLAIN))}]")
_HIDDEN = "\u00ad\u200b-\u200f\u2060-\u2064\ufeff"
_ESCAPED = re.compile(r"\\(?:[nrt]|u00(?:2[0-9A-Fa-f]|3[A-Fa-f]|40))")
_ESCAPED_SPACE = {"n": "\n", "r": "\r", "t": "\t"}
_INVISIBLE, _VISIBLE = re.compile(f"[{_HIDDEN}]"), re.compile(f"[^{_HIDDEN}]+")


class Folded:
    """A text made plain, and the way back to where its characters stood."""

    def __init__(self, text: str) -> None:
        plain = text if text.isascii() else text.translate(_PLAIN)
        plain = _ESCAPED.sub(_unescaped, plain)
        parts = [match.span() for match in _VISIBLE.finditer(plain)]
        self.text = "".join(plain[start:end] for start, end in parts)
        self._starts = [start for start, _ in parts]
        self._places = list(accumulate((end - start for start, end in parts), initial=0))

    def original(self, finding: Finding) -> Finding:
        """The finding at its place in the text that was given."""
        return Finding(self._place(finding.start), self._place(finding.end - 1) + 1, finding.kind)

    def _place(self, position: int) -> int:
        part = bisect_right(self._places, position) - 1
        return self._starts[part] + position - self._places[part]


def fold(text: str) -> Folded | None:
    """The text made plain; None if it is so already."""
    escaped = "\\" in text and _ESCAPED.search(text)
    if not escaped and (
        text.isascii() or not (_LOOK_ALIKES.search(text) or _INVISIBLE.search(text))
    ):
        return None
    return Folded(text)


def _unescaped(match: re.Match[str]) -> str:
    """What the escape stands for, filled up to its length with signs that are left out."""
    escape = match[0][1:]
    plain = _ESCAPED_SPACE.get(escape) or chr(int(escape[1:], 16))
    return plain + "\u200b" * len(escape)
