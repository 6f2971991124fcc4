"""What the numbered layers of a checkpoint are, told by what they hold.

Forks of Megatron-DeepSpeed number them differently (embedding 0 or 1, blocks from 2 or 3, final
norm one, two or three behind them), so numbers alone say nothing. The layers are files of their
own; where a pipeline has experts, each rank's model file holds those of its stage; and GPT-NeoX
without stages keeps them all there, as ``sequential.N``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mds_ckpt.megatron.naming import Named, block_name, module_name

__all__ = ["PipelineNames", "numbered_keys"]

_NUMBERED = re.compile(r"(?:sequential\.)?(\d{1,6})\.(.+)")
_SEQUENTIAL = "sequential."

_TIED = "tied_modules."
_WORDS = "tied_modules.embed.word_embeddings.weight"


def numbered_keys(names: Iterable[str]) -> dict[int, list[str]]:
    """The keys of each layer by its number, from names such as ``3.key`` or ``sequential.3.key``.

    Empty if a model numbers no layers at the front of its names.
    """
    found: dict[int, list[str]] = {}
    for name in names:
        if (match := _NUMBERED.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), []).append(match[2])
    return found


class PipelineNames:
    """Canonical names for the keys of layers, and for ``N.key`` in optimizer files.

    Args:
        files: The keys of each layer, by the layer's number; empty for a model without numbers.
    """

    def __init__(self, files: Mapping[int, Sequence[str]]) -> None:
        self._files = files
        blocks = [layer for layer, keys in sorted(files.items()) if _is_block(keys)]
        self._blocks = {layer: number for number, layer in enumerate(blocks)}
        self._known: dict[str, Named | None] = {}

    def __bool__(self) -> bool:
        """Whether the model's layers are numbered at all."""
        return bool(self._files)

    def is_block(self, layer: int) -> bool:
        """Whether a layer's file is one of a transformer block."""
        return layer in self._blocks

    def missing_blocks(self) -> list[int]:
        """Numbers between the first and the last block that have no file."""
        blocks = list(self._blocks)
        return sorted(set(range(blocks[0], blocks[-1] + 1)) - set(blocks)) if blocks else []

    def of_file(self, layer: int, key: str) -> Named | None:
        """The canonical name of a layer file's key; None if it is unknown."""
        number = self._blocks.get(layer)
        if number is not None:
            inner = block_name(key)
            return inner and replace(inner, name=f"decoder.layers.{number}.{inner.name}")
        norm = key.removeprefix("norm.")
        if norm in ("weight", "bias", "scale"):
            part = "weight" if norm == "scale" else norm
            return Named(f"decoder.final_layernorm.{part}", "replicated")
        return module_name(key)

    def canonical(self, name: str) -> Named | None:
        """The canonical name of a parameter as the engine calls it."""
        if name not in self._known:  # every rank's files name the same parameters
            self._known[name] = self._canonical(name)
        return self._known[name]

    def _canonical(self, name: str) -> Named | None:
        if name.startswith(_TIED):
            return module_name(name.split(".", 2)[2])
        layer, _, key = name.removeprefix(_SEQUENTIAL).partition(".")
        return self.of_file(int(layer), key) if layer.isdecimal() and key else None

    def flat_names(self) -> Iterator[str]:
        """Every parameter as the engine calls it, but for tied ones."""
        for layer, keys in sorted(self._files.items()):
            for key in keys:
                yield f"{layer}.{key}"

    @staticmethod
    def is_tied(name: str) -> bool:
        """Whether several stages hold copies that are kept equal."""
        return name == _WORDS

    @staticmethod
    def is_dead_copy(name: str) -> bool:
        """Whether, on a later stage, this is a copy that was never trained: all but the words'."""
        return name.startswith(_TIED) and name != _WORDS


def _is_block(keys: Sequence[str]) -> bool:
    return any(
        key.startswith(("input_layernorm.", "self_attention.", "attention.")) for key in keys
    )
