"""How a difficulty grows while training goes on: DeepSpeed's curriculum schedules as functions.

The progress is counted in whatever unit the schedule was given: steps or samples.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

__all__ = ["DiscretePacing", "Pacing", "RootPacing", "pacing_from_deepspeed"]

_MOST_LEVELS = 4096


class Pacing(Protocol):
    """A difficulty that never falls while the progress grows."""

    def at(self, progress: int) -> int:
        """The difficulty after so much progress."""
        ...

    def levels(self) -> list[tuple[int, int]]:
        """Each difficulty that occurs, with the first progress at which it holds."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RootPacing:
    """Grow from ``minimum`` to ``maximum`` along a root of the progress; degree 1 is a line."""

    minimum: int
    maximum: int
    total: int
    """Progress at which the maximum is reached."""
    step: int = 8
    """Difficulties are multiples of it, but for the maximum."""
    degree: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ValueError(
                f"minimum ({self.minimum}) must lie from 0 to maximum ({self.maximum})"
            )
        if self.total < 1 or self.step < 1 or not self.degree > 0:
            raise ValueError(
                f"total ({self.total}) and step ({self.step}) must be at least 1, degree "
                f"({self.degree}) above 0"
            )
        if (self.maximum - self.minimum) // self.step > _MOST_LEVELS:
            raise ValueError(
                f"from {self.minimum} to {self.maximum} by {self.step} are more than "
                f"{_MOST_LEVELS} difficulties; make the step larger"
            )

    def at(self, progress: int) -> int:
        """The difficulty after so much progress."""
        share = (float(progress) / self.total) ** (1.0 / self.degree)
        reached = int(share * (self.maximum - self.minimum) + self.minimum)
        return min(reached - reached % self.step, self.maximum)

    def levels(self) -> list[tuple[int, int]]:
        """Each difficulty that occurs, with the first progress at which it holds."""
        found = [(self.at(0), 0)]
        span = max(self.maximum - self.minimum, 1)
        # A maximum that is no multiple of the step is reached a little after `total`.
        end = int(self.total * (1 + self.step / span) ** self.degree) + 1
        while found[-1][0] < self.maximum:
            difficulty, begin = found[-1]
            begin = bisect_left(range(end + 1), difficulty + 1, lo=begin, key=self.at)
            if begin > end:
                break  # minimum and maximum are equal and no multiple of the step
            found.append((self.at(begin), begin))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscretePacing:
    """Difficulty ``difficulties[i]`` up to and with progress ``ends[i]``; the last one for ever."""

    difficulties: tuple[int, ...]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        rising = list(self.ends) == sorted(set(self.ends))
        if len(self.ends) != len(self.difficulties) - 1 or not rising:
            raise ValueError(
                f"{len(self.difficulties)} difficulties need one end less, each later than the one "
                f"before, not {list(self.ends)}"
            )
        if list(self.difficulties) != sorted(self.difficulties):
            raise ValueError(f"difficulties must not fall: {list(self.difficulties)}")

    def at(self, progress: int) -> int:
        """The difficulty after so much progress."""
        return self.difficulties[bisect_left(self.ends, progress)]

    def levels(self) -> list[tuple[int, int]]:
        """Each difficulty that occurs, with the first progress at which it holds."""
        begins = [0, *(end + 1 for end in self.ends)]
        return list(zip(self.difficulties, begins, strict=True))

    @classmethod
    def constant(cls, difficulty: int) -> Self:
        """One difficulty from the beginning on."""
        return cls(difficulties=(difficulty,), ends=())


def pacing_from_deepspeed(config: Mapping[str, Any], *, unit: int = 1) -> Pacing:
    """The schedule that DeepSpeed's ``curriculum_learning`` describes.

    Args:
        config: With ``min_difficulty``, ``max_difficulty``, ``schedule_type`` and
            ``schedule_config``.
        unit: Progress of one of DeepSpeed's steps; ``global_batch_size`` to count samples.

    Raises:
        ValueError: The schedule is of a kind that is not known, or a value is missing.
    """
    try:
        kind, details = config["schedule_type"], config["schedule_config"]
        if kind == "fixed_discrete":
            return DiscretePacing(
                difficulties=tuple(details["difficulty"]),
                ends=_ends(details["max_step"], unit=unit),
            )
        if kind in ("fixed_linear", "fixed_root"):
            return RootPacing(
                minimum=config["min_difficulty"],
                maximum=config["max_difficulty"],
                total=details["total_curriculum_step"] * unit,
                step=details["difficulty_step"],
                degree=details["root_degree"] if kind == "fixed_root" else 1.0,
            )
    except KeyError as error:
        raise ValueError(f"the curriculum lacks {error.args[0]!r}") from None
    raise ValueError(
        f"schedule_type {kind!r} is none of fixed_linear, fixed_root and fixed_discrete"
    )


def _ends(steps: Sequence[int], *, unit: int) -> tuple[int, ...]:
    """Last progress of each step; counted in samples, all samples of a step belong to it."""
    return tuple(step * unit + unit - 1 for step in steps)
