"""The recipes of this package: what there is, and how one becomes settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mds_train.config.loading import Settings, read_toml
from mds_train.errors import InputError

__all__ = ["Recipe", "all_recipes", "find_recipe"]

_BASES = frozenset({"base", "gpt3-base", "llama-base"})
_GPUS = re.compile(r"# GPUs: (\d+) of (\d+) GB")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One configuration, and the machine that it is laid out for."""

    name: str
    title: str
    gpus: int
    gpu_gigabytes: int
    path: Path

    def settings(self) -> Settings:
        """Its settings, those of its bases among them. data.store is not set."""
        return read_toml(self.path)


def all_recipes() -> Iterator[Recipe]:
    """Every recipe, by name."""
    folder = Path(str(files(__package__))) / "library"
    for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem):
        if path.stem not in _BASES:
            yield _read(path)


def find_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        InputError: If there is none; the sentence names the nearest ones.
    """
    recipes = {recipe.name: recipe for recipe in all_recipes()}
    if name in recipes:
        return recipes[name]
    near = difflib.get_close_matches(name, recipes, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "see `mds-train recipes list`."
    raise InputError(f"There is no recipe {name!r}; {hint}")


def _read(path: Path) -> Recipe:
    """What the comment at the top of a recipe says: a title, then the machine."""
    title: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if match := _GPUS.fullmatch(line):
            return Recipe(
                name=path.stem,
                title=" ".join(title),
                gpus=int(match[1]),
                gpu_gigabytes=int(match[2]),
                path=path,
            )
        title.append(line.removeprefix("# "))
    raise ValueError(f"{path}: the line '# GPUs: N of M GB' is missing.")
