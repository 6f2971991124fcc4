from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed_samples import STATES, Sample
from golden import fixture

from mds_ckpt.cli import main
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.pickles.torch_writer import save_torch_file


@pytest.mark.parametrize("name", ["gpt_tp2pp2dp2_z1_bf16", "gpt_nopipe_dp2_z3_bf16"])
def test_deepspeeds_own_conversion_equals_what_we_build_from_the_shards(name: str) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")

    checkpoint = open_checkpoint(fixture(f"{name}.universal"))

    assert checkpoint.states.keys() == source.states.keys()
    for state, found in checkpoint.states.items():
        assert found.keys() == source.states[state].keys()
        for parameter, tensor in found.items():
            theirs, ours = tensor.numpy(), source.tensor(parameter, state).numpy()
            assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
            assert theirs.tobytes() == ours.tobytes(), (state, parameter)
    assert checkpoint.counters == source.counters


def write(sample: Sample, root: Path, *, stacked: bool) -> Path:
    """What ds_to_universal makes: ranks joined; with ``stacked`` as whole sub-parameters."""
    folder = root / "global_step3_universal"
    folder.mkdir(parents=True)
    (root / "latest_universal").write_text("global_step3_universal")
    sample._write_model(folder, 0, 0, sample.stages()[0])
    for name in sample.names:
        target = folder / "zero" / sample.engine_name(name)
        target.mkdir(parents=True)
        for state in STATES:
            word = "fp32" if state == "master" else state
            save_torch_file(target / f"{word}.pt", entry(sample, state, name, stacked=stacked))
        save_torch_file(target / "step.pt", np.array(2.0, "f4"))
    return root


def entry(sample: Sample, state: str, name: str, *, stacked: bool) -> dict[str, Any]:
    whole = sample.tensors[f"{state}/{name}"]
    if "linear_fc1" in name and sample.gated and stacked:
        return {"param": whole, "cat_dim": 0, "param_n_sub_params": 2}
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return {"param": whole, "cat_dim": 1}
    if "word_embeddings" in name or name == "output_layer.weight":
        return {"param": whole, "cat_dim": 0, "vocab_tensor": True}
    if "linear" not in name or name.endswith(("linear_proj.bias", "linear_fc2.bias")):
        return {"param": whole}
    ranks = [sample.local(state, name, rank) for rank in range(sample.tp)]
    return {"param": np.concatenate(ranks), "cat_dim": 0}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "sample",
    [
        Sample(tp=2, gated=True, tied=False, groups=2),
        Sample(tp=2, pipeline=False, thirds=True),
        Sample(tp=1, vocab=13),
    ],
)
def test_rows_that_ranks_kept_in_their_own_order_are_put_right(
    tmp_path: Path, sample: Sample, stacked: bool
) -> None:
    checkpoint = open_checkpoint(write(sample, tmp_path, stacked=stacked))

    for name in sample.names:
        for state in STATES:
            state_read = "weight" if state == "master" else state
            read = checkpoint.tensor(name, state_read).numpy()
            np.testing.assert_array_equal(read, sample.tensors[f"{state}/{name}"], err_msg=name)
    assert checkpoint.training["optimizer"]["step"] == 2


def test_a_parameter_without_masters_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(fixture("gpt_tp2pp2dp2_z1_bf16.universal"), root)
    for path in root.glob("*/zero/6.weight/fp32.pt"):
        path.unlink()

    with pytest.raises(RejectedError, match=r"fp32\.pt"):
        open_checkpoint(root)


def test_a_hostile_latest_universal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_text("../evil")

    with pytest.raises(RejectedError, match="latest_universal"):
        open_checkpoint(tmp_path)


def test_a_parameter_with_one_of_two_moments_is_named(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "u"
    shutil.copytree(fixture("gpt_tp2pp2dp2_z1_bf16.universal"), folder)
    parameters = folder / "global_step10_universal" / "zero"
    lost = parameters / "2.self_attention.dense.weight" / "exp_avg.pt"
    lost.chmod(0o600)
    for part in (lost.parent, parameters):
        part.chmod(0o700)
    lost.unlink()

    assert main(["convert", str(folder), str(tmp_path / "ds"), "--to", "deepspeed"]) == 3
    assert "dense.weight/exp_avg.pt" in capsys.readouterr().err
    assert not (tmp_path / "ds").exists()
    assert main(["verify", str(folder)]) == 1
    assert main(["convert", str(folder), str(tmp_path / "hf"), "--to", "hf"]) == 0
