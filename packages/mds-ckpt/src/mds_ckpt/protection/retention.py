"""Which of many backups stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

__all__ = ["newest_steps"]

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def newest_steps(
    keep_last: int, *, keep_every: int | None = None
) -> Callable[[Sequence[str]], list[str]]:
    """A rule that keeps the checkpoints of the newest steps, and all that is no checkpoint.

    Args:
        keep_last: So many steps stay.
        keep_every: Steps that are a multiple of this stay as well.
    """

    def keep(names: Sequence[str]) -> list[str]:
        steps = {name: int(found[1]) for name in names if (found := _STEP.fullmatch(name))}
        newest = sorted(set(steps.values()), reverse=True)[:keep_last]
        return [
            name
            for name in names
            if name not in steps
            or steps[name] in newest
            or (keep_every is not None and steps[name] % keep_every == 0)
        ]

    return keep
