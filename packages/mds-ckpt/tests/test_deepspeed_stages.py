"""Megatron-DeepSpeed's files in every form and ZeRO stage: written, and read back bitwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed_samples import Sample
from golden import fixture
from test_deepspeed_writer import assert_equal, leaves, written

import mds_ckpt
from mds_ckpt import convert
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.megatron import target_zero
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.plan import Options
from mds_ckpt.writers import deepspeed

SETS = ("gpt_nopipe_dp2_z0_bf16", "gpt_nopipe_tp2dp2_z1_fp16", "gpt_nopipe_dp2_z3_bf16")
FORMS: list[dict[str, Any]] = [
    {"zero_stage": 0, "is_pipeline": False, "tp_size": 2},
    {"zero_stage": 0, "is_pipeline": True, "tp_size": 2, "pp_size": 3},
    {"zero_stage": 1, "is_pipeline": False, "tp_size": 2, "dp_size": 3},
    {"zero_stage": 1, "is_pipeline": True, "pp_size": 2, "dp_size": 2},
    {"zero_stage": 2, "is_pipeline": False, "dp_size": 3},
    {"zero_stage": 3, "is_pipeline": False, "tp_size": 2, "dp_size": 3},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"z{form['zero_stage']}")
@pytest.mark.parametrize("name", SETS)
def test_every_stage_goes_to_every_other(tmp_path: Path, name: str, form: dict[str, Any]) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")

    found = written(source, tmp_path / "out", **form)

    assert_equal(found, source)
    assert found.counters == source.counters
    assert found.config == source.config
    assert found.training["schedule"] == source.training["schedule"]
    ours, theirs = found.training["optimizer"], source.training["optimizer"]
    assert ours["groups"] == theirs["groups"]
    assert ours["step"] == theirs["step"]
    kept = ("class", "cur_scale", "cur_iter", "scale_factor", "scale_window")
    scales = [{key: each["loss_scaler"].get(key) for key in kept} for each in (ours, theirs)]
    is_unshared = form["zero_stage"] == 0
    assert scales[0] == scales[1] or (is_unshared and scales[0]["cur_scale"] == 1.0)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gpt_nopipe_dp2_z0_bf16", {"zero_stage": 0, "dp_size": 2}),
        ("gpt_nopipe_tp2dp2_z1_fp16", {"zero_stage": 1, "tp_size": 2, "dp_size": 2}),
        ("gpt_nopipe_dp2_z3_bf16", {"zero_stage": 3, "dp_size": 2}),
        ("moe_nopipe_dp2ep2_z1_bf16", {"zero_stage": 1, "dp_size": 2, "ep_size": 2}),
    ],
)
def test_on_the_same_layout_the_files_equal_deepspeeds_own(
    tmp_path: Path, name: str, form: dict[str, Any]
) -> None:
    """But for padding, arguments, and the second copy of experts under a broken prefix."""
    folder = fixture(name) / "ckpt" / "global_step10"
    source = open_checkpoint(folder)
    written(source, tmp_path / "out", is_pipeline=False, **form)
    left_out = ("/ds_config", "/universal_checkpoint_info", "/sparse_tensor", "/module/encoderlay")
    compared = 0

    for path in sorted(folder.iterdir()):
        theirs = open_torch_file(path)
        ours = open_torch_file(tmp_path / "out" / "global_step10" / path.name)
        wanted, found = dict(leaves(theirs, theirs.value)), dict(leaves(ours, ours.value))
        for key, value in wanted.items():
            if key.startswith(left_out):
                continue
            if not isinstance(value, np.ndarray):
                assert found[key] == value, (path.name, key)
                continue
            mine = found[key]
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype), (path.name, key)
            # Padding rows of the vocabulary were trained there and are zeros here.
            different = np.flatnonzero(mine.reshape(-1) != value.reshape(-1))
            assert not np.any(mine.reshape(-1)[different]), (path.name, key)
            assert different.size <= 168 * 32, (path.name, key)
            compared += 1
    assert compared > 20


def test_states_of_random_generators_are_carried_to_the_same_ranks(tmp_path: Path) -> None:
    folder = fixture("gpt_nopipe_tp2dp2_z1_fp16") / "ckpt"
    source = open_checkpoint(folder)

    written(source, tmp_path / "same", tp_size=2, dp_size=1, is_pipeline=True)
    written(source, tmp_path / "other", tp_size=1, dp_size=1)

    step = Path("global_step10") / "mp_rank_01_model_states.pt"
    theirs, ours = open_torch_file(folder / step), open_torch_file(tmp_path / "same" / step)
    wanted = dict(leaves(theirs, theirs.value["rng_state"]))
    found = dict(leaves(ours, ours.value["rng_state"]))
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        assert np.array_equal(found[key], value) if isinstance(value, np.ndarray) else True
    other = open_torch_file(tmp_path / "other" / "global_step10" / "mp_rank_00_model_states.pt")
    assert "rng_state" not in other.value


def test_a_bert_and_a_t5_have_files_without_pipeline(tmp_path: Path) -> None:
    for name in ("bert_tp1_legacy_fp32", "t5_tp1_legacy_fp32"):
        source = open_checkpoint(fixture(name) / "ckpt")
        for stage in (0, 3):
            target = tmp_path / f"{name}{stage}"
            found = written(source, target, zero_stage=stage, tp_size=2, dp_size=2)
            weights = {
                state: tensors for state, tensors in found.states.items() if state != "master"
            }
            assert_equal(replace(found, states=weights), source)


def test_stage_3_begins_another_flat_tensor_where_deepspeed_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_zero, "SUB_GROUP", 3000)
    source = open_checkpoint(fixture("gpt_nopipe_dp2_z3_bf16") / "ckpt")

    found = written(source, tmp_path / "out", zero_stage=3, dp_size=2)

    assert_equal(found, source)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = open_torch_file(tmp_path / "out" / "global_step10" / name).value["optimizer_state_dict"]
    assert len(state["fp32_flat_groups"]) > 5
    first = state["optimizer_state_dict"]["param_groups"][0]["params"]
    assert first == list(range(len(first)))


def test_fp32_weights_come_from_the_masters(tmp_path: Path) -> None:
    source = fixture("gpt_nopipe_dp2_z3_bf16") / "ckpt"

    report = convert(source, tmp_path / "out", to="deepspeed", dtype="F32", zero_stage=0)

    found, wanted = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    assert any("the fp32 masters are written in their place" in what for what in report.dropped)
    for name, tensor in wanted.states["master"].items():
        assert found.tensor(name).numpy().tobytes() == tensor.numpy().tobytes()


def test_every_format_takes_the_masters_where_fp32_is_wanted(tmp_path: Path) -> None:
    source = fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt"
    wanted = open_checkpoint(source)
    for target in ("hf", "mds", "megatron", "mcore", "universal"):
        convert(source, tmp_path / target, to=target, dtype="F32")

        found = open_checkpoint(tmp_path / target)
        for name, tensor in wanted.states["master"].items():
            np.testing.assert_array_equal(found.tensor(name).numpy(), tensor.numpy())
    convert(source, tmp_path / "release", to="deepspeed", dtype="F32", release=True)
    words = "embedding.word_embeddings.weight"
    released = open_checkpoint(tmp_path / "release").tensor(words)
    np.testing.assert_array_equal(released.numpy(), wanted.tensor(words, "master").numpy())


def test_masters_are_made_of_weights_that_have_none(tmp_path: Path) -> None:
    source = open_checkpoint(fixture("gpt_nopipe_dp2_z3_bf16") / "ckpt")
    states = {state: found for state, found in source.states.items() if state != "master"}

    found = written(replace(source, states=states), tmp_path / "out", zero_stage=1, dp_size=2)

    for name, tensor in source.tensors.items():
        assert np.array_equal(found.tensor(name, "master").numpy(), tensor.numpy().astype("f4"))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"zero_stage": 2, "is_pipeline": True}, "no ZeRO stage 2 in a pipeline"),
        ({"zero_stage": 3, "pp_size": 2}, "no ZeRO stage 3 in a pipeline"),
        ({"is_pipeline": False, "pp_size": 2}, "--no-pipeline writes one stage"),
        ({"vp_size": 2}, "leave --vp away"),
        ({"ep_size": 2}, "--ep 2 shares experts out among --dp 1 ranks"),
        ({"ep_size": 2, "dp_size": 2}, "no experts to share out; leave --ep away"),
        ({"pp_size": 2, "layers_per_stage": (3, 2)}, "stages of 3, 2 layers are not 4 layers"),
        ({"layers_per_stage": (2, 2)}, "names 2 stages and --pp says 1"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(degrees: dict[str, Any], message: str) -> None:
    source = open_checkpoint(fixture("gpt_nopipe_dp2_z3_bf16") / "ckpt")

    with pytest.raises((UsageError, UnsupportedError), match=message):
        deepspeed.plan(source, Options(), layout=TargetLayout(**degrees))


def test_stage_3_without_optimizer_state_is_refused(tmp_path: Path) -> None:
    sample = Sample().write(tmp_path / "in")

    with pytest.raises(UnsupportedError, match="stage 3 keeps weights in optimizer files"):
        convert(sample, tmp_path / "out", to="deepspeed", zero_stage=3, weights_only=True)
    assert not (tmp_path / "out").exists()


def test_layers_are_divided_as_asked(tmp_path: Path) -> None:
    source = Sample(layers=5).write(tmp_path / "in")

    convert(source, tmp_path / "out", to="deepspeed", pp=3, layers_per_stage=(1, 3, 1))

    counts = []
    for rank in range(3):
        path = tmp_path / "out" / "global_step3" / f"mp_rank_{rank:02d}_model_states.pt"
        names = [n for group in open_torch_file(path).value["param_shapes"] for n in group]
        counts.append(len({n.split(".")[0] for n in names if "self_attention" in n}))
    assert counts == [1, 3, 1]
    assert_equal(open_checkpoint(tmp_path / "out"), open_checkpoint(source))


def test_options_of_ranks_mean_nothing_in_whole_formats(tmp_path: Path) -> None:
    source = Sample().write(tmp_path / "in")

    with pytest.raises(UsageError, match="leave --dp and --zero-stage away"):
        convert(source, tmp_path / "out", to="mds", dp=2, zero_stage=1)
    with pytest.raises(UsageError, match="not shared out by DeepSpeed; leave --dp and --ep"):
        convert(source, tmp_path / "out", to="megatron", ep=2, dp=2)


def test_the_form_is_told_and_can_be_chosen(tmp_path: Path) -> None:
    source = Sample().write(tmp_path / "in")

    pipeline = convert(source, tmp_path / "a", to="deepspeed", dry_run=True)
    plain = convert(source, tmp_path / "b", to="deepspeed", pipeline=False, dp=2, zero_stage=2)

    assert any("written for a pipeline (--no-pipeline" in note for note in pipeline.notes)
    assert any("dp 2, ZeRO stage 2" in note for note in plain.notes)
    assert open_checkpoint(tmp_path / "b").parallel["zero_stage"] == 2


def test_universal_of_stage_3_holds_what_deepspeeds_own_tool_makes(tmp_path: Path) -> None:
    source = fixture("gpt_nopipe_dp2_z3_bf16") / "ckpt"

    report = convert(source, tmp_path / "out", to="universal")

    assert_equal(open_checkpoint(tmp_path / "out"), open_checkpoint(source))
    theirs = fixture("gpt_nopipe_dp2_z3_bf16.universal") / "global_step10_universal" / "zero"
    ours = tmp_path / "out" / "global_step10_universal" / "zero"
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()}
    words = open_checkpoint(source).model.vocab_size * 32
    for path in theirs.rglob("[!s]*.pt"):
        if path.parent == theirs:
            continue
        flat, named = open_torch_file(path), open_torch_file(ours / path.relative_to(theirs))
        whole, wanted = named.read(named.value["param"]).reshape(-1), flat.read(flat.value)
        assert whole.size == wanted.size  # stage 3 cuts what lies there, so padding must be there
        if "word_embeddings" in str(path):
            assert not whole[words:].any()
            whole, wanted = whole[:words], wanted[:words]
        np.testing.assert_array_equal(whole, wanted, err_msg=str(path))
    state = open_torch_file(ours / "optimizer_state.pt")
    inner = state.value["optimizer_state_dict"]
    assert float(state.read(inner["state"][0]["step"])) == 10
    assert [group["weight_decay"] for group in inner["param_groups"]] == [0.1, 0.0]
    own = open_torch_file(ours.parent / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert own.value["iteration"] == 10
    assert any("settings of the first" in note for note in report.notes)
    assert not mds_ckpt.verify(tmp_path / "out").problems


def test_universal_is_for_the_stage_that_is_asked_for(tmp_path: Path) -> None:
    source = fixture("gpt_nopipe_dp2_z3_bf16") / "ckpt"

    first = convert(source, tmp_path / "first", to="universal", zero_stage=1, pipeline=False)

    assert_equal(open_checkpoint(tmp_path / "first"), open_checkpoint(source))
    assert any("--zero-stage 3 for stage 3" in note for note in first.notes)
    assert not list((tmp_path / "first").rglob("zero_pp_rank*"))
    experts = fixture("moe_nopipe_dp2ep2_z1_bf16") / "ckpt"
    with pytest.raises(UnsupportedError, match="no ZeRO stage 3 for a model with experts"):
        convert(experts, tmp_path / "experts", to="universal", zero_stage=3)
    with pytest.raises(UsageError, match="no ZeRO stage 3 in a pipeline"):
        convert(source, tmp_path / "pipe", to="universal", zero_stage=3, pipeline=True)
    with pytest.raises(UsageError, match="leave --zero-stage 0 away"):
        convert(source, tmp_path / "none", to="universal", zero_stage=0)


def test_experts_in_stage_3_are_refused() -> None:
    source = open_checkpoint(fixture("moe_nopipe_dp2ep2_z1_bf16") / "ckpt")

    with pytest.raises(UnsupportedError, match="no ZeRO stage 3 for a model with experts"):
        deepspeed.plan(source, Options(), layout=TargetLayout(zero_stage=3))
