"""Megatron's ``distrib_optim.pt``: cut where the model's order is shown to be right; written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed_samples import Sample

from mds_ckpt import convert, open_checkpoint, verify
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.megatron.naming import flatten
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.pickles.records import TensorRef, TorchDtype
from mds_ckpt.pickles.torch_writer import save_torch_file


def carried(file: Any, value: Any) -> Any:
    if isinstance(value, TensorRef):
        return file.read(value)
    if isinstance(value, dict):
        return {key: carried(file, item) for key, item in value.items()}
    return [carried(file, item) for item in value] if isinstance(value, list) else value


def written(tmp_path: Path, *, vp: int = 1, backwards: bool = True) -> Sample:
    """A bf16 checkpoint of two stages whose optimizer state is moved to Megatron's flat buffers."""
    sample = Sample(layers=4, tied=False, pp=2, tp=2)
    for name in sample.names:
        sample.tensors[f"weight/{name}"] = sample.tensors[f"master/{name}"]
    convert(sample.write(tmp_path / "in"), tmp_path / "out", to="megatron", tp=2, pp=2, vp=vp)
    convert(tmp_path / "out", tmp_path / "bf16", to="megatron", tp=2, pp=2, vp=vp, dtype="BF16")
    for path in (tmp_path / "bf16").rglob("model_optim_rng.pt"):
        file = open_torch_file(path)
        value = carried(file, {k: v for k, v in file.value.items() if k != "optimizer"})
        optimizer = carried(file, file.value["optimizer"])
        inner = optimizer["optimizer"]
        keys = [f"model{n}" for n in range(vp)] if vp > 1 else ["model"]
        names = [(key, name) for key in keys for name, _ in flatten(value[key])]
        decayed = [n for n in names if not n[1].endswith("bias") and "layernorm" not in n[1]]
        order = decayed + [name for name in names if name not in decayed]
        masters = [tensor for group in optimizer["fp32_from_fp16_params"] for tensor in group]
        buffers = {}
        for number, key in enumerate(keys):
            flats: dict[str, list[Any]] = {"param": [], "exp_avg": [], "exp_avg_sq": []}
            mine = [name for name in names if name[0] == key]
            for name in reversed(mine) if backwards else mine:
                at = order.index(name)
                flats["param"].append(masters[at].reshape(-1))
                for moment in ("exp_avg", "exp_avg_sq"):
                    flats[moment].append(inner["state"][at][moment].reshape(-1))
            buffers[number] = {
                TorchDtype("float32"): {
                    word: np.concatenate([*parts, np.full(3, -9, "f4")])
                    for word, parts in flats.items()
                }
            }
        groups = [{**group, "step": 2} for group in inner["param_groups"]]
        value["optimizer"] = {"optimizer": {"param_groups": groups}, "grad_scaler": None}
        path.unlink()
        save_torch_file(path, value)
        save_torch_file(path.with_name("distrib_optim.pt"), buffers)
    return sample


@pytest.mark.parametrize("vp", [1, 2])
def test_flat_buffers_are_cut_in_the_reverse_of_the_models_order(tmp_path: Path, vp: int) -> None:
    sample = written(tmp_path, vp=vp)

    found = open_checkpoint(tmp_path / "bf16")

    for state in ("master", "exp_avg", "exp_avg_sq"):
        for name in sample.names:
            wanted = sample.tensors[f"{state}/{name}"]
            np.testing.assert_array_equal(found.tensor(name, state).numpy(), wanted, err_msg=name)
    assert found.training["optimizer"]["step"] == 2
    convert(tmp_path / "bf16", tmp_path / "back", to="deepspeed", dp=2)
    back = open_checkpoint(tmp_path / "back")
    for name in sample.names:
        wanted = sample.tensors[f"exp_avg/{name}"]
        np.testing.assert_array_equal(back.tensor(name, "exp_avg").numpy(), wanted)


def test_another_order_is_noticed_and_not_believed(tmp_path: Path) -> None:
    written(tmp_path, backwards=False)

    found = open_checkpoint(tmp_path / "bf16")

    assert list(found.states) == ["weight"]
    assert any("does not lie in the order of the model" in note for note in found.notes)


def test_another_form_is_told(tmp_path: Path) -> None:
    written(tmp_path)
    path = next((tmp_path / "bf16").rglob("distrib_optim.pt"))
    path.unlink()
    save_torch_file(path, {0: {TorchDtype("float32"): {"param": [np.zeros(3, "f4")]}}})

    found = open_checkpoint(tmp_path / "bf16")

    assert any("no flat 'param', so it is of another Megatron" in note for note in found.notes)
    assert found.tensors.keys()


@pytest.mark.parametrize(("dp", "vp"), [(1, 1), (5, 2)])
def test_what_is_written_is_what_megatron_lays_together(tmp_path: Path, dp: int, vp: int) -> None:
    written(tmp_path, vp=vp)
    layout = {"tp": 2, "pp": 2, "vp": vp, "dp": dp, "use_distributed_optimizer": True}

    convert(tmp_path / "bf16", tmp_path / "made", to="megatron", **layout)

    paths = sorted((tmp_path / "bf16").rglob("distrib_optim.pt"))
    assert len(paths) == 4
    for path in paths:
        name = path.relative_to(tmp_path / "bf16")
        theirs, ours = open_torch_file(path), open_torch_file(tmp_path / "made" / name)
        assert ours.value.keys() == theirs.value.keys() == set(range(vp))
        for chunk, kinds in theirs.value.items():
            for kind, flats in kinds.items():
                for word, flat in flats.items():
                    made = ours.read(ours.value[chunk][kind][word])
                    wanted = theirs.read(flat)[:-3]  # without the padding of another size
                    np.testing.assert_array_equal(made[: wanted.size], wanted)
                    assert made.size == -(-wanted.size // dp) * dp
        state = open_torch_file(tmp_path / "made" / name.with_name("model_optim_rng.pt")).value
        groups = state["optimizer"]["optimizer"]["param_groups"]
        assert [group["step"] for group in groups] == [2, 2]
        assert not any("params" in group for group in groups)
        assert state["args"].fields["use_distributed_optimizer"] is True


LAYOUTS: list[dict[str, int]] = [{"tp": 1, "pp": 1}, {"tp": 2, "pp": 1}, {"pp": 4, "dp": 3}]


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_bitwise(
    tmp_path: Path, layout: dict[str, int], dtype: str
) -> None:
    written(tmp_path)
    options: dict[str, Any] = {"to": "megatron", "dtype": dtype, **layout}

    convert(tmp_path / "bf16", tmp_path / "made", use_distributed_optimizer=True, **options)
    convert(tmp_path / "made", tmp_path / "back", to="megatron", tp=2, pp=2)

    source = open_checkpoint(tmp_path / "bf16")
    states = ("weight", "master", "exp_avg", "exp_avg_sq")
    for path in ("made", "back"):
        found = open_checkpoint(tmp_path / path)
        kept = states if dtype == "BF16" else ("weight", "exp_avg", "exp_avg_sq")
        assert set(found.states) == set(kept)
        for state in kept:
            known = "master" if (state, dtype) == ("weight", "F32") else state
            for name, tensor in source.states[known].items():
                there = found.tensor(name, state).numpy()
                assert there.tobytes() == tensor.numpy().tobytes(), (path, state, name)
        assert found.training["optimizer"]["step"] == 2
    args = open_checkpoint(tmp_path / "back").origin["megatron"]["args"]
    assert args["use_distributed_optimizer"] is False


def test_damage_in_the_flat_buffers_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    convert(
        tmp_path / "bf16", tmp_path / "made", to="megatron", use_distributed_optimizer=True, dp=2
    )
    path = next((tmp_path / "made").rglob("distrib_optim.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    problems = verify(tmp_path / "made").problems

    assert [problem.file for problem in problems] == ["distrib_optim.pt"]


def test_without_state_or_for_deepspeed_it_is_refused(tmp_path: Path) -> None:
    sample = Sample(layers=2).write(tmp_path / "in")
    options = {"use_distributed_optimizer": True}

    with pytest.raises(UnsupportedError, match="no complete optimizer state to write"):
        convert(sample, tmp_path / "a", to="megatron", weights_only=True, **options)
    with pytest.raises(UsageError, match="DeepSpeed has ZeRO; leave --use-distributed-optimizer"):
        convert(sample, tmp_path / "b", to="deepspeed", **options)
    with pytest.raises(UsageError, match="leave --use-distributed-optimizer away"):
        convert(sample, tmp_path / "c", to="mds", **options)
    assert not [path for path in tmp_path.iterdir() if path.name != "in"]
