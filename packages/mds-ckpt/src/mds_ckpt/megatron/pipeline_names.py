"""What the numbered layers of a pipeline checkpoint are, told by what they hold.

Forks of Megatron-DeepSpeed number them differently (embedding 0 or 1, blocks from 2 or 3, final
norm one, two or three behind them), so numbers alone say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mds_ckpt.megatron.naming import Named, block_name, module_name

__all__ = ["PipelineNames"]

_TIED = "tied_modules."
_WORDS = "tied_modules.embed.word_embeddings.weight"


class PipelineNames:
    """Canonical names for the keys of layer files, and for ``N.key`` in optimizer files.

    Args:
        files: The keys of each layer's file, by the layer's number.
    """

    def __init__(self, files: Mapping[int, Sequence[str]]) -> None:
        self._files = files
        blocks = [layer for layer, keys in sorted(files.items()) if _is_block(keys)]
        self._blocks = {layer: number for number, layer in enumerate(blocks)}
        self._known: dict[str, Named | None] = {}

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
        layer, _, key = name.partition(".")
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
