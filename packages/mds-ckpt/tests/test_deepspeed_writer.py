from __future__ import annotations

from pathlib import Path
from typing import Any

import ckpt_samples as samples
import ml_dtypes
import numpy as np
import pytest
from deepspeed_samples import Sample
from golden import case, fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mds_ckpt import convert
from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.files.file_operations import REAL
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.megatron.target_layout import TargetLayout
from mds_ckpt.pickles.archive import TorchFile, open_torch_file
from mds_ckpt.pickles.records import Namespace, NumpyArray, Opaque, TensorRef
from mds_ckpt.plan import Options, check_accounting
from mds_ckpt.writers import deepspeed, universal


def written(source: Checkpoint, target: Path, **degrees: int) -> Checkpoint:
    made = deepspeed.plan(source, Options(), layout=TargetLayout(**degrees))
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


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 2, 2), (2, 1, 3)])
@pytest.mark.parametrize(
    "name", ["gpt_tp2pp2dp2_z1_bf16", "llama_tp2pp2dp1_z1_bf16", "gpt_nopipe_dp2_z3_bf16"]
)
def test_golden_checkpoints_come_back_bitwise_from_any_layout(
    tmp_path: Path, name: str, degrees: tuple[int, int, int]
) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")
    tp, pp, dp = degrees

    found = written(source, tmp_path / "out", tp_size=tp, pp_size=pp, dp_size=dp)

    assert_equal(found, source)
    assert found.counters == source.counters
    assert found.config == source.config
    assert found.training["schedule"] == source.training["schedule"]
    assert found.training["optimizer"] == source.training["optimizer"]


def leaves(file: TorchFile, value: Any, path: str = "") -> Any:
    if isinstance(value, TensorRef):
        yield path, file.read(value)
    elif isinstance(value, NumpyArray):
        yield path, value.numpy()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(file, item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(file, item, f"{path}/{number}")
    elif isinstance(value, Opaque):
        yield path, (str(value.cls), str(value.state))
    elif not isinstance(value, Namespace):
        yield path, value


def test_on_the_same_layout_the_files_equal_deepspeeds_own(tmp_path: Path) -> None:
    """But for padding rows, a copy that nobody trained, random states, and arguments."""
    folder = fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt"
    source = open_checkpoint(folder)
    written(source, tmp_path / "out", tp_size=2, pp_size=2, dp_size=2)
    left_out = ("/rng_state", "/ds_config", "/universal_checkpoint_info", "/sparse_tensor")
    compared = 0

    for path in sorted((folder / "global_step10").iterdir()):
        theirs = open_torch_file(path)
        ours = open_torch_file(tmp_path / "out" / "global_step10" / path.name)
        wanted, found = dict(leaves(theirs, theirs.value)), dict(leaves(ours, ours.value))
        for key, value in wanted.items():
            if key.startswith(left_out):
                continue
            if not isinstance(value, np.ndarray):
                assert found[key] == value, (path.name, key)
                continue
            assert (found[key].shape, found[key].dtype) == (value.shape, value.dtype)
            # The last words of rank 1 are padding; stage 1 holds the untrained copy.
            has_padding = key.endswith("/word_embeddings.weight") and "model_01" in path.name
            is_decayed = key.endswith(("/0", "/0/exp_avg", "/0/exp_avg_sq"))
            if has_padding or (is_decayed and "mp_rank_00" not in path.name):
                continue
            assert found[key].tobytes() == value.tobytes(), (path.name, key)
            compared += 1
    assert compared > 140


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Sample,
        layers=st.integers(2, 4),
        groups=st.sampled_from([2, 4]),
        vocab=st.integers(5, 20),
        tp=st.sampled_from([1, 2]),
        dp=st.sampled_from([1, 2]),
        gated=st.booleans(),
        tied=st.booleans(),
        pipeline=st.booleans(),
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
)
def test_every_layout_goes_to_every_other(
    tmp_path_factory: Any, sample: Sample, tp: int, pp: int, dp: int
) -> None:
    folder = tmp_path_factory.mktemp("sample")
    source = open_checkpoint(sample.write(folder / "in"))

    found = written(source, folder / "out", tp_size=tp, pp_size=pp, dp_size=dp)

    for state in ("weight", "master", "exp_avg", "exp_avg_sq"):
        for name in sample.names:
            values = found.tensor(name, state).numpy()
            np.testing.assert_array_equal(values, sample.tensors[f"{state}/{name}"], err_msg=name)


def test_weights_alone_need_no_optimizer_files(tmp_path: Path) -> None:
    convert(case("A16") / "in", tmp_path / "out", to="deepspeed")

    found = open_checkpoint(tmp_path / "out")

    assert list(found.states) == ["weight"]
    assert (tmp_path / "out" / "latest").read_text() == "global_step120"
    assert not list((tmp_path / "out" / "global_step120").glob("*optim*"))
    assert not any("disagree" in note for note in found.notes)


def test_a_model_without_a_pipeline_form_is_refused() -> None:
    source = open_checkpoint(fixture("bert_tp1_legacy_fp32") / "ckpt")

    with pytest.raises(UnsupportedError, match="bert model has no pipeline form"):
        deepspeed.plan(source, Options(), layout=TargetLayout(is_pipeline=True))


def test_universal_equals_what_deepspeeds_own_tool_makes(tmp_path: Path) -> None:
    source = open_checkpoint(fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt")
    made = universal.plan(source, Options())
    check_accounting(source, made)

    made.write(tmp_path, REAL)

    assert_equal(open_checkpoint(tmp_path), source)
    theirs = fixture("gpt_tp2pp2dp2_z1_bf16.universal") / "global_step10_universal" / "zero"
    ours = tmp_path / "global_step10_universal" / "zero"
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()}
    for path in theirs.rglob("*.pt"):
        if path.name != "optimizer_state.pt":
            wanted, found = (
                open_torch_file(root / path.relative_to(theirs)) for root in (theirs, ours)
            )
            left, right = dict(leaves(wanted, wanted.value)), dict(leaves(found, found.value))
            assert left.keys() == right.keys()
            for key, value in left.items():
                np.testing.assert_array_equal(right[key], value, err_msg=f"{path} {key}")


def test_universal_without_optimizer_state_is_refused() -> None:
    source = open_checkpoint(case("A16") / "in")

    with pytest.raises(UnsupportedError, match="no complete optimizer state"):
        universal.plan(source, Options())


def test_an_embedding_in_fp32_makes_no_fp32_run_of_a_bf16_one(tmp_path: Path) -> None:
    """Megatron-DeepSpeed's ``--embedding-weights-in-fp32``."""
    record = samples.model("gpt2")
    weights = samples.arrays(record, dtype=ml_dtypes.bfloat16)
    words = "embedding.word_embeddings.weight"
    weights[words] = weights[words].astype("f4")
    masters = {name: array.astype("f4") for name, array in weights.items()}
    samples.save(tmp_path / "in", record, weights, masters=masters)
    source = open_checkpoint(tmp_path / "in")

    found = written(source, tmp_path / "out")

    assert (tmp_path / "out").is_dir()
    assert found.training["config"]["bf16"] is True
    for name, tensor in source.tensors.items():
        assert found.tensor(name).dtype == tensor.dtype
        assert found.tensor(name).numpy().tobytes() == tensor.numpy().tobytes()
