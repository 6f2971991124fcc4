"""Write small Megatron-DeepSpeed checkpoints of any layout, in plain numpy, not with the reader.

The whole tensors are made first and cut here, so a test compares what is read with what was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mds_ckpt.pickles.records import Global, Namespace, Opaque, TorchDtype
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file, size

Array = np.ndarray[Any, Any]
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass
class Sample:
    """A model and the layout that it is written in."""

    layers: int = 2
    hidden: int = 8
    heads: int = 4
    groups: int = 4
    width: int = 16
    vocab: int = 11
    positions: int = 6
    tp: int = 1
    pp: int = 1
    dp: int = 1
    gated: bool = False
    tied: bool = True
    thirds: bool = False
    slice_mappings: bool = True
    stage: int = 1
    pipeline: bool = True
    first_block: int = 2
    norm_gap: int = 0
    """Numbers between the last block and the final norm that have no file."""
    prefix: str = ""
    tensors: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        h, d = self.hidden, self.hidden // self.heads
        shapes: dict[str, tuple[int, ...]] = {
            "embedding.word_embeddings.weight": (self.vocab, h),
            "embedding.position_embeddings.weight": (self.positions, h),
        }
        for i in range(self.layers):
            rows = (self.heads + 2 * self.groups) * d
            wide = self.width * (2 if self.gated else 1)
            for name, shape in {
                "input_layernorm.weight": (h,),
                "input_layernorm.bias": (h,),
                "self_attention.linear_qkv.weight": (rows, h),
                "self_attention.linear_qkv.bias": (rows,),
                "self_attention.linear_proj.weight": (h, h),
                "self_attention.linear_proj.bias": (h,),
                "pre_mlp_layernorm.weight": (h,),
                "pre_mlp_layernorm.bias": (h,),
                "mlp.linear_fc1.weight": (wide, h),
                "mlp.linear_fc1.bias": (wide,),
                "mlp.linear_fc2.weight": (h, self.width),
                "mlp.linear_fc2.bias": (h,),
            }.items():
                shapes[f"decoder.layers.{i}.{name}"] = shape
        shapes |= {"decoder.final_layernorm.weight": (h,), "decoder.final_layernorm.bias": (h,)}
        if not self.tied:
            shapes["output_layer.weight"] = (self.vocab, h)
        self.tensors = {
            f"{state}/{name}": rng.standard_normal(shape).astype("f4")
            for name, shape in shapes.items()
            for state in ("weight", *STATES)
        }

    @property
    def names(self) -> list[str]:
        return [key.partition("/")[2] for key in self.tensors if key.startswith("weight/")]

    @property
    def padded(self) -> int:
        return -(-self.vocab // (8 * self.tp)) * 8 * self.tp

    def local(self, state: str, name: str, rank: int) -> Array:
        """What tensor-parallel rank ``rank`` holds."""
        whole = self.tensors[f"{state}/{name}"]
        if "word_embeddings" in name or name == "output_layer.weight":
            padding = np.full((self.padded - self.vocab, self.hidden), 9999, "f4")
            return np.split(np.concatenate([whole, padding]), self.tp)[rank]
        if "linear_qkv" in name:
            per, d = self.heads // self.groups + 2, self.hidden // self.heads
            mine = np.split(whole.reshape(self.groups, per, d, *whole.shape[1:]), self.tp)[rank]
            if self.thirds:
                parts = mine[:, :-2], mine[:, -2:-1], mine[:, -1:]
                return np.concatenate([part.reshape(-1, *whole.shape[1:]) for part in parts])
            return mine.reshape(-1, *whole.shape[1:])
        if "linear_fc1" in name:
            halves = np.split(whole, 2) if self.gated else [whole]
            return np.concatenate([np.split(half, self.tp)[rank] for half in halves])
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return np.split(whole, self.tp, axis=1)[rank]
        return whole

    def old_block_name(self, name: str) -> str:
        for ours, theirs in {
            "linear_qkv": "query_key_value",
            "linear_proj": "dense",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "linear_fc1": "dense_h_to_4h",
            "linear_fc2": "dense_4h_to_h",
        }.items():
            name = name.replace(ours, theirs)
        return name

    def place(self, name: str) -> tuple[int, str]:
        """Pipeline layer and key of a parameter."""
        end = self.first_block + self.layers + self.norm_gap
        if name.startswith("embedding."):
            return self.first_block - 1, name.removeprefix("embedding.")
        if name.startswith("decoder.layers."):
            _, _, number, rest = name.split(".", 3)
            return self.first_block + int(number), self.old_block_name(rest)
        if name == "output_layer.weight":
            return end + 1, "lm_head.weight"
        return end, name.removeprefix("decoder.final_layernorm.")

    def engine_name(self, name: str) -> str:
        """The parameter as the engine calls it."""
        layer, key = self.place(name)
        if self.pipeline:
            if self.tied and name.startswith("embedding."):
                return f"tied_modules.embed.{key}"
            return f"{layer}.{key}"
        if name.startswith("embedding.") or name == "output_layer.weight":
            return f"language_model.{name}"
        return self.old_block_name(name).replace("decoder.", "language_model.encoder.")

    def args(self) -> Namespace:
        marker = {"ds_sequence_parallel_fpdt": False} if self.thirds else {}
        return Namespace(
            {
                "num_layers": self.layers,
                "hidden_size": self.hidden,
                "ffn_hidden_size": self.width,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.groups,
                "max_position_embeddings": self.positions,
                "padded_vocab_size": self.padded,
                "make_vocab_size_divisible_by": 8,
                "swiglu": self.gated,
                "tensor_model_parallel_size": self.tp,
                "pipeline_model_parallel_size": self.pp,
                "params_dtype": TorchDtype("float32"),
                "consumed_train_samples": 24,
                "iteration": 3,
                **marker,
            }
        )

    def stages(self) -> list[list[str]]:
        """Names on each pipeline stage, with the copy of the tied embedding on the last."""
        blocks = np.array_split(np.arange(self.layers), self.pp)
        stages = []
        for stage, numbers in enumerate(blocks):
            prefixes = tuple(f"decoder.layers.{i}." for i in numbers)
            names = [name for name in self.names if name.startswith(prefixes)]
            head = [name for name in self.names if name.startswith("embedding.")]
            tail = [n for n in self.names if n.startswith(("decoder.final", "output_layer"))]
            is_last = stage == self.pp - 1
            copies = head if stage == 0 or (is_last and self.tied) else []
            stages.append([*copies, *names, *(tail if is_last else [])])
        return stages

    def groups_of(self, names: list[str]) -> list[list[str]]:
        plain = [n for n in names if n.endswith(".bias") or "layernorm" in n]
        return [[name for name in names if name not in plain], plain]

    def write(self, root: Path) -> Path:
        folder = root / "global_step3"
        folder.mkdir(parents=True)
        (root / "latest").write_text("global_step3")
        stages = self.stages()
        for stage, names in enumerate(stages):
            for rank in range(self.tp):
                number = stage * self.tp + rank
                self._write_model(folder, number, rank, names)
                self._write_optimizers(folder, number, stage, rank, names)
        if self.pipeline:
            self._write_layers(folder)
        return root

    def _write_layers(self, folder: Path) -> None:
        files: dict[tuple[int, int], dict[str, Array]] = {}
        for name in self.names:
            layer, key = self.place(name)
            for rank in range(self.tp):
                files.setdefault((layer, rank), {})[key] = self.local("weight", name, rank)
        for (layer, rank), tensors in files.items():
            path = folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
            save_torch_file(path, ordered(tensors))

    def _module(self, names: list[str], rank: int) -> dict[str, Any] | None:
        if self.pipeline:
            return None
        tree: dict[str, Any] = {"language_model": {"embedding": {}, "encoder": {}}}
        inner = tree["language_model"]
        for name in names:
            full = self.engine_name(name).removeprefix("language_model.")
            tensor = self.local("weight", name, rank)
            tensor = np.zeros(0, "f4") if self.stage == 3 else tensor
            if full.startswith("embedding."):
                inner["embedding"][full.split(".")[1]] = {"weight": tensor}
            elif full.startswith("output_layer"):
                inner["output_layer"] = {"weight": tensor}
            else:
                inner["encoder"][full.removeprefix("encoder.")] = tensor
        return tree

    def _write_model(self, folder: Path, number: int, rank: int, names: list[str]) -> None:
        shapes = [
            ordered({self.engine_name(n): size(self.local("weight", n, rank).shape) for n in group})
            for group in self.groups_of(names)
        ]
        state = {
            "module": self._module(names, rank),
            "optimizer": None,
            "param_shapes": shapes,
            "dp_world_size": self.dp,
            "mp_world_size": self.tp * self.pp,
            "global_steps": 3,
            "global_samples": 24,
            "skipped_steps": 1,
            "lr_scheduler": {"num_steps": 24, "max_lr": 0.1},
            "checkpoint_version": 3.0,
            "iteration": 3,
            "args": self.args(),
            "universal_checkpoint_info": {"original_vocab_size": self.vocab},
        }
        if self.stage == 3:
            for dp in range(self.dp):
                name = f"zero_pp_rank_{dp}_mp_rank_{number:02d}_model_states.pt"
                save_torch_file(folder / name, state)
        else:
            save_torch_file(folder / f"mp_rank_{number:02d}_model_states.pt", state)

    def _write_optimizers(
        self, folder: Path, number: int, stage: int, rank: int, names: list[str]
    ) -> None:
        groups = self.groups_of(names)
        for dp in range(self.dp):
            path = folder / f"{self.prefix}zero_pp_rank_{dp}_mp_rank_{number:02d}_optim_states.pt"
            cut = self._stage_3 if self.stage == 3 else self._partition
            state = cut(groups, stage, rank, dp)
            save_torch_file(path, {"optimizer_state_dict": state, "ds_version": "0.0"})

    def _local_state(self, state: str, name: str, stage: int, rank: int) -> Array:
        local = self.local(state, name, rank).reshape(-1)
        # Later stages carry a copy of the position embeddings that nobody trains.
        return local * 0 - 7 if stage and "position_embeddings" in name else local

    def _partition(self, groups: list[list[str]], stage: int, rank: int, dp: int) -> dict[str, Any]:
        flats: dict[str, list[Array]] = {}
        mappings = []
        for group in groups:
            for state in STATES:
                parts = [self._local_state(state, name, stage, rank) for name in group]
                flat = np.concatenate(parts) if parts else np.zeros(0, "f4")
                padding = np.full(-len(flat) % (2 * self.dp), -5555, "f4")
                pieces = np.split(np.concatenate([flat, padding]), self.dp)
                flats.setdefault(state, []).append(pieces[dp])
            mappings.append(self._mapping(group, stage, rank, dp, len(flats["master"][-1])))
        state = {
            "single_partition_of_fp32_groups": flats["master"],
            "base_optimizer_state": {
                "state": {
                    i: {
                        "step": np.array(2.0, "f4"),
                        "exp_avg": flats["exp_avg"][i],
                        "exp_avg_sq": flats["exp_avg_sq"][i],
                    }
                    for i in range(len(groups))
                },
                "param_groups": [],
            },
            "zero_stage": self.stage,
            "partition_count": [self.dp] * len(groups),
        }
        if self.slice_mappings:
            state["param_slice_mappings"] = mappings
        return state

    def _mapping(self, group: list[str], stage: int, rank: int, dp: int, length: int) -> Opaque:
        at, mapping = 0, {}
        for name in group:
            count = self.local("master", name, rank).size
            low, high = max(at, dp * length), min(at + count, (dp + 1) * length)
            if low < high:
                address = Global("deepspeed.utils.tensor_fragment", "fragment_address")
                place = {"numel": high - low, "start": low - dp * length}
                mapping[self.engine_name(name)] = Opaque(address, state=place)
            at += count
        return ordered(mapping)

    def _stage_3(self, groups: list[list[str]], stage: int, rank: int, dp: int) -> dict[str, Any]:
        flats: dict[str, list[Array]] = {state: [] for state in STATES}
        for group in groups:
            for state in STATES:
                shares = []
                for name in group:
                    flat = self.local(state, name, rank).reshape(-1)
                    padding = np.full(-len(flat) % self.dp, -5555, "f4")
                    shares.append(np.split(np.concatenate([flat, padding]), self.dp)[dp])
                flats[state].append(np.concatenate(shares))
        return {
            "zero_stage": 3,
            "partition_count": self.dp,
            "fp32_flat_groups": flats["master"],
            "optimizer_state_dict": {
                "state": {
                    i: {s: flats[s][i] for s in ("exp_avg", "exp_avg_sq")}
                    for i in range(len(groups))
                },
                "param_groups": [],
            },
        }
