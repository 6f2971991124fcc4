from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepspeed_samples import Sample
from golden import expected, fixture

from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.formats.megatron_legacy import FORMAT
from mds_ckpt.pickles.torch_writer import save_torch_file


def write(sample: Sample, root: Path, *, chunks: int = 1, moments: bool = False) -> Path:
    """A Megatron checkpoint with this layout; virtual pipeline if there are several chunks."""
    folder = root / "iter_0000003"
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    parts = np.array_split(np.arange(sample.layers), sample.pp * chunks)
    for stage in range(sample.pp):
        for rank in range(sample.tp):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if sample.pp > 1 else "")
            state: dict[str, Any] = {
                "args": sample.args(),
                "checkpoint_version": 3.0,
                "iteration": 3,
                "universal_checkpoint_info": {"original_vocab_size": sample.vocab},
            }
            names: list[str] = []
            for chunk in range(chunks):
                part = chunk * sample.pp + stage
                key = "model" if chunks == 1 else f"model{chunk}"
                state[key], chunk_names = model(sample, parts[part], rank, part, len(parts))
                names += chunk_names
            if moments:
                state["optimizer"] = optimizer(sample, names, rank)
            (folder / name).mkdir(parents=True)
            save_torch_file(folder / name / "model_optim_rng.pt", state)
    return root


def model(
    sample: Sample, layers: Any, rank: int, part: int, parts: int
) -> tuple[dict[str, Any], list[str]]:
    encoder: dict[str, Any] = {}
    inner: dict[str, Any] = {"embedding": {}, "encoder": encoder}
    names = []
    for name in sample.names:
        tensor = sample.local("weight", name, rank)
        if name.startswith("embedding.") and part == 0:
            inner["embedding"][name.split(".")[1]] = {"weight": tensor}
        elif name.startswith("decoder.layers.") and int(name.split(".")[2]) in layers:
            number = int(name.split(".")[2]) - int(layers[0])
            rest = sample.old_block_name(name.split(".", 3)[3])
            encoder[f"layers.{number}.{rest}"] = tensor
        elif name.startswith("decoder.final") and part == parts - 1:
            encoder[name.removeprefix("decoder.")] = tensor
        elif name == "output_layer.weight" and part == parts - 1:
            inner["output_layer"] = {"weight": tensor}
        else:
            continue
        names.append(name)
    tree: dict[str, Any] = {"language_model": inner}
    if sample.tied and parts > 1 and part == parts - 1:
        words = "embedding.word_embeddings.weight"
        tree["word_embeddings_for_head"] = {"weight": sample.local("weight", words, rank)}
        names.append(words)
    return tree, names


def optimizer(sample: Sample, names: list[str], rank: int) -> dict[str, Any]:
    groups = sample.groups_of(names)
    numbers = iter(range(len(names)))
    ids = [[next(numbers) for _ in group] for group in groups]
    state = {
        number: {
            "step": np.array(2.0, "f4"),
            **{s: sample.local(s, name, rank) for s in ("exp_avg", "exp_avg_sq")},
        }
        for group, names_ in zip(ids, groups, strict=True)
        for number, name in zip(group, names_, strict=True)
    }
    masters = [[sample.local("master", name, rank) for name in group] for group in groups]
    inner = {"state": state, "param_groups": [{"params": group} for group in ids]}
    return {"optimizer": inner, "fp32_from_fp16_params": masters}


@pytest.mark.parametrize(
    ("sample", "chunks"),
    [
        (Sample(), 1),
        (Sample(tp=2, pp=2, layers=3), 1),
        (Sample(tp=2, pp=2, layers=8, gated=True, tied=False, groups=2), 2),
        (Sample(pp=2, layers=4), 2),
        (Sample(tp=4, heads=4, groups=4, thirds=True), 1),
    ],
)
@pytest.mark.parametrize("moments", [False, True])
def test_every_layout_is_read(tmp_path: Path, sample: Sample, chunks: int, moments: bool) -> None:
    root = write(sample, tmp_path, chunks=chunks, moments=moments)

    checkpoint = open_checkpoint(root)

    wanted = sample.tensors if moments else {k: v for k, v in sample.tensors.items() if k[0] == "w"}
    found = {f"{s}/{n}": t for s, ts in checkpoint.states.items() for n, t in ts.items()}
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[key].numpy(), values, err_msg=key)
    assert checkpoint.parallel["vp"] == chunks
    assert list(FORMAT.check(checkpoint, True)) == []


def test_a_golden_checkpoint_is_read_bit_for_bit() -> None:
    checkpoint = open_checkpoint(fixture("gpt_tp2_legacy_fp32") / "ckpt")

    for name, values in expected("gpt_tp2_legacy_fp32", "lp").items():
        np.testing.assert_array_equal(checkpoint.tensor(name).numpy(), values, err_msg=name)
    assert checkpoint.states["exp_avg"].keys() == checkpoint.tensors.keys()
    assert checkpoint.counters["applied_updates"] == 10


@pytest.mark.parametrize("layout", ["tp1pp1", "tp1pp2", "tp2pp1"])
def test_the_old_tools_output_equals_its_source(layout: str) -> None:
    source = open_checkpoint(fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt")

    checkpoint = open_checkpoint(fixture(f"gpt_tp2pp2dp2_z1_bf16.megatron_{layout}"))

    for name, tensor in source.tensors.items():
        read = checkpoint.tensor(name).numpy()[: tensor.shape[0]]  # the tool keeps padding rows
        assert read.tobytes() == tensor.numpy().tobytes(), name


def test_the_old_tools_wrong_output_is_refused_not_repeated() -> None:
    with pytest.raises(RejectedError, match="not one that Megatron writes"):
        open_checkpoint(fixture("llama_tp2pp2dp1_z1_bf16.megatron_tp1pp1_WRONG"))


@pytest.mark.parametrize(("name", "family"), [("bert", "bert"), ("t5", "t5")])
def test_other_families_are_opened_with_every_tensor(name: str, family: str) -> None:
    checkpoint = open_checkpoint(fixture(f"{name}_tp1_legacy_fp32") / "ckpt")

    with np.load(fixture(f"{name}_tp1_legacy_fp32") / "expected.npz") as wanted:
        stored = [key for key in wanted.files if key.startswith("lp/")]
    assert checkpoint.model.family == family
    assert len(checkpoint.tensors) == len(stored)
    assert all(tensor.numpy().shape == tensor.shape for tensor in checkpoint.tensors.values())


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    root = write(Sample(tp=2, pp=2), tmp_path)
    folder = root / "iter_0000003" / "mp_rank_01_001"
    (folder / "model_optim_rng.pt").unlink()

    with pytest.raises(RejectedError, match=r"4 ranks expected .* 3 found; mp_rank_01_001 missing"):
        open_checkpoint(root)


@pytest.mark.parametrize("text", ["../evil", "-5", "1\n../../x", "", "9" * 10_000_000, "a\0"])
def test_a_hostile_tracker_is_refused(tmp_path: Path, text: str) -> None:
    root = write(Sample(), tmp_path)
    (root / "latest_checkpointed_iteration.txt").write_text(text)

    with pytest.raises(RejectedError, match="latest_checkpointed_iteration"):
        open_checkpoint(root)


def test_a_release_is_read(tmp_path: Path) -> None:
    root = write(Sample(), tmp_path)
    (root / "iter_0000003").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")

    assert open_checkpoint(root).path.name == "release"


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    sample = Sample(pp=2)
    root = write(sample, tmp_path)
    path = root / "iter_0000003" / "mp_rank_00_001" / "model_optim_rng.pt"
    path.unlink()
    state, _ = model(sample, [1], 0, 1, 2)
    state["word_embeddings_for_head"]["weight"] = np.zeros((sample.padded, sample.hidden), "f4")
    save_torch_file(path, {"model": state, "args": sample.args()})

    checkpoint = open_checkpoint(root)

    with pytest.raises(RejectedError, match="copies 0 and 1 of 2 differ"):
        checkpoint.tensor("embedding.word_embeddings.weight").numpy()
