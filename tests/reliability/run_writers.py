"""What a training run writes beside its checkpoints, for the processes that trace commands.

main(["back-up", RUN, PLACE]), main(["settings", RUN])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mds_train.config.loading import Setting
from mds_train.saving.backup import back_up
from mds_train.session import write_config

SEED = 71


def back_up_run(run: str, place: str) -> None:
    """Copy the third step, and the settings, to a second place."""
    back_up(Path(run) / "checkpoints" / "step-3", Path(place), keep_last=2, keep_every=None)


def settings(run: str) -> None:
    """Keep the settings of a run that begins."""
    write_config(Path(run), {"train.seed": Setting(value=SEED, origin="command line")})


WRITERS: Mapping[str, Callable[..., None]] = {"back-up": back_up_run, "settings": settings}


def main(argv: Sequence[str]) -> int:
    """Run a writer as a command would be run."""
    WRITERS[argv[0]](*argv[1:])
    return 0
