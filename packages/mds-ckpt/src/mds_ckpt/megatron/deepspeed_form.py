"""What DeepSpeed's files of a model have in common: names, groups, the model files' contents.

``PipelineForm`` and ``PlainForm`` say how parameters are called and where they are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.megatron.naming import Named, expert_of, megatron_order, with_expert
from mds_ckpt.megatron.target_groups import Member, ParameterGroup, divide_groups
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.megatron.target_ranks import RankedTarget
from mds_ckpt.pickles.records import Opaque
from mds_ckpt.pickles.torch_writer import ordered, size
from mds_ckpt.plan import Options

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["VERSION", "DeepSpeedForm", "step_tensor"]

VERSION = "0.19.8"
"""The DeepSpeed whose files these are like."""


class DeepSpeedForm(ABC):
    """Names, groups and model files of a model as DeepSpeed has them.

    Args:
        checkpoint: The source.
        options: What the user asked.
        layout: Degrees of the target.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options, layout: TargetLayout) -> None:
        self.target = RankedTarget(checkpoint, options, layout)
        self.is_gated = "glu" in str(checkpoint.config.get("activation", "gelu"))
        self.checkpoint = checkpoint
        self.layout = layout
        self.names = sorted(checkpoint.tensors, key=megatron_order)
        self.is_tied = checkpoint.model.tied_embeddings

    @abstractmethod
    def engine_name(self, name: str) -> str:
        """The parameter as the engine calls it."""

    @abstractmethod
    def named(self, name: str) -> Named:
        """The canonical name, with how ranks share the parameter."""

    @abstractmethod
    def weight_files(self) -> Iterator[tuple[str, Any]]:
        """Files with weights beside the ranks' model files."""

    @abstractmethod
    def module(self, stage: int, rank: int) -> Any:
        """The weights that a rank's model file holds."""

    @abstractmethod
    def stage_names(self, stage: int) -> list[str]:
        """What a stage holds, in the order in which the engine has it."""

    @abstractmethod
    def pattern(self, name: str) -> str:
        """The regular expression under which DeepSpeed finds a parameter."""

    def has_experts(self, stage: int) -> bool:
        """Whether a stage holds any layer with experts."""
        return any(expert_of(name) is not None for name in self.stage_names(stage))

    def _local_experts(self, name: str) -> int:
        """Experts of a layer that one expert-parallel rank holds."""
        layer = name.split(".mlp.experts.")[0]
        return self.target.experts[layer] // self.layout.ep_size

    def groups(self, stage: int, ep_rank: int = 0) -> list[ParameterGroup]:
        """The optimizer's groups on a stage, with the experts of one expert-parallel rank."""
        members = []
        for name in self.stage_names(stage):
            stored, number = self.engine_name(name), expert_of(name)
            if number is not None:
                owner, local = divmod(number, self._local_experts(name))
                if owner != ep_rank:
                    continue
                stored = self.engine_name(with_expert(name, local))
            members.append(Member(self.named(name), stored))
        return divide_groups(members, self.checkpoint.tensors)

    def expert_files(self, stage: int) -> Iterator[tuple[str, Any]]:
        """One file for each of a stage's layers with experts, each expert, and each rank."""
        layers: dict[str, dict[int, list[str]]] = {}
        for name in self.stage_names(stage):
            if (number := expert_of(name)) is not None:
                layer = name.split(".mlp.experts.")[0]
                layers.setdefault(layer, {}).setdefault(number, []).append(name)
        for place, experts in enumerate(layers.values()):
            for number, names in experts.items():
                for rank in range(self.layout.tp_size):
                    tensors = {
                        self.engine_name(name): self.target.local(self.named(name), rank, "weight")
                        for name in names
                    }
                    mp_rank = stage * self.layout.tp_size + rank
                    file = f"layer_{place}_expert_{number}_mp_rank_{mp_rank:02d}_model_states.pt"
                    yield file, tensors

    def model_state(self, groups: Sequence[ParameterGroup], stage: int, rank: int) -> Any:
        """What a rank's model file holds."""
        progress, layout = self.target.progress, self.layout
        schedule = self.checkpoint.training.get("schedule")
        is_zero = layout.zero_stage > 0
        state = {
            "module": self.module(stage, rank),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [self._shapes(group, rank) for group in groups] if is_zero else None,
            "frozen_param_shapes": {} if layout.zero_stage > 1 else None,
            "shared_params": {} if is_zero else None,
            "frozen_param_fragments": {} if layout.zero_stage > 1 else None,
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
            "universal_checkpoint_info": self.universal_info(),
            "args": self.target.args(),
            "checkpoint_version": 3.0,
            "iteration": progress.iteration,
            "tokens": progress.tokens,
        }
        state |= self.target.random_state(rank, stage)
        if self.target.experts:
            held = {name.split(".mlp.experts.")[0] for name in self.stage_names(stage)}
            counts = [count for layer, count in self.target.experts.items() if layer in held]
            state |= {"num_experts": counts, "ds_autoep_layers": None}
        return state

    def _shapes(self, group: ParameterGroup, rank: int) -> Opaque:
        return ordered(
            {
                member.stored: size(self.target.local(member.named, rank, "weight").shape)
                for member in group.members
            }
        )

    def universal_info(self) -> dict[str, Any]:
        """What DeepSpeed's own conversion needs to know of how parameters are shared."""
        found: dict[str, list[str]] = {"vocab": [], "replicated": [], "row": [], "gated": []}
        for name in self.names:
            patterns = found.setdefault(self.named(name).sharing, [])
            if (pattern := self.pattern(name)) not in patterns:
                patterns.append(pattern)
        return {
            "universal_checkpoint_version": 0.4,
            "original_vocab_size": self.target.words,
            "padded_vocab_size": self.target.rows,
            "vocabulary_parameter_patterns": found["vocab"],
            "pipeline_replicated_parameter_patterns": [],
            "tp_replicated_parameter_patterns": found["replicated"],
            "parameter_with_row_parallelism_patterns": found["row"],
            "parameter_with_2_sub_params_cat_dim_0": found["gated"] if self.is_gated else [],
        }


def step_tensor(count: int) -> Array:
    """A count of steps as torch's Adam keeps it."""
    import numpy as np

    return np.array(count, "<f4")
