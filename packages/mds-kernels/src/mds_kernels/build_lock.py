"""Locks that a killed build of a torch extension left behind: the next waits for them for ever.

torch and DeepSpeed compile extensions under one folder a user, with an empty file ``lock`` beside
each build. The builder keeps it open while it lives, so on Linux its process can be found.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildLock", "clear_stale", "extensions_folder", "find_locks"]

_STALE_SECONDS = 600.0  # younger ones may belong to a build on another host that shares the folder


@dataclass(frozen=True, slots=True)
class BuildLock:
    """One lock file and who holds it."""

    path: Path
    age_seconds: float
    holders: tuple[int, ...]
    """Process ids on this machine that have it open."""

    @property
    def stale(self) -> bool:
        """Whether nobody holds it and it is old enough to belong to nobody elsewhere."""
        return not self.holders and self.age_seconds > _STALE_SECONDS


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder under which torch builds extensions for this user."""
    if given := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torch_extensions"
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def find_locks(folder: Path, *, now: float) -> list[BuildLock]:
    """Return all build locks under a folder, oldest first; ``now`` in seconds of the epoch."""
    open_files = _open_files()
    locks = []
    for path in folder.rglob("lock"):
        holders = tuple(pid for pid, name in open_files if name == str(path.resolve()))
        locks.append(BuildLock(path, now - path.stat().st_mtime, holders))
    return sorted(locks, key=lambda lock: -lock.age_seconds)


def clear_stale(locks: Iterable[BuildLock]) -> list[BuildLock]:
    """Remove the stale ones and return those that remain."""
    remaining = []
    for lock in locks:
        if lock.stale:
            lock.path.unlink(missing_ok=True)
        else:
            remaining.append(lock)
    return remaining


def _open_files() -> list[tuple[int, str]]:
    """Return (process id, path) of every file that a visible process holds open under that name."""
    files = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = str(link.readlink())
        except OSError:  # the process ended, or belongs to somebody else
            continue
        if target.endswith("/lock"):
            files.append((int(link.parts[2]), target))
    return files
