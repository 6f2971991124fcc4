"""Make names from untrusted files safe to print: what a terminal acts on becomes an escape."""

from __future__ import annotations

LONGEST = 200
"""Characters of a printed name; the middle of a longer one is left out."""


def printable(text: str, *, longest: int = LONGEST) -> str:
    r"""``text`` with everything a terminal could act on as an escape, cut to ``longest``.

    Control characters, line breaks, lone surrogates, and characters that reorder or hide text
    (category Cf, such as the right-to-left override) are escaped; letters of any script stay.

    >>> printable("w\x1b[2J") == r"w\x1b[2J"
    True
    """
    if len(text) > longest:
        half = longest // 2 - 2
        text = f"{text[:half]}...{text[-half:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
