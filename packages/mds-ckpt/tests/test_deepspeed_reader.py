from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed_samples import Sample
from golden import case, expected, fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.formats.megatron_deepspeed import FORMAT, open_deepspeed
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.pickles.torch_writer import save_torch_file, size
from mds_ckpt.read_options import ReadOptions

GOLDEN = [
    "gpt_tp2pp2dp2_z1_bf16",
    "llama_tp2pp2dp1_z1_bf16",
    "gpt_nopipe_tp2dp2_z1_fp16",
    "gpt_nopipe_dp2_z0_bf16",
    "gpt_nopipe_dp2_z3_bf16",
    "gpt_HEADqkv_nopipe_tp1dp1_z1_bf16",
]


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize(("kind", "state"), [("lp", "weight"), ("fp32", "master")])
def test_golden_checkpoints_are_read_bit_for_bit(name: str, kind: str, state: str) -> None:
    wanted = expected(name, kind, thirds="HEAD" in name)

    checkpoint = open_checkpoint(fixture(name) / "ckpt")

    if not wanted:
        pytest.skip("this set stores no masters")
    assert checkpoint.states[state].keys() == wanted.keys()
    for parameter, values in wanted.items():
        tensor = checkpoint.tensor(parameter, state)
        assert tensor.shape == values.shape
        np.testing.assert_array_equal(tensor.numpy().astype("f4"), values, err_msg=parameter)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoints_verify(name: str) -> None:
    checkpoint = open_checkpoint(fixture(name) / "ckpt")

    assert list(FORMAT.check(checkpoint, True)) == []
    assert checkpoint.counters["iteration"] == 10
    assert checkpoint.counters["consumed_samples"] == 80
    assert checkpoint.counters["applied_updates"] == 10
    assert checkpoint.config["vocab_size"] == 600


def assert_equal(checkpoint: Checkpoint, sample: Sample) -> None:
    wanted = dict(sample.tensors)
    if sample.stage == 3:  # weights are the masters, whose type is the run's
        wanted = {k: v for k, v in wanted.items() if not k.startswith(("weight", "master"))}
        for name in sample.names:
            wanted[f"weight/{name}"] = sample.tensors[f"master/{name}"]
    found = {
        f"{s}/{name}": t for s, tensors in checkpoint.states.items() for name, t in tensors.items()
    }
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[key].numpy(), values, err_msg=key)


layouts = st.builds(
    Sample,
    layers=st.integers(2, 3),
    groups=st.sampled_from([2, 4]),
    vocab=st.integers(5, 20),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 3]),
    gated=st.booleans(),
    tied=st.booleans(),
    slice_mappings=st.booleans(),
    stage=st.sampled_from([1, 2]),
    first_block=st.sampled_from([1, 2, 3]),
    norm_gap=st.sampled_from([0, 1]),
    prefix=st.sampled_from(["", "bf16_", "fp16_"]),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(layouts)
def test_every_pipeline_layout_is_read(tmp_path_factory: Any, sample: Sample) -> None:
    root = sample.write(tmp_path_factory.mktemp("sample"))

    checkpoint = open_checkpoint(root)

    assert_equal(checkpoint, sample)
    assert list(FORMAT.check(checkpoint, True)) == []
    assert checkpoint.parallel["tp"] == sample.tp
    assert checkpoint.parallel["pp"] == sample.pp
    assert checkpoint.parallel["dp"] == sample.dp


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Sample,
        tp=st.sampled_from([1, 2]),
        dp=st.sampled_from([1, 2, 3]),
        groups=st.sampled_from([2, 4]),
        gated=st.booleans(),
        tied=st.booleans(),
        stage=st.sampled_from([1, 2, 3]),
        slice_mappings=st.booleans(),
        pipeline=st.just(False),
    )
)
def test_every_layout_without_pipeline_is_read(tmp_path_factory: Any, sample: Sample) -> None:
    root = sample.write(tmp_path_factory.mktemp("sample"))

    checkpoint = open_checkpoint(root)

    assert_equal(checkpoint, sample)
    assert list(FORMAT.check(checkpoint, True)) == []


def test_thirds_of_each_rank_are_regrouped(tmp_path: Path) -> None:
    sample = Sample(tp=2, thirds=True)

    assert_equal(open_checkpoint(sample.write(tmp_path)), sample)


def test_more_than_a_hundred_layers_stay_in_order(tmp_path: Path) -> None:
    sample = Sample(layers=101, hidden=4, heads=1, groups=1, width=4)

    assert_equal(open_checkpoint(sample.write(tmp_path)), sample)


def test_reading_a_part_reads_only_what_it_takes(tmp_path: Path) -> None:
    sample = Sample(tp=2, pp=2, dp=3)
    checkpoint = open_checkpoint(sample.write(tmp_path))
    name = "decoder.layers.0.mlp.linear_fc2.weight"

    part = checkpoint.tensor(name, "exp_avg").read([(2, 5), (3, 11)])

    np.testing.assert_array_equal(part, sample.tensors[f"exp_avg/{name}"][2:5, 3:11])


@pytest.mark.parametrize("mode", ["assert", "first", "average"])
def test_copies_that_differ_are_refused_or_resolved_as_asked(tmp_path: Path, mode: Any) -> None:
    sample = Sample(tp=2)
    root = sample.write(tmp_path)
    path = root / "global_step3" / "layer_02-model_01-model_states.pt"
    name = "decoder.layers.0.input_layernorm.weight"
    path.unlink()
    tensors = {
        sample.place(n)[1]: sample.local("weight", n, 1)
        for n in sample.names
        if n.startswith("decoder.layers.0.")
    }
    tensors["input_layernorm.weight"] = tensors["input_layernorm.weight"] + 1
    save_torch_file(path, tensors)

    checkpoint = open_deepspeed(root, ReadOptions(replicated=mode))

    first = sample.tensors[f"weight/{name}"]
    if mode == "assert":
        with pytest.raises(RejectedError, match=r"copies 0 and 1 of 2 differ by up to 1\b"):
            checkpoint.tensor(name).numpy()
        problems = [str(problem) for problem in FORMAT.check(checkpoint, True)]
        assert len(problems) == 1
        assert name in problems[0]
    else:
        wanted = first if mode == "first" else first + np.float32(0.5)
        np.testing.assert_allclose(checkpoint.tensor(name).numpy(), wanted, rtol=1e-6)


def test_a_missing_layer_file_is_named(tmp_path: Path) -> None:
    root = Sample(tp=2).write(tmp_path)
    (root / "global_step3" / "layer_03-model_01-model_states.pt").unlink()

    with pytest.raises(RejectedError, match=r"copy layer_03-model_01-model_states\.pt here"):
        open_checkpoint(root)


def test_a_layer_that_is_missing_on_all_ranks_is_noticed(tmp_path: Path) -> None:
    root = Sample(layers=4, tp=2).write(tmp_path)
    for path in root.glob("global_step3/layer_03-*"):
        path.unlink()

    with pytest.raises(RejectedError, match="layer 3 has no files"):
        open_checkpoint(root)


def test_a_missing_model_file_is_named_when_it_holds_weights(tmp_path: Path) -> None:
    root = Sample(tp=2, pipeline=False).write(tmp_path)
    (root / "global_step3" / "mp_rank_01_model_states.pt").unlink()

    with pytest.raises(RejectedError, match=r"copy mp_rank_01_model_states\.pt here"):
        open_checkpoint(root)


def test_a_missing_optimizer_shard_hurts_moments_and_not_weights(tmp_path: Path) -> None:
    sample = Sample(tp=2, dp=3)
    root = sample.write(tmp_path)
    (root / "global_step3" / "zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()

    checkpoint = open_checkpoint(root)

    assert any("3 optimizer files" in note and "2 found" in note for note in checkpoint.notes)
    unreadable = 0
    for name in sample.names:
        np.testing.assert_array_equal(
            checkpoint.tensor(name).numpy(), sample.tensors[f"weight/{name}"]
        )
        try:
            values = checkpoint.tensor(name, "exp_avg").numpy()
        except RejectedError as error:
            unreadable += 1
            assert re.search("3 optimizer files .* expected, 2 found", error.reason)  # noqa: PT017
        else:
            np.testing.assert_array_equal(values, sample.tensors[f"exp_avg/{name}"])
    assert 0 < unreadable < len(sample.names)
    problems = list(FORMAT.check(checkpoint, False))
    assert [p.file for p in problems] == ["zero_pp_rank_1_mp_rank_01_optim_states.pt"]


@pytest.mark.parametrize("name", ["in_world3", "in_world4_two_flat_groups"])
def test_a_missing_shard_of_stage_3_is_named(tmp_path: Path, name: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(case("A11") / name, root)
    for path in root.glob("*/zero_pp_rank_1_*optim*"):
        path.unlink()
    count = 3 if name == "in_world3" else 4

    with pytest.raises(RejectedError, match=f"{count} optimizer files .* {count - 1} found"):
        open_checkpoint(root)


@pytest.mark.parametrize("part", [1, 4, 8, 12, 15])
def test_a_truncated_file_is_named(tmp_path: Path, part: int) -> None:
    root = Sample().write(tmp_path)
    path = root / "global_step3" / "layer_02-model_00-model_states.pt"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * part // 16])

    with pytest.raises(RejectedError, match=path.name):
        open_checkpoint(root)


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    root = Sample().write(tmp_path)
    path = root / "global_step3" / "layer_02-model_00-model_states.pt"
    data = bytearray(path.read_bytes())
    at = data.find(Sample().local("weight", "decoder.layers.0.input_layernorm.weight", 0).tobytes())
    data[at + 5] ^= 4
    path.write_bytes(data)

    problems = list(FORMAT.check(open_checkpoint(root), True))

    assert [problem.file for problem in problems] == [path.name]
    assert "checksum" in problems[0].reason


@pytest.mark.parametrize(
    "text", ["../evil", "/abs", "", "9" * 5000, "global_step3\n../x", "a\0b", "nothing"]
)
def test_a_hostile_latest_is_refused(tmp_path: Path, text: str) -> None:
    root = Sample().write(tmp_path / "root")
    shutil.copytree(root / "global_step3", tmp_path / "evil")
    (root / "latest").write_text(text)

    with pytest.raises(RejectedError, match="latest"):
        open_checkpoint(root)


def test_a_step_folder_can_be_named_itself(tmp_path: Path) -> None:
    sample = Sample()

    assert_equal(open_checkpoint(sample.write(tmp_path) / "global_step3"), sample)


def test_without_latest_the_newest_step_is_taken(tmp_path: Path) -> None:
    root = Sample().write(tmp_path)
    (root / "latest").unlink()
    (root / "global_step3").rename(root / "global_step12")
    shutil.copytree(root / "global_step12", root / "global_step7")

    assert open_checkpoint(root).path.name == "global_step12"


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    root = Sample().write(tmp_path)
    path = root / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(path, path.with_name(f"bf16_{path.name}"))

    with pytest.raises(RejectedError, match="are the same rank's"):
        open_checkpoint(root)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    root = Sample().write(tmp_path / "root")
    path = root / "global_step3" / "layer_02-model_00-model_states.pt"
    path.rename(tmp_path / "elsewhere.pt")
    path.symlink_to(tmp_path / "elsewhere.pt")

    with pytest.raises(RejectedError, match="link to another place"):
        open_checkpoint(root)


def test_experts_are_read_from_their_own_files() -> None:
    checkpoint = open_checkpoint(fixture("moe_nopipe_dp2ep2_z1_bf16") / "ckpt")

    experts = [name for name in checkpoint.tensors if ".local_experts." in name]
    assert len(experts) == 2 * 4 * 4
    with np.load(fixture("moe_nopipe_dp2ep2_z1_bf16") / "expected.npz") as wanted:
        stem = "language_model.encoder.layers.1.mlp.deepspeed_moe"
        for number in (0, 1):
            key = f"lp/{stem}.experts.deepspeed_experts.{number}.dense_h_to_4h.weight"
            name = f"decoder.layers.1.mlp.experts.local_experts.{number}.linear_fc1.weight"
            np.testing.assert_array_equal(checkpoint.tensor(name).numpy().astype("f4"), wanted[key])


class Frozen(Sample):
    """Stage 3 with a table of positions that is not trained: its shares are in the model files."""

    NAME = "embedding.position_embeddings.weight"

    def groups_of(self, names: list[str]) -> list[list[str]]:
        return [[n for n in group if n != self.NAME] for group in super().groups_of(names)]

    def write(self, root: Path) -> Path:
        super().write(root)
        values = self.tensors[f"weight/{self.NAME}"]
        flat = np.concatenate([values.reshape(-1), np.full(-values.size % self.dp, -1, "f4")])
        for path in root.rglob("*_model_states.pt"):
            dp = int(re.findall(r"zero_pp_rank_(\d+)", path.name)[0])
            state = {**open_torch_file(path).value, "module": {}}
            stored = self.engine_name(self.NAME)
            state["frozen_param_shapes"] = {stored: size(values.shape)}
            state["frozen_param_fragments"] = {stored: np.split(flat, self.dp)[dp]}
            path.unlink()
            save_torch_file(path, state)
        return root


@pytest.mark.parametrize("dp", [1, 3])
def test_frozen_parameters_of_stage_3_are_read(tmp_path: Path, dp: int) -> None:
    sample = Frozen(stage=3, pipeline=False, dp=dp, positions=7)

    found = open_checkpoint(sample.write(tmp_path / "c"))

    assert found.tensors.keys() == set(sample.names)
    for name in sample.names:
        state = "weight" if name == Frozen.NAME else "master"
        wanted = sample.tensors[f"{state}/{name}"]
        np.testing.assert_array_equal(found.tensor(name).numpy(), wanted, err_msg=name)
    assert Frozen.NAME not in found.states["exp_avg"]
    assert "1 parameters have no exp_avg (they are frozen)" in found.notes
