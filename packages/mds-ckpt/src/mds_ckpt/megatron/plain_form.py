"""How Megatron-DeepSpeed names and keeps a model's parameters when it runs without a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.megatron.deepspeed_form import DeepSpeedForm
from mds_ckpt.megatron.module_tree import module_tree, plain_name
from mds_ckpt.megatron.naming import Named, expert_of
from mds_ckpt.megatron.target_layout import LocalTensor, TargetLayout
from mds_ckpt.plan import Options

__all__ = ["PlainForm"]

_NUMBER = re.compile(r"\.(layers|deepspeed_experts)\.\d+\.")


class PlainForm(DeepSpeedForm):
    """Names and model files of a GPT, BERT or T5 that is one module on every rank.

    Args:
        checkpoint: The source.
        options: What the user asked.
        layout: Degrees of the target, with one pipeline stage.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        super().__init__(checkpoint, options, layout)
        self._found = {name: self._lookup(name) for name in self.names}

    def _lookup(self, name: str) -> tuple[str, Named]:
        found = plain_name(name, family=self.checkpoint.model.family)
        if found is None:
            raise self.target.unknown(name)
        return found[0], self.target.shared(found[1])

    def engine_name(self, name: str) -> str:
        """The parameter as the engine calls it."""
        return self._found[name][0]

    def named(self, name: str) -> Named:
        """The canonical name, with how ranks share the parameter."""
        return self._found[name][1]

    def pattern(self, name: str) -> str:
        """The regular expression under which DeepSpeed finds a parameter."""
        return _NUMBER.sub(r".\1.\\d+.", self.engine_name(name))

    def stage_names(self, stage: int) -> list[str]:
        """Everything: there is one stage."""
        return self.names

    def weight_files(self) -> Iterator[tuple[str, Any]]:
        """The experts' files."""
        yield from self.expert_files(0)

    def module(self, stage: int, rank: int) -> dict[str, Any]:
        """The weights, nested by module; in stage 3 only names, their data is shared out."""
        names = [name for name in self.names if expert_of(name) is None]
        return module_tree((self.engine_name(name), self._weight(name, rank)) for name in names)

    def _weight(self, name: str, rank: int) -> LocalTensor:
        tensor = self.target.local(self.named(name), rank, "weight")
        return tensor.emptied() if self.layout.zero_stage == 3 else tensor
