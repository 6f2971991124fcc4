"""How Megatron-DeepSpeed's pipeline names and groups a GPT's parameters; its model files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.megatron.naming import Named, megatron_order, stored_block_name, stored_module_name
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.megatron.target_ranks import RankedTarget, decay_groups
from mds_ckpt.pickles.records import Opaque
from mds_ckpt.pickles.torch_writer import ordered, size
from mds_ckpt.plan import Options

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["VERSION", "PipelineForm", "step_tensor"]

VERSION = "0.19.8"
"""The DeepSpeed whose files these are like."""
_FIRST_BLOCK = 2


class PipelineForm:
    """Names, places and model files of a GPT as Megatron-DeepSpeed's pipeline has them.

    Args:
        checkpoint: The source.
        options: What the user asked.
        layout: Degrees of the target.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        if checkpoint.model.family != "gpt":
            raise UnsupportedError(
                checkpoint.path,
                f"a {checkpoint.model.family} model has no pipeline form",
                remedy="convert it with --to megatron",
            )
        self.target = RankedTarget(checkpoint, options, layout)
        self.is_gated = "glu" in str(checkpoint.config.get("activation", "gelu"))
        self._checkpoint = checkpoint
        self._layout = layout
        self._layers = checkpoint.config["num_layers"]
        self._is_tied = checkpoint.model.tied_embeddings

    def named(self, name: str) -> Named:
        """The canonical name, with how ranks share the parameter."""
        parts = name.split(".", 3)
        if parts[1] == "final_layernorm":
            return Named(name, "replicated")
        found = stored_block_name(parts[3]) if parts[1] == "layers" else stored_module_name(name)
        if found is None:
            raise self.target.unknown(name)
        return Named(name, found[1].sharing)

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
            return _FIRST_BLOCK + self._layers, parts[2]
        if name == "output_layer.weight":
            return _FIRST_BLOCK + self._layers + 1, "lm_head.weight"
        raise self.target.unknown(name)

    def engine_name(self, name: str) -> str:
        """The parameter as the engine calls it."""
        layer, key = self.place(name)
        is_tied = self._is_tied and name.startswith("embedding.")
        return f"tied_modules.embed.{key}" if is_tied else f"{layer}.{key}"

    def _stage_names(self, number: int) -> list[str]:
        """What a stage holds, in the engine's order: tied modules first, copies on the last."""
        stage, is_last = self.target.stages[number], number == self._layout.pp_size - 1
        kept = []
        for name in sorted(self._checkpoint.tensors, key=megatron_order):
            parts = name.split(".", 3)
            if name.startswith("embedding."):
                is_here = number == 0 or (is_last and self._is_tied)
            elif parts[1] == "layers":
                is_here = int(parts[2]) in stage
            else:
                is_here = is_last
            if is_here:
                kept.append(name)
        return kept

    def groups(self, stage: int) -> list[list[Named]]:
        """The optimizer's groups on a stage: with weight decay, without."""
        names = [self.named(name) for name in self._stage_names(stage)]
        return decay_groups(names, self._checkpoint.tensors)

    def model_state(self, groups: list[list[Named]], rank: int) -> dict[str, Any]:
        """What a rank's model file holds."""
        progress, layout = self.target.progress, self._layout
        schedule = self._checkpoint.training.get("schedule")
        return {
            "module": None,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [self._shapes(group, rank) for group in groups],
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": dict(schedule) if schedule else None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": progress.skipped,
            "global_steps": progress.iteration,
            "global_samples": progress.samples,
            "dp_world_size": layout.dp_size,
            "mp_world_size": layout.tp_size * layout.pp_size,
            "checkpoint_parallel_dimensions": {
                "pp_degree": layout.pp_size,
                "tp_degree": layout.tp_size,
            },
            "ds_config": {},
            "ds_version": VERSION,
            "universal_checkpoint_info": self._universal_info(),
            "args": self.target.args(),
            "checkpoint_version": 3.0,
            "iteration": progress.iteration,
            "tokens": progress.tokens,
        }

    def _shapes(self, group: Sequence[Named], rank: int) -> Opaque:
        return ordered(
            {
                self.engine_name(named.name): size(self.target.local(named, rank, "weight").shape)
                for named in group
            }
        )

    def _universal_info(self) -> dict[str, Any]:
        """What DeepSpeed's own conversion needs to know of how parameters are shared."""
        found: dict[str, list[str]] = {"vocab": [], "replicated": [], "row": [], "gated": []}
        for name in sorted(self._checkpoint.tensors, key=megatron_order):
            _, key = self.place(name)
            tied = self._is_tied and name.startswith("embedding.")
            pattern = f"tied_modules.embed.{key}" if tied else rf"\d+.{key}"
            patterns = found.setdefault(self.named(name).sharing, [])
            if pattern not in patterns:
                patterns.append(pattern)
        tied_names = [f"tied_modules.embed.{key}" for key in self._tied_keys()]
        return {
            "universal_checkpoint_version": 0.4,
            "original_vocab_size": self.target.words,
            "padded_vocab_size": self.target.rows,
            "vocabulary_parameter_patterns": found["vocab"],
            "pipeline_replicated_parameter_patterns": tied_names,
            "tp_replicated_parameter_patterns": found["replicated"],
            "parameter_with_row_parallelism_patterns": found["row"],
            "parameter_with_2_sub_params_cat_dim_0": found["gated"] if self.is_gated else [],
        }

    def _tied_keys(self) -> list[str]:
        names = [n for n in self._checkpoint.tensors if n.startswith("embedding.")]
        return [n.removeprefix("embedding.") for n in names] if self._is_tied else []


def step_tensor(count: int) -> Array:
    """A count of steps as torch's Adam keeps it."""
    import numpy as np

    return np.array(count, "<f4")
