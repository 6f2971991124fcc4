"""Undoes the tokenization of WikiText's files, so that models see ordinary English.

WikiText was published split into words ("said , 1 @,@ 000"). Published perplexities are of the text
put together again by these rules, and of the number of words before that.
"""

from __future__ import annotations

import re

__all__ = ["detokenize"]

# In this order: later rules see what earlier ones made.
_RULES: tuple[tuple[str, str], ...] = (
    (r"s '", r"s'"),
    (r"/' [0-9]/", r"/'[0-9]/"),  # as it stands in the rules that everyone uses; it never matches
    (r" @-@ ", r"-"),
    (r" @,@ ", r","),
    (r" @\.@ ", r"."),
    *((rf" {re.escape(mark)} ", rf"{mark} ") for mark in ":;.!?,"),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", r"===="),
    (r"= = =", r"==="),
    (r"= =", r"=="),
    (r" ° ", r"°"),
    (r" \n", r"\n"),
    (r"\n ", r"\n"),
    (r" N ", r" 1 "),
    (r" 's", r"'s"),
)


def detokenize(text: str) -> str:
    """Put a text of WikiText together again.

    >>> detokenize("He paid 1 @,@ 000 dollars ( about half ) , which 's high .")
    "He paid 1,000 dollars (about half), which's high ."
    """
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text
