from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed_samples import Sample
from golden import case, fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mds_ckpt import convert
from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.files.file_operations import REAL
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles.archive import open_torch_file
from mds_ckpt.plan import Options, check_accounting
from mds_ckpt.writers.megatron import plan


def written(
    source: Checkpoint, target: Path, *, tp: int = 1, pp: int = 1, **more: Any
) -> Checkpoint:
    extra = {key: more.pop(key) for key in ("divisible_by", "vp_size") if key in more}
    layout = TargetLayout(tp_size=tp, pp_size=pp, **extra)
    made = plan(source, Options(**more), layout=layout)
    check_accounting(source, made)
    target.mkdir()
    made.write(target, REAL)
    return open_checkpoint(target)


def assert_equal(found: Checkpoint, wanted: Checkpoint) -> None:
    assert found.states.keys() == wanted.states.keys()
    for state, tensors in wanted.states.items():
        assert found.states[state].keys() == tensors.keys()
        for name, tensor in tensors.items():
            ours, theirs = found.tensor(name, state).numpy(), tensor.numpy()
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert ours.tobytes() == theirs.tobytes(), (state, name)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 3)])
@pytest.mark.parametrize(
    "name",
    [
        "gpt_tp2pp2dp2_z1_bf16",
        "gpt_HEADqkv_nopipe_tp1dp1_z1_bf16",
        "gpt_tp2_legacy_fp32",
        "bert_tp1_legacy_fp32",
    ],
)
def test_golden_checkpoints_come_back_bitwise_from_any_layout(
    tmp_path: Path, name: str, tp: int, pp: int
) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")

    found = written(source, tmp_path / "out", tp=tp, pp=pp)

    assert_equal(found, source)
    assert found.config == source.config
    assert (found.parallel["tp"], found.parallel["pp"]) == (tp, pp)
    for counter in ("iteration", "consumed_samples", "consumed_tokens"):
        assert found.counters[counter] == source.counters[counter]


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Sample,
        layers=st.integers(2, 4),
        groups=st.sampled_from([2, 4]),
        vocab=st.integers(5, 20),
        tp=st.sampled_from([1, 2]),
        pp=st.sampled_from([1, 2]),
        gated=st.booleans(),
        tied=st.booleans(),
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
)
def test_every_layout_goes_to_every_other_and_back(
    tmp_path_factory: Any, sample: Sample, tp: int, pp: int
) -> None:
    folder = tmp_path_factory.mktemp("sample")
    source = open_checkpoint(sample.write(folder / "in"))

    found = written(source, folder / "out", tp=tp, pp=pp)

    # fp32 runs keep no masters beside their weights; the sample's differ so that a mix-up shows.
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        for name in sample.names:
            values = found.tensor(name, state).numpy()
            np.testing.assert_array_equal(values, sample.tensors[f"{state}/{name}"])


def test_a03_words_are_padded_again_on_the_way_back(tmp_path: Path) -> None:
    source = open_checkpoint(case("A03") / "in_with_info")

    written(source, tmp_path / "out", tp=2, divisible_by=8)

    whole = source.tensor("embedding.word_embeddings.weight").numpy()
    for rank, rows in ((0, slice(0, 8)), (1, slice(8, 11))):
        path = tmp_path / "out" / "iter_0000010" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        file = open_torch_file(path)
        tensor = file.value["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
        values = file.read(tensor)
        assert values.shape == (8, 8)
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values[: rows.stop - rows.start], whole[rows])


def test_a16_the_engines_counts_are_written(tmp_path: Path) -> None:
    convert(case("A16") / "in", tmp_path / "out", to="megatron")

    tracker = tmp_path / "out" / "latest_checkpointed_iteration.txt"
    state = open_torch_file(
        tmp_path / "out" / "iter_0000120" / "mp_rank_00" / "model_optim_rng.pt"
    ).value
    assert tracker.read_text() == "120"
    assert state["iteration"] == state["args"]["iteration"] == 120
    assert state["args"]["consumed_train_samples"] == 960
    assert state["args"]["tensor_model_parallel_size"] == 1
    assert state["args"]["pipeline_model_parallel_size"] == 1


def test_a16_a_release_begins_at_zero(tmp_path: Path) -> None:
    convert(case("A16") / "in", tmp_path / "out", to="megatron", release=True)

    tracker = tmp_path / "out" / "latest_checkpointed_iteration.txt"
    state = open_torch_file(
        tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    ).value
    assert tracker.read_text() == "release"
    for counter in ("consumed_train_samples", "consumed_valid_samples", "iteration"):
        assert state["args"][counter] == 0
    assert state["iteration"] == 0


def test_a07_uneven_stages_round_trip_and_too_many_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(case("A07") / "in")

    found = written(source, tmp_path / "out", pp=3)

    assert_equal(found, source)
    with pytest.raises(UnsupportedError, match=r"7 layers .* 12 pipeline stages"):
        plan(source, Options(), layout=TargetLayout(pp_size=12))


@pytest.mark.parametrize("tied", [True, False])
def test_virtual_pipeline_stages_hold_every_nth_chunk(tmp_path: Path, tied: bool) -> None:
    sample = Sample(layers=8, tied=tied)
    source = open_checkpoint(sample.write(tmp_path / "in"))

    found = written(source, tmp_path / "out", tp=2, pp=2, vp_size=2)

    states = {state: part for state, part in source.states.items() if state != "master"}
    assert_equal(found, replace(source, states=states))
    assert (found.parallel["pp"], found.parallel["vp"]) == (2, 2)
    path = tmp_path / "out" / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt"
    file = open_torch_file(path)
    assert file.value["args"]["num_layers_per_virtual_pipeline_stage"] == 2
    for chunk, layer in (("model0", 2), ("model1", 6)):
        inner = file.value[chunk]["language_model"]["encoder"]["layers.0.self_attention.dense.bias"]
        wanted = sample.tensors[f"weight/decoder.layers.{layer}.self_attention.linear_proj.bias"]
        np.testing.assert_array_equal(file.read(inner), wanted)
    assert "embedding" not in file.value["model0"]["language_model"]
    assert ("word_embeddings_for_head" in file.value["model1"]) == tied


def test_layers_that_chunks_do_not_divide_are_refused(tmp_path: Path) -> None:
    source = open_checkpoint(Sample(layers=6).write(tmp_path / "in"))

    with pytest.raises(UnsupportedError, match="6 layers can't be divided evenly among 2 chunks"):
        plan(source, Options(), layout=TargetLayout(pp_size=2, vp_size=2))


def test_thirds_stay_thirds_for_the_code_that_reads_them(tmp_path: Path) -> None:
    source = open_checkpoint(fixture("gpt_HEADqkv_nopipe_tp1dp1_z1_bf16") / "ckpt")

    found = written(source, tmp_path / "out", tp=2)

    args = found.training["config"]
    assert args["mds_qkv_layout"] == "thirds"
    assert "ds_sequence_parallel_fpdt" in args


def test_a_degree_that_does_not_fit_is_refused_before_writing() -> None:
    source = open_checkpoint(fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt")

    with pytest.raises(UnsupportedError, match=r"can.t be shared"):
        plan(source, Options(), layout=TargetLayout(tp_size=3))
    with pytest.raises(UsageError, match="tp_size is 0"):
        TargetLayout(tp_size=0)


def test_a_narrower_type_reports_what_it_loses(tmp_path: Path) -> None:
    source = open_checkpoint(case("A13") / "in_bf16")
    made = plan(source, Options(dtype="F16", weights_only=True))
    (tmp_path / "out").mkdir()

    losses = {loss.tensor: loss for loss in made.write(tmp_path / "out", REAL)}

    assert losses["decoder.layers.0.mlp.linear_fc1.weight"].infinite == 2
    assert losses["decoder.final_layernorm.bias"].zero == 1
