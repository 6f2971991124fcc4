"""How Megatron-DeepSpeed's pipeline names a GPT's parameters, and in which files it keeps them.

Each layer has files of its own. A stage with experts is kept otherwise: its layers are in the model
file of each rank and its experts in files of their own, whose layers each stage counts anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.deepspeed_form import DeepSpeedForm
from mds_ckpt.megatron.naming import Named, expert_of, stored_block_name, stored_module_name
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles.torch_writer import ordered
from mds_ckpt.plan import Options

__all__ = ["PipelineForm", "pipeline_fault"]

_FIRST_BLOCK = 2
_EXPERT = re.compile(r"\.deepspeed_experts\.\d+\.")


def pipeline_fault(checkpoint: Checkpoint) -> str | None:
    """Why a model has no pipeline form; None if it has one."""
    if checkpoint.model.family != "gpt":
        return f"a {checkpoint.model.family} model has no pipeline form"
    return None


class PipelineForm(DeepSpeedForm):
    """Names, places and model files of a GPT as Megatron-DeepSpeed's pipeline has them.

    Args:
        checkpoint: The source.
        options: What the user asked.
        layout: Degrees of the target.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        if (fault := pipeline_fault(checkpoint)) is not None:
            raise UnsupportedError(checkpoint.path, fault, remedy="give --no-pipeline and no --pp")
        super().__init__(checkpoint, options, layout)
        # A function that gathers the experts' loss stands behind the blocks and takes a number.
        self._end = _FIRST_BLOCK + checkpoint.config["num_layers"] + bool(self.target.experts)

    def named(self, name: str) -> Named:
        """The canonical name, with how ranks share the parameter."""
        parts = name.split(".", 3)
        if parts[1] == "final_layernorm":
            return Named(name, "replicated")
        found = stored_block_name(parts[3]) if parts[1] == "layers" else stored_module_name(name)
        if found is None:
            raise self.target.unknown(name)
        return self.target.shared(Named(name, found[1].sharing))

    def place(self, name: str) -> tuple[int, str]:
        """The pipeline layer of a parameter, and its key in that layer's file."""
        parts = name.split(".", 3)
        if name.startswith("embedding."):
            return _FIRST_BLOCK - 1, name.removeprefix("embedding.")
        if parts[1] == "layers":
            block = stored_block_name(parts[3])
            if block is None:
                raise self.target.unknown(name)
            return _FIRST_BLOCK + int(parts[2]), block[0]
        if parts[1] == "final_layernorm":
            return self._end, parts[2]
        if name == "output_layer.weight":
            return self._end + 1, "lm_head.weight"
        raise self.target.unknown(name)

    def engine_name(self, name: str) -> str:
        """The parameter as the engine calls it."""
        layer, key = self.place(name)
        is_tied = self.is_tied and name.startswith("embedding.")
        return f"tied_modules.embed.{key}" if is_tied else f"{layer}.{key}"

    def pattern(self, name: str) -> str:
        """The regular expression under which DeepSpeed finds a parameter."""
        _, key = self.place(name)
        if self.is_tied and name.startswith("embedding."):
            return f"tied_modules.embed.{key}"
        return r"\d+." + _EXPERT.sub(r".deepspeed_experts.\\d+.", key)

    def stage_names(self, stage: int) -> list[str]:
        """What a stage holds, in the engine's order: tied modules first, copies on the last."""
        layers, is_last = self.target.stages[stage], stage == self.layout.pp_size - 1
        kept = []
        for name in self.names:
            parts = name.split(".", 3)
            if name.startswith("embedding."):
                is_here = stage == 0 or (is_last and self.is_tied)
            elif parts[1] == "layers":
                is_here = int(parts[2]) in layers
            else:
                is_here = is_last
            if is_here:
                kept.append(name)
        return kept

    def module(self, stage: int, rank: int) -> Any:
        """What a stage with experts holds beside them; None where layers have own files."""
        if not self.has_experts(stage):
            return None
        names = [name for name in self.stage_names(stage) if expert_of(name) is None]
        return ordered(
            {
                self.engine_name(name): self.target.local(self.named(name), rank, "weight")
                for name in names
            }
        )

    def weight_files(self) -> Iterator[tuple[str, Any]]:
        """Stage by stage, one file for each layer and rank, or for each expert and rank."""
        for stage in range(self.layout.pp_size):
            has_experts = self.has_experts(stage)
            yield from self.expert_files(stage) if has_experts else self._layer_files(stage)

    def _layer_files(self, stage: int) -> Iterator[tuple[str, Any]]:
        layers: dict[int, list[tuple[str, str]]] = {}
        for name in self.stage_names(stage):
            if stage and name.startswith("embedding."):
                continue  # a copy of the first stage's
            layer, key = self.place(name)
            layers.setdefault(layer, []).append((key, name))
        for layer, keys in sorted(layers.items()):
            for rank in range(self.layout.tp_size):
                tensors = {
                    key: self.target.local(self.named(name), rank, "weight") for key, name in keys
                }
                yield f"layer_{layer:02d}-model_{rank:02d}-model_states.pt", ordered(tensors)

    def universal_info(self) -> dict[str, Any]:
        """What DeepSpeed's own conversion needs; tied modules are copies on several stages."""
        names = [n.removeprefix("embedding.") for n in self.names if n.startswith("embedding.")]
        tied = [f"tied_modules.embed.{key}" for key in names] if self.is_tied else []
        return super().universal_info() | {"pipeline_replicated_parameter_patterns": tied}
