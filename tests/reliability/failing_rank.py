"""One rank of a run that dies or stops at a chosen place; started by test_lost_ranks.

python failing_rank.py CONFIG.toml FAILING_RANK PLACE SIGNAL
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from mds_train import cli
from mds_train.engines.deepspeed import DeepSpeedEngine

STEP = 3
"""Place and step of the failure: the third step, or the save or validation after it."""


def fail_before(owner: Any, name: str, *, number: signal.Signals, call: int) -> None:
    """Let this process die or stop before a call of a function."""
    plain: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return plain(*args, **kwargs)

    setattr(owner, name, failing)


def main() -> int:
    config, failing_rank, place, name = sys.argv[1:]
    if os.environ["RANK"] == failing_rank:
        import mds_train.loop
        import mds_train.saving.saver

        places = {
            "forward": (DeepSpeedEngine, "accumulate", STEP),
            "all-reduce": (DeepSpeedEngine, "step", STEP),
            "save": (mds_train.saving.saver, "write_snapshot", 1),
            "eval": (mds_train.loop, "evaluate", 1),
        }
        owner, function, call = places[place]
        fail_before(owner, function, number=signal.Signals[name], call=call)
    return cli.main(["run", config])


if __name__ == "__main__":
    sys.exit(main())
