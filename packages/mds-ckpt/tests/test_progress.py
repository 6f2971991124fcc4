"""What begins anew on request: counts, schedule, random generators; releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from golden import fixture

from mds_ckpt import convert
from mds_ckpt.cli import main
from mds_ckpt.errors import UsageError
from mds_ckpt.files.file_operations import REAL
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.plan import Options
from mds_ckpt.writers import deepspeed


def test_counters_begin_anew_and_the_rest_stays(tmp_path: Path) -> None:
    source = fixture("gpt_nopipe_tp2dp2_z1_fp16") / "ckpt"

    convert(source, tmp_path / "out", to="deepspeed", tp=2, dp=2, reset=["counters"])

    found, before = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    names = ("iteration", "consumed_samples", "consumed_tokens", "skipped_steps")
    assert [found.counters[name] for name in names] == [0, 0, 0, 0]
    assert found.training["schedule"] == before.training["schedule"]
    assert found.training["optimizer"]["step"] == before.training["optimizer"]["step"] == 10
    assert found.states.keys() == before.states.keys()
    assert found.carried.keys() == {"rng", "clip_grad"}


def test_the_norm_of_clipping_is_that_of_the_source(tmp_path: Path) -> None:
    source = open_checkpoint(fixture("gpt_nopipe_tp2dp2_z1_fp16") / "ckpt")
    other = replace(source, carried={"clip_grad": 0.25})
    made = deepspeed.plan(other, Options(), layout=TargetLayout())
    made.write(tmp_path, REAL)

    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = open_torch_file(tmp_path / "global_step10" / name).value["optimizer_state_dict"]
    assert state["clip_grad"] == 0.25
    assert open_checkpoint(tmp_path).carried["clip_grad"] == 0.25


def test_the_schedule_and_the_generators_begin_anew(tmp_path: Path) -> None:
    source = fixture("gpt_nopipe_tp2dp2_z1_fp16") / "ckpt"

    convert(source, tmp_path / "out", to="deepspeed", tp=2, reset=["schedule", "rng"])

    found, before = open_checkpoint(tmp_path / "out"), open_checkpoint(source)
    schedule = before.training["schedule"]
    assert found.training["schedule"] == {**schedule, "num_steps": 0, "num_tokens": 0}
    assert found.counters["iteration"] == 10
    assert "rng" not in found.carried


def test_a_release_has_weights_only_and_begins_at_zero(tmp_path: Path) -> None:
    source = fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt"

    for target in ("deepspeed", "mds", "megatron"):
        convert(source, tmp_path / target, to=target, release=True)

        found = open_checkpoint(tmp_path / target)
        assert list(found.states) == ["weight"]
        assert found.step in (0, None)
        assert not any(found.counters.values())
    path = tmp_path / "megatron" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    assert open_torch_file(path).value["args"]["consumed_train_samples"] == 0


def test_the_command_line_says_what_can_be_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt")
    arguments = ["convert", source, str(tmp_path / "out"), "--to", "deepspeed"]

    assert main([*arguments, "--reset", "counters,optimism"]) == 2
    assert "'optimism' can't be reset; give counters, schedule, rng" in capsys.readouterr().err
    assert main([*arguments, "--reset", "counters, rng", "--no-pipeline", "--zero-stage", "2"]) == 0
    assert "written for one module" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").counters["iteration"] == 0
    with pytest.raises(UsageError, match="--zero-stage is 4"):
        convert(source, tmp_path / "no", to="deepspeed", zero_stage=4)
