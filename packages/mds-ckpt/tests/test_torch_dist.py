from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacks import corpus
from golden import fixture
from torch_dist_samples import Object, Sample, Size, gpt

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.errors import RejectedError, UsageError
from mds_ckpt.formats.torch_dist import FORMAT
from mds_ckpt.pickles.records import Namespace
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.verification import verify

FACTS = "torch_dist:num_attention_heads=4,activation=gelu"
LLAMA = (
    "torch_dist:num_attention_heads=4,activation=swiglu,position_embedding=rope,rope_theta=1e4,"
    "max_position_embeddings=32"
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the checkpoint that the real megatron-core wrote."""
    source = fixture("mcore_torch_dist_gpt_tp2") / "ckpt" / "iter_0000010"
    if not source.is_dir():
        pytest.skip(f"golden data is not here: {source}")
    folder = tmp_path / "golden" / "iter_0000010"
    folder.mkdir(parents=True)
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)
    (tmp_path / "golden" / "latest_checkpointed_iteration.txt").write_text("10")
    return tmp_path / "golden"


def sample(folder: Path, *, pieces: int = 1, **more: Any) -> Sample:
    made = Sample(folder)
    for name, array in gpt().items():
        made.tensor(name, array, pieces=pieces)
    for name, array in more.items():
        made.tensor(name, array)
    return made


def test_the_real_megatron_cores_checkpoint_is_opened(golden: Path) -> None:
    checkpoint = open_checkpoint(golden)

    assert (checkpoint.format, checkpoint.step) == ("torch_dist", 10)
    assert len(checkpoint.tensors) == 40
    assert checkpoint.config["num_layers"] == 3
    assert checkpoint.config["ffn_hidden_size"] == 128
    assert "num_attention_heads" not in checkpoint.config
    assert any("num_attention_heads=VALUE" in note for note in checkpoint.notes)
    assert list(verify(golden).problems) == []


def test_heads_and_activation_are_asked_for_and_never_guessed(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="num_attention_heads, activation; say it with --from"):
        convert(golden, tmp_path / "hf", to="hf")
    with pytest.raises(RejectedError, match="5 attention heads do not fit"):
        convert(golden, tmp_path / "hf", to="hf", source_format=FACTS.replace("4", "5"))
    with pytest.raises(UsageError, match="can't be told 'heads=4'"):
        open_checkpoint(golden, format="torch_dist:heads=4")
    with pytest.raises(UsageError, match="it takes no facts"):
        open_checkpoint(golden, format="hf:num_attention_heads=4")

    report = convert(golden, tmp_path / "hf", to="hf", source_format=FACTS)

    assert report.num_read == 40
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["n_head"], config["activation_function"]) == (4, "gelu")


@pytest.mark.parametrize(
    "word", ["num_attention_heads=four", "num_attention_heads=0", "activation=5", "rope_theta=nan"]
)
def test_an_answer_that_makes_no_sense_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(UsageError, match=f"{word} makes no sense; give"):
        open_checkpoint(sample(tmp_path / "c").write(), format=f"torch_dist:{word}")


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_stacked_layers_are_split_whatever_the_chunks(tmp_path: Path, pieces: int) -> None:
    checkpoint = open_checkpoint(sample(tmp_path / "c", pieces=pieces).write())

    for name, array in gpt().items():
        if not name.startswith("decoder.layers."):
            assert (checkpoint.tensor(name).numpy() == array).all()
    qkv = gpt()["decoder.layers.self_attention.linear_qkv.weight"]
    norm = gpt()["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    for layer in range(3):
        prefix = f"decoder.layers.{layer}"
        stored = checkpoint.tensor(f"{prefix}.self_attention.linear_qkv.weight")
        assert (stored.numpy() == qkv[layer]).all()
        assert (stored.read(((3, 7), (2, 5))) == qkv[layer, 3:7, 2:5]).all()
        assert (
            checkpoint.tensor(f"{prefix}.pre_mlp_layernorm.weight").numpy() == norm[layer]
        ).all()


def test_a_llama_is_described_from_tensors_and_answers(tmp_path: Path) -> None:
    folder = sample(tmp_path / "c").write()

    checkpoint = open_checkpoint(folder, format=LLAMA)
    convert(folder, tmp_path / "hf", to="hf", source_format=LLAMA, vocab_size=17)

    assert checkpoint.config["num_key_value_heads"] == 2
    assert checkpoint.config["normalization"] == "rmsnorm"
    assert checkpoint.config["tie_embeddings"] is False
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", 17)


def test_layers_may_be_numbered_and_optimizer_states_are_read(tmp_path: Path) -> None:
    made = Sample(tmp_path / "c")
    for name, array in gpt().items():
        for layer, part in enumerate(array) if ".layers." in name else [(None, array)]:
            key = name if layer is None else name.replace(".layers.", f".layers.{layer}.")
            made.tensor(key, part)
            made.tensor(f"optimizer.state.exp_avg.{key}", part + 1)
            made.tensor(f"optimizer.state.fp32_param.{key}", part + 2)
    made.tensor("optimizer.distributed.dp_group_idx_0.bucket", np.zeros(4, "f4"))

    checkpoint = open_checkpoint(made.write())

    name = "decoder.layers.2.mlp.linear_fc2.weight"
    wanted = gpt()["decoder.layers.mlp.linear_fc2.weight"][2]
    assert (checkpoint.tensor(name).numpy() == wanted).all()
    assert (checkpoint.tensor(name, "exp_avg").numpy() == wanted + 1).all()
    assert (checkpoint.tensor(name, "master").numpy() == wanted + 2).all()
    assert any("flat buckets" in note for note in checkpoint.notes)


def test_arguments_come_from_the_common_state_of_newer_versions(tmp_path: Path) -> None:
    made = sample(tmp_path / "c")
    args = {
        "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
        "hidden_size": 8, "num_layers": 3, "ffn_hidden_size": 12, "swiglu": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 10000,
        "max_position_embeddings": 32, "add_bias_linear": False, "layernorm_epsilon": 1e-6,
        "untie_embeddings_and_output_weights": True, "tensor_model_parallel_size": 2,
    }  # fmt: skip
    made.stored_object("common_state/shard_0_1", {"args": Namespace(args), "iteration": 7})

    convert(made.write(), tmp_path / "hf", to="hf")
    checkpoint = open_checkpoint(tmp_path / "c")

    assert checkpoint.step == 7
    assert checkpoint.parallel == {"tp": 2}
    assert checkpoint.config["activation"] == "swiglu"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["rms_norm_eps"]) == (2, 1e-6)


def test_a_plain_distributed_checkpoint_keeps_its_names(tmp_path: Path) -> None:
    made = Sample(tmp_path / "step-10")
    made.tensor("blocks.0.weight", np.arange(6, dtype="f4").reshape(2, 3))
    made.tensor("words.weight", np.arange(6, dtype="f4").reshape(3, 2))

    checkpoint = open_checkpoint(made.write(marker=False))

    assert checkpoint.model.family == "unknown"
    assert set(checkpoint.tensors) == set(made.described)
    assert any("keep their stored names" in note for note in checkpoint.notes)


def test_a_parameter_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    made = sample(tmp_path / "c", **{"model.output_layer.weight": np.zeros((20, 8), "f4")})

    with pytest.raises(RejectedError, match=r"output_layer\.weight.*stored twice"):
        open_checkpoint(made.write())


def test_a_file_outside_the_folder_is_refused(golden: Path) -> None:
    path = golden / "iter_0000010" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../_0.distcp"))

    with pytest.raises(RejectedError, match="name is not a plain one"):
        open_checkpoint(golden)


def test_a_hostile_object_is_found_by_verify_and_never_read_otherwise(tmp_path: Path) -> None:
    made = sample(tmp_path / "c")
    evil = b"\x80\x02cposix\nsystem\n(X\x05\x00\x00\x00touchtR."
    made.stored_object("decoder.layers._extra_state/shard_0_3", {"x": 1})
    index = made.places[-1][1].state
    made.data[index["offset"] :] = corpus.torch_zip(evil)
    index["length"] = len(made.data) - index["offset"]

    problems = list(verify(made.write()).problems)

    assert len(problems) == 1
    assert "would import posix.system" in problems[0].reason
    assert len(open_checkpoint(tmp_path / "c").tensors) == 21


def test_a_missing_file_is_named_with_its_tensor(golden: Path) -> None:
    (golden / "iter_0000010" / "__1_0.distcp").unlink()

    with pytest.raises(RejectedError, match=r"__1_0\.distcp, tensor '[\w.]+': there is no such"):
        open_checkpoint(golden)


@pytest.mark.parametrize("kept", [0, 1, 1000, 60_000, 84_000, 84_568])
def test_a_truncated_data_file_is_refused_at_opening(golden: Path, kept: int) -> None:
    path = golden / "iter_0000010" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(RejectedError, match="truncated"):
        open_checkpoint(golden)


def test_metadata_cut_off_anywhere_is_refused(golden: Path) -> None:
    path = golden / "iter_0000010" / ".metadata"
    whole = path.read_bytes()
    for kept in range(0, len(whole), 977):
        path.write_bytes(whole[:kept])
        with pytest.raises(RejectedError):
            open_checkpoint(golden)


def test_a_flipped_bit_is_found_and_named(golden: Path) -> None:
    path = golden / "iter_0000010" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    stored = (
        open_checkpoint(golden).tensor("embedding.word_embeddings.weight").read(((0, 64), (0, 32)))
    )
    at = data.find(stored.tobytes())
    assert at > 0
    data[at + 100] ^= 1
    path.write_bytes(data)

    problems = list(verify(golden).problems)

    assert [problem.tensor for problem in problems] == ["embedding.word_embeddings.weight"]
    assert "checksum" in problems[0].reason
    with pytest.raises(RejectedError, match="checksum"):
        open_checkpoint(golden).tensor("embedding.word_embeddings.weight").numpy()


def test_digests_of_integrity_json_are_compared(golden: Path) -> None:
    folder = golden / "iter_0000010"
    names = [path.name for path in folder.iterdir()]
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    path = folder / "integrity.json"
    path.write_text(json.dumps({"algorithm": "sha256", "files": files}))
    assert list(verify(golden).problems) == []

    files |= {"common.pt": "0" * 64, "gone.pt": "0" * 64, "../x": "0" * 64}
    path.write_text(json.dumps({"algorithm": "sha256", "files": files}))

    assert [problem.file for problem in verify(golden).problems] == [
        "common.pt", "gone.pt", "integrity.json",
    ]  # fmt: skip


def test_the_true_vocabulary_cuts_the_padding_rows(golden: Path) -> None:
    options = ReadOptions(vocab_size=70, model={"num_attention_heads": 4, "activation": "gelu"})

    table = FORMAT.open(golden, options).tensor("embedding.word_embeddings.weight")

    whole = open_checkpoint(golden).tensor("embedding.word_embeddings.weight").numpy()
    assert (table.numpy() == whole[:70]).all()
    with pytest.raises(RejectedError, match="128 rows, and --vocab-size says 200"):
        FORMAT.open(golden, ReadOptions(vocab_size=200))


def test_another_backend_is_refused(golden: Path) -> None:
    (golden / "iter_0000010" / "metadata.json").write_text('{"sharded_backend": "zarr"}')

    with pytest.raises(RejectedError, match="its backend is 'zarr'"):
        open_checkpoint(golden)


def test_chunks_that_overlap_or_leave_gaps_are_refused(tmp_path: Path) -> None:
    made = sample(tmp_path / "c", pieces=2)
    chunks = made.described["output_layer.weight"].state["chunks"]
    chunks[1] = chunks[0]
    made.write()
    with pytest.raises(RejectedError, match=r"output_layer\.weight.*overlap"):
        open_checkpoint(tmp_path / "c")

    del chunks[1]
    made.write()
    with pytest.raises(RejectedError, match=r"output_layer\.weight.*cover 80 of 160"):
        open_checkpoint(tmp_path / "c")


def test_a_chunk_without_a_place_is_named(tmp_path: Path) -> None:
    made = sample(tmp_path / "c")
    del made.places[-1]

    with pytest.raises(RejectedError, match=r"output_layer\.weight.*\[0, 0\] is not stated"):
        open_checkpoint(made.write())


def test_a_layer_without_one_of_its_tensors_is_named(tmp_path: Path) -> None:
    made = Sample(tmp_path / "c")
    for name, array in gpt().items():
        made.tensor(name, array[:2] if name.endswith("fc2.weight") else array)

    with pytest.raises(
        RejectedError, match=r"decoder\.layers\.2\.mlp\.linear_fc2\.weight.*missing"
    ):
        open_checkpoint(made.write())


def test_lies_about_shapes_are_refused(tmp_path: Path) -> None:
    made = sample(tmp_path / "c")
    state = made.described["output_layer.weight"].state
    huge = Size((1 << 40, 1 << 20))
    chunk = Object("ChunkStorageMetadata", {"offsets": Size((0, 0)), "sizes": huge})
    state |= {"size": huge, "chunks": [chunk]}

    with pytest.raises(RejectedError, match="too short"):
        open_checkpoint(made.write())


def test_a_record_of_another_shape_is_refused_when_it_is_read(tmp_path: Path) -> None:
    made = sample(tmp_path / "c")
    state = made.described["output_layer.weight"].state
    small = Size((10, 16))
    chunk = Object("ChunkStorageMetadata", {"offsets": Size((0, 0)), "sizes": small})
    state |= {"size": small, "chunks": [chunk]}

    tensor = open_checkpoint(made.write()).tensor("output_layer.weight")

    with pytest.raises(
        RejectedError, match=r"is F32 \[20, 8\] where .metadata says F32 \[10, 16\]"
    ):
        tensor.numpy()


def experts(*, halves: bool) -> dict[str, Any]:
    """A model of 2 layers with 3 experts, stacked or, with ``halves``, each tensor by itself."""
    random = np.random.default_rng(4)
    dense = {name: array for name, array in gpt(layers=2).items() if ".mlp." not in name}
    moe = {
        "mlp.router.weight": random.standard_normal((2, 3, 8)).astype("f4"),
        "pre_mlp_layernorm.weight": random.standard_normal((2, 8)).astype("f4"),
        "mlp.experts.experts.linear_fc1.weight": random.standard_normal((2, 3, 24, 8)).astype("f4"),
        "mlp.experts.experts.linear_fc2.weight": random.standard_normal((2, 3, 8, 12)).astype("f4"),
    }
    stacked = dense | {f"decoder.layers.{name}": array for name, array in moe.items()}
    return _singles(stacked) if halves else stacked


def _singles(stacked: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, array in stacked.items():
        rest = name.removeprefix("decoder.layers.")
        if rest == name:
            found[name] = array
            continue
        for layer, part in enumerate(array):
            if "experts.experts" not in rest:
                found[f"decoder.layers.{layer}.{rest}"] = part
                continue
            for number, expert in enumerate(part):
                key = rest.replace("experts.experts.", f"experts.experts.{number}.")
                place = f"decoder.layers.{layer}.{key}"
                if "fc1" in key:
                    found[f"{place}_w"], found[f"{place}_v"] = np.split(expert, 2)
                else:
                    found[place] = expert
    return found


@pytest.mark.parametrize("halves", [False, True])
def test_experts_are_read_stacked_or_each_by_itself(tmp_path: Path, halves: bool) -> None:
    sample = Sample(tmp_path / "c")
    for name, array in experts(halves=halves).items():
        sample.tensor(name, array, pieces=2 if array.ndim > 1 else 1)
    facts = ReadOptions(
        model={
            "num_attention_heads": 4,
            "activation": "swiglu",
            "position_embedding": "rope",
            "rope_theta": 10000.0,
            "max_position_embeddings": 32,
            "moe_topk": 2,
        }
    )

    found = open_checkpoint(sample.write(), options=facts)

    stacked = experts(halves=False)
    for layer in range(2):
        for number in range(3):
            for linear in ("linear_fc1", "linear_fc2"):
                name = f"decoder.layers.{layer}.mlp.experts.local_experts.{number}.{linear}.weight"
                key = f"decoder.layers.mlp.experts.experts.{linear}.weight"
                wanted = stacked[key][layer, number]
                np.testing.assert_array_equal(found.tensor(name).numpy(), wanted)
                part = found.tensor(name).read(((3, 7), (1, 5)))
                np.testing.assert_array_equal(part, wanted[3:7, 1:5])
    assert len(found.tensors) == 3 + 2 * (3 + 2 + 2 * 3)
    assert (found.config["num_experts"], found.config["moe_topk"]) == (3, 2)
    assert found.config["moe_ffn_hidden_size"] == 12


def test_one_half_of_a_gated_mlp_is_not_enough(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "c")
    for name, array in experts(halves=True).items():
        if not name.startswith("decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight_v"):
            sample.tensor(name, array)

    with pytest.raises(RejectedError, match=r"local_experts\.2\.linear_fc1.*one half of it"):
        open_checkpoint(sample.write())


@pytest.mark.parametrize(
    ("setting", "value"), [("use_rope_scaling", True), ("rotary_interleaved", True)]
)
def test_a_setting_that_changes_the_model_is_not_passed_over(
    tmp_path: Path, setting: str, value: object
) -> None:
    """The tensors would convert, and compute something else."""
    sample = Sample(tmp_path / "c")
    for name, array in gpt().items():
        sample.tensor(name, array)
    args = {"num_attention_heads": 4, "swiglu": True, "max_position_embeddings": 32}
    args |= {"position_embedding_type": "rope", "norm_epsilon": 1e-6, setting: value}
    sample.stored_object("common_state/shard_0_1", {"args": args})
    folder = sample.write()

    assert open_checkpoint(folder).config["norm_epsilon"] == 1e-6  # looking at it is no harm
    with pytest.raises(RejectedError, match=f"'{setting}' is True"):
        convert(folder, tmp_path / "out", to="hf")


def test_the_optimizers_of_experts_and_others_are_links_of_a_chain(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "c")
    for name, array in experts(halves=False).items():
        sample.tensor(name, array)
        link = int(".experts." in name)
        sample.tensor(f"chained_{link}.optimizer.state.exp_avg.{name}", array + 1)

    found = open_checkpoint(sample.write())

    assert found.states["exp_avg"].keys() == found.tensors.keys()
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(found.tensor(name, "exp_avg").numpy(), tensor.numpy() + 1)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "c")
    for name, array in experts(halves=True).items():
        if "decoder.layers.1.mlp.experts.experts.1." not in name:
            sample.tensor(name, array)

    with pytest.raises(RejectedError, match=r"layers\.1\.mlp has 2 of 3 experts"):
        open_checkpoint(sample.write())
