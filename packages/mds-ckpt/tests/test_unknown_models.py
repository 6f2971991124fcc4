"""DeepSpeed's checkpoints of models that are not Megatron's: weights under their own names.

Expected is what the engine trained: fp32 masters, and beside them what has none (frozen
parameters, buffers) and what has two names (tied parameters).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden import case
from safetensors.numpy import load_file

from mds_ckpt.cli import main
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file, size

Arrays = dict[str, np.ndarray[Any, Any]]
BF16 = ml_dtypes.bfloat16
RANDOM = np.random.default_rng(7)
TRAINED: Arrays = {
    "model.emb.weight": RANDOM.standard_normal((5, 3)).astype("f4"),
    "model.l1.weight": RANDOM.standard_normal((7, 3)).astype("f4"),
    "model.l1.bias": RANDOM.standard_normal(7).astype("f4"),
}
FROZEN = RANDOM.standard_normal((4, 4)).astype(BF16)
BUFFERS: Arrays = {
    "model.bn.running_mean": RANDOM.standard_normal(7).astype("f4"),
    "model.bn.num_batches_tracked": np.array(3, "i8"),
}
POISON = np.float32(-7777)


def model_state(module: Arrays, fragment: np.ndarray[Any, Any], world: int) -> dict[str, Any]:
    return {
        "module": ordered(module),
        "buffer_names": list(BUFFERS),
        "optimizer": None,
        "param_shapes": [ordered({name: size(a.shape) for name, a in TRAINED.items()})],
        "frozen_param_shapes": ordered({"model.frozen": size(FROZEN.shape)}),
        "shared_params": {"lm_head.weight": "model.emb.weight"},
        "frozen_param_fragments": ordered({"model.frozen": fragment}),
        "dp_world_size": world,
        "mp_world_size": 1,
        "global_steps": 9,
    }


def cut(array: np.ndarray[Any, Any], world: int) -> list[np.ndarray[Any, Any]]:
    """Equal shares of the flattened array, the last ones padded with what may not be read."""
    share = -(-array.size // world)
    padding = np.full(share * world - array.size, POISON, array.dtype)
    return np.split(np.concatenate([array.reshape(-1), padding]), world)


def stage_2(folder: Path, world: int) -> None:
    module = {name: array.astype(BF16) for name, array in TRAINED.items()}
    module |= {"lm_head.weight": module["model.emb.weight"], "model.frozen": FROZEN, **BUFFERS}
    save_torch_file(folder / "mp_rank_00_model_states.pt", model_state(module, FROZEN, world))
    flat = np.concatenate([array.reshape(-1) for array in TRAINED.values()])
    for rank, part in enumerate(cut(flat, world)):
        kept = part[part != POISON]
        state = {"zero_stage": 2, "single_partition_of_fp32_groups": [kept]}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save_torch_file(folder / name, {"optimizer_state_dict": state})


def stage_3(folder: Path, world: int) -> None:
    empty = np.zeros(0, BF16)
    module = dict.fromkeys((*TRAINED, "lm_head.weight", "model.frozen"), empty) | BUFFERS
    shares = zip(*(cut(array, world) for array in TRAINED.values()), strict=True)
    for rank, mine in enumerate(shares):
        end = f"rank_{rank}_mp_rank_00"
        state = model_state(module, cut(FROZEN, world)[rank], world)
        save_torch_file(folder / f"zero_pp_{end}_model_states.pt", state)
        optimizer = {"zero_stage": 3, "fp32_flat_groups": [np.concatenate(mine)]}
        name = f"bf16_zero_pp_{end}_optim_states.pt"
        save_torch_file(folder / name, {"optimizer_state_dict": optimizer})


def saved(root: Path, stage: int, world: int = 3) -> Path:
    folder = root / "global_step9"
    folder.mkdir(parents=True)
    (stage_2 if stage == 2 else stage_3)(folder, world)
    (root / "latest").write_text("global_step9")
    return root


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_stand_beside_what_has_none(tmp_path: Path, stage: int) -> None:
    source = saved(tmp_path / "ds", stage)

    assert main(["zero-to-fp32", str(source), str(tmp_path / "out")]) == 0

    found = load_file(tmp_path / "out" / "model.safetensors")
    tied = {"lm_head.weight": TRAINED["model.emb.weight"]}
    wanted = {**TRAINED, **tied, "model.frozen": FROZEN.astype("f4"), **BUFFERS}
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_missing_shard_leaves_nothing(tmp_path: Path, capsys: Any) -> None:
    source = saved(tmp_path / "ds", 3)
    (source / "global_step9" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()

    assert main(["zero-to-fp32", str(source), str(tmp_path / "out")]) == 3

    assert "rank" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["in_world3", "in_world4_two_flat_groups"])
def test_a11_is_consolidated_by_the_old_command(tmp_path: Path, name: str, capsys: Any) -> None:
    assert main(["zero-to-fp32", str(case("A11") / name), str(tmp_path / "out")]) == 0

    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(case("A11") / "expected.safetensors")
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    assert "without a config.json" in capsys.readouterr().out
