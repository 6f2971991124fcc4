"""Models with experts: read with optimizer state, and written for any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckpt_samples import save
from golden import fixture
from test_deepspeed_writer import assert_equal, written

from mds_ckpt import convert
from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.expert_args import expert_args, expert_config
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.pickles.records import TensorRef
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file


@pytest.fixture
def golden() -> Checkpoint:
    return open_checkpoint(fixture("moe_nopipe_dp2ep2_z1_bf16") / "ckpt")


def test_the_golden_experts_are_read_with_optimizer_state(golden: Checkpoint) -> None:
    """Experts 0 and 1 are told by the saving process; masters round to all weights."""
    name = "decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight"
    with np.load(fixture("moe_nopipe_dp2ep2_z1_bf16") / "expected.npz") as archive:
        for layer in (1, 3):
            for expert in (0, 1):
                stored = (
                    f"language_model.encoder.layers.{layer}.mlp.deepspeed_moe.experts."
                    f"deepspeed_experts.{expert}.dense_h_to_4h.weight"
                )
                for state, prefix in (("master", "fp32"), ("weight", "lp")):
                    found = golden.tensor(name.format(layer, expert), state).numpy()
                    np.testing.assert_array_equal(found.astype("f4"), archive[f"{prefix}/{stored}"])
    assert {len(tensors) for tensors in golden.states.values()} == {78}
    for stored, tensor in golden.states["master"].items():
        weight = golden.tensor(stored).numpy()
        assert tensor.numpy().astype(weight.dtype).tobytes() == weight.tobytes(), stored
        assert golden.tensor(stored, "exp_avg_sq").numpy().min() >= 0


def test_the_configuration_has_the_experts(golden: Checkpoint) -> None:
    assert golden.config["num_experts"] == 4
    assert golden.config["expert_interval"] == 2
    assert golden.config["moe_topk"] == 1
    assert "moe_capacity_factor" not in golden.config  # no token is dropped
    assert golden.parallel["ep"] == 2


def test_a_pipelines_stages_keep_their_layers_as_deepspeed_does(
    golden: Checkpoint, tmp_path: Path
) -> None:
    """Stages with experts keep layers in model files and count experts' layers anew; others not."""
    written(golden, tmp_path / "two", pp_size=2, dp_size=2, ep_size=2)
    written(golden, tmp_path / "four", pp_size=4)

    two, four = (tmp_path / name / "global_step10" for name in ("two", "four"))
    assert not list(two.glob("layer_*-model_*"))
    assert len(list(two.glob("layer_0_expert_?_mp_rank_0[01]_model_states.pt"))) == 8
    assert not list(two.glob("layer_1_expert_*"))
    module = open_torch_file(two / "mp_rank_01_model_states.pt").value["module"]
    assert next(iter(module)) == "tied_modules.embed.word_embeddings.weight"
    assert "5.mlp.deepspeed_moe.gate.wg.weight" in module
    assert list(module)[-1] == "7.bias"  # 6 is a function that gathers the experts' loss
    expert = open_torch_file(two / "layer_0_expert_3_mp_rank_01_model_states.pt").value
    assert next(iter(expert)) == (
        "5.mlp.deepspeed_moe.experts.deepspeed_experts.3.dense_h_to_4h.weight"
    )
    names = {path.name for path in four.glob("layer_*-model_*")}
    assert names == {f"layer_{n:02d}-model_00-model_states.pt" for n in (1, 2, 4)}
    assert open_torch_file(four / "mp_rank_02_model_states.pt").value["module"] is None
    assert len(list(four.glob("layer_0_expert_?_mp_rank_0[13]_model_states.pt"))) == 8


def test_experts_beside_layer_files_count_once(golden: Checkpoint, tmp_path: Path) -> None:
    """Where layers' files hold one rank's experts too, under its numbers, the experts' files do."""
    written(golden, tmp_path / "out", pp_size=1, is_pipeline=True)
    folder = tmp_path / "out" / "global_step10"
    path = folder / "mp_rank_00_model_states.pt"
    file = open_torch_file(path)
    layers: dict[int, dict[str, Any]] = {}
    for name, ref in file.value["module"].items():
        key = name.replace("tied_modules.embed.", "1.")
        number, _, key = key.partition(".")
        layers.setdefault(int(number), {})[key] = file.read(ref)
    wrong = np.full((1,), 7, "f4")
    layers[3]["mlp.deepspeed_moe.experts.deepspeed_experts.0.dense_h_to_4h.weight"] = wrong
    for number, tensors in layers.items():
        save_torch_file(folder / f"layer_{number:02d}-model_00-model_states.pt", ordered(tensors))
    state = {key: value for key, value in file.value.items() if key not in ("module", "rng_state")}
    path.unlink()
    save_torch_file(path, {**state, "module": None})

    found = open_checkpoint(tmp_path / "out")

    assert found.tensors.keys() == golden.tensors.keys()
    for name, tensor in golden.tensors.items():
        assert found.tensor(name).numpy().tobytes() == tensor.numpy().tobytes(), name


def test_a_missing_expert_is_named(golden: Checkpoint, tmp_path: Path) -> None:
    written(golden, tmp_path / "out", pp_size=2, dp_size=2, ep_size=2)
    folder = tmp_path / "out" / "global_step10"
    (folder / "layer_0_expert_3_mp_rank_01_model_states.pt").unlink()

    with pytest.raises(RejectedError, match=r"layers\.3.*3 of 4 experts"):
        open_checkpoint(tmp_path / "out")


def unnamed(training: Any) -> Any:
    """Without the name of the experts' group, which tells how many ranks share them out."""
    return json.loads(json.dumps(training).replace('"ep_size_1"', '"ep_size_2"'))


@pytest.mark.parametrize(
    "degrees",
    [
        {"zero_stage": 0},
        {"zero_stage": 0, "tp_size": 2, "dp_size": 4, "ep_size": 2},
        {"zero_stage": 1, "dp_size": 2},
        {"zero_stage": 1, "tp_size": 2, "dp_size": 4, "ep_size": 4},
        {"zero_stage": 2, "dp_size": 6, "ep_size": 2},
        {"pp_size": 2, "dp_size": 2, "ep_size": 2},
        {"pp_size": 1, "is_pipeline": True, "tp_size": 2, "dp_size": 4, "ep_size": 4},
        {"pp_size": 4, "dp_size": 2, "ep_size": 2, "tp_size": 2},
        {"pp_size": 4, "zero_stage": 0, "dp_size": 2, "ep_size": 2},
        {"pp_size": 2, "zero_stage": 0},
    ],
    ids=str,
)
def test_experts_go_to_any_ranks_and_back(
    golden: Checkpoint, tmp_path: Path, degrees: dict[str, Any]
) -> None:
    found = written(golden, tmp_path / "out", **degrees)

    assert_equal(found, golden)
    assert found.config == golden.config
    if degrees.get("ep_size", 1) < 4:
        assert unnamed(found.training["optimizer"]) == unnamed(golden.training["optimizer"])
    back = written(found, tmp_path / "back", dp_size=2, ep_size=2)
    assert_equal(back, golden)


def test_each_rank_has_its_experts_under_local_numbers(golden: Checkpoint, tmp_path: Path) -> None:
    written(golden, tmp_path / "out", dp_size=4, ep_size=4)

    folder = tmp_path / "out" / "global_step10"
    for rank in range(4):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file = open_torch_file(folder / name)
        state = file.value["optimizer_state_dict"]
        assert state["partition_count"] == [4, 4, 1, 1]
        assert [group.get("moe") for group in state["base_optimizer_state"]["param_groups"]] == [
            None,
            None,
            True,
            True,
        ]
        names = list(state["param_slice_mappings"][2])
        assert len(names) == 4
        assert all(".deepspeed_experts.0." in name for name in names)
        master = state["single_partition_of_fp32_groups"][2]
        assert isinstance(master, TensorRef)
        expert = f"decoder.layers.1.mlp.experts.local_experts.{rank}.linear_fc1.weight"
        wanted = golden.tensor(expert, "master").numpy().reshape(-1)
        np.testing.assert_array_equal(file.read(master, start=0, stop=wanted.size), wanted)


@pytest.mark.parametrize("via", ["mds", "universal"])
def test_experts_come_back_from_other_formats(golden: Checkpoint, tmp_path: Path, via: str) -> None:
    convert(golden.path, tmp_path / "there", to=via)
    convert(tmp_path / "there", tmp_path / "back", to="deepspeed", dp=2, ep=2)

    assert_equal(open_checkpoint(tmp_path / "there"), golden)
    assert_equal(open_checkpoint(tmp_path / "back"), golden)


def residual(root: Path) -> Checkpoint:
    """A model with 2 experts in layer 1 and 4 in layer 3, mixed with an MLP for all tokens."""
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (11, 8),
        "embedding.position_embeddings.weight": (6, 8),
        "decoder.final_layernorm.weight": (8,),
    }
    mlp = {"linear_fc1.weight": (32, 8), "linear_fc2.weight": (8, 16)}
    for layer, experts in enumerate((0, 2, 0, 4)):
        place = f"decoder.layers.{layer}"
        shapes |= {
            f"{place}.input_layernorm.weight": (8,),
            f"{place}.self_attention.linear_qkv.weight": (24, 8),
            f"{place}.self_attention.linear_proj.weight": (8, 8),
            f"{place}.pre_mlp_layernorm.weight": (8,),
        }
        inner = [f"experts.local_experts.{number}." for number in range(experts)] or [""]
        if experts:
            inner.append("shared_experts.")
            shapes[f"{place}.mlp.router.weight"] = (experts, 8)
            shapes[f"{place}.mlp.coefficient.weight"] = (2, 8)
            shapes[f"{place}.mlp.coefficient.bias"] = (2,)
        shapes |= {f"{place}.mlp.{i}{name}": s for i in inner for name, s in mlp.items()}
    config = {
        "num_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 16,
        "vocab_size": 11,
        "max_position_embeddings": 6,
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "add_bias": False,
        "layer_experts": [0, 2, 0, 4],
        "moe_residual": True,
        "moe_topk": 2,
        "moe_capacity_factor": 1.5,
    }
    record = ModelRecord(family="gpt", config=config, vocab_size=11, tied_embeddings=True)
    weights = {n: random.standard_normal(shape).astype("f4") for n, shape in shapes.items()}
    return open_checkpoint(save(root, record, weights))


def test_residual_experts_of_growing_number_are_written_and_read(tmp_path: Path) -> None:
    source = residual(tmp_path / "in")

    convert(tmp_path / "in", tmp_path / "out", to="deepspeed", tp=2, dp=2, ep=2, weights_only=True)

    found = open_checkpoint(tmp_path / "out")
    assert_equal(found, source)
    for field in ("layer_experts", "moe_residual", "moe_topk", "moe_capacity_factor"):
        assert found.config[field] == source.config[field]
    folder = next(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert len(list(folder.glob("layer_0_expert_*_mp_rank_00_*"))) == 2
    assert len(list(folder.glob("layer_1_expert_*_mp_rank_01_*"))) == 4
    module = open_torch_file(folder / "mp_rank_00_model_states.pt").value["module"]
    names = list(module["language_model"]["encoder"])
    assert "layers.1.mlp.mlp.dense_h_to_4h.weight" in names
    assert names.index("layers.1.mlp.deepspeed_moe.gate.wg.weight") < names.index(
        "layers.1.mlp.mlp.dense_h_to_4h.weight"
    )
    assert names.index("layers.1.mlp.mlp.dense_4h_to_h.weight") < names.index(
        "layers.1.mlp.coefficient.weight"
    )


def test_what_deepspeed_cannot_share_out_is_refused(tmp_path: Path, golden: Checkpoint) -> None:
    with pytest.raises(UnsupportedError, match=r"4 experts .* can't be shared out among --ep 3"):
        written(golden, tmp_path / "out", dp_size=3, ep_size=3)
    with pytest.raises(UnsupportedError, match="hold no experts"):
        convert(golden.path, tmp_path / "out", to="megatron")


def test_a_universal_checkpoint_of_a_pipeline_holds_every_expert_once(
    tmp_path: Path, golden: Checkpoint
) -> None:
    convert(golden.path, tmp_path / "out", to="universal", pipeline=True)

    assert_equal(open_checkpoint(tmp_path / "out"), golden)
    (model,) = tmp_path.rglob("mp_rank_*_model_states.pt")
    assert open_torch_file(model).value["module"] is None
    names = {path.name for path in tmp_path.rglob("zero/*.deepspeed_experts.*")}
    assert {name.split(".")[0] for name in names} == {"3", "5"}
    assert len(names) == 2 * 4 * 4  # layers, experts, parameters


def test_a_missing_share_of_the_experts_is_named(tmp_path: Path, golden: Checkpoint) -> None:
    written(golden, tmp_path / "out", dp_size=2, ep_size=2)
    folder = tmp_path / "out" / "global_step10"
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()

    found = open_checkpoint(tmp_path / "out")

    assert any("data-parallel rank [1] missing" in note for note in found.notes)
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    with pytest.raises(Exception, match="data-parallel rank"):
        found.tensor(name, "master").numpy()


def test_arguments_and_configuration_agree() -> None:
    args = {"num_layers": 6, "num_experts": [4, 8, 8], "expert_interval": 2, "topk": 2}
    config = expert_config({**args, "mlp_type": "residual", "moe_token_dropping": False})
    assert config["layer_experts"] == [0, 4, 0, 8, 0, 8]
    assert config["moe_residual"]
    layers = {f"decoder.layers.{n}": count for n, count in ((1, 4), (3, 8), (5, 8))}
    back = expert_args(config, layers, ep_size=2)
    assert back["num_experts"] == [4, 8, 8]
    assert (back["expert_interval"], back["topk"], back["mlp_type"]) == (2, 2, "residual")
    assert expert_config({"num_layers": 6, "num_experts": [1]}) == {}
