"""An argument parser that names the nearest option or command when a word is mistyped."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from mds_ckpt.spelling import did_you_mean

__all__ = ["Parser"]

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Says "did you mean" in its errors. Sub-commands made by it do so, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.set_defaults(parser=self)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse all of it; a command that takes ``rest`` gets what no option takes."""
        found, rest = self.parse_known_args(args, namespace)
        if hasattr(found, "rest"):
            found.rest = rest
        elif rest:
            found.parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return found

    def error(self, message: str) -> NoReturn:
        """Print usage and the message with a suggestion, and end with 2."""
        super().error(message + self._suggestion(message))

    def _suggestion(self, message: str) -> str:
        if (choice := _CHOICE.search(message)) is not None:
            return did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2]))
        if message.startswith("unrecognized arguments: "):
            words = message.removeprefix("unrecognized arguments: ").split()
            word = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
            return did_you_mean(word, self._option_string_actions)
        return ""
