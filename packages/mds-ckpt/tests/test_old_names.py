"""The old commands do what they did, flag by flag, or say why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
from deepspeed_samples import Sample

from mds_ckpt import open_checkpoint
from mds_ckpt.cli import main
from mds_ckpt.commands.old_names import NAMES, new_spelling


def run(capsys: Any, *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Sample(layers=4).write(tmp_path / "in")


@pytest.fixture
def huggingface(tmp_path: Path) -> Path:
    record = samples.model("gpt2")
    samples.save(tmp_path / "ckpt", record, samples.arrays(record))
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    return tmp_path / "hf"


def test_the_file_name_of_a_script_is_the_command() -> None:
    assert new_spelling("tools/convert_checkpoint/deepspeed_to_megatron.py") == NAMES[0]
    assert new_spelling("zero_to_fp32") == "zero-to-fp32"
    assert new_spelling("convert") == "convert"


def test_deepspeed_to_megatron(source: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["deepspeed_to_megatron.py", "--input_folder", source, "--output_folder"]
    kept = run(capsys, *words, tmp_path / "a", "--target_tp", 2, "--target_pp", 4)
    fresh = run(capsys, *words, tmp_path / "b", "--for_release")

    assert (kept[0], fresh[0]) == (0, 0)
    first, second = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert (first.parallel["tp"], first.parallel["pp"], first.step) == (2, 4, 3)
    assert (second.parallel["tp"], second.counters["iteration"]) == (1, 0)
    assert (tmp_path / "b" / "release").is_dir()


def test_deepspeed_to_transformers(source: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["deepspeed-to-transformers", "--input_folder", source, "--output_folder"]
    code, out, _ = run(capsys, *words, tmp_path / "a", "--for_release")
    assert code == 0
    assert "--for_release does nothing here: the format holds no counts" in out
    assert open_checkpoint(tmp_path / "a").format == "hf"
    for flag in ("--target_tp", "--target_pp"):
        code, _, err = run(capsys, *words, tmp_path / "b", flag, 2)
        assert (code, f"leave {flag} away" in err) == (2, True)


def test_deepspeed_to_deepspeed(source: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["deepspeed_to_deepspeed.py", "--input_folder", source, "--output_folder"]
    assert run(capsys, *words, tmp_path / "a", "--target_tp", 2, "--target_pp", 2)[0] == 0
    found = open_checkpoint(tmp_path / "a")
    assert (found.format, found.parallel["tp"], found.parallel["pp"]) == ("deepspeed", 2, 2)


def test_ds_to_universal(source: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["ds_to_universal.py", "--input_folder", source, "--output_folder", tmp_path / "a"]
    flags = ["--num_extract_workers", 4, "--num_merge_workers", 2, "--keep_temp_folder"]
    code, out, _ = run(capsys, *words, *flags, "--no_strict", "--inject_missing_state")
    assert code == 0
    for flag in ("--num_extract_workers", "--keep_temp_folder", "--no_strict", "--inject_missing"):
        assert flag in out
    assert open_checkpoint(tmp_path / "a").format == "universal"


def test_zero_to_fp32_takes_the_masters(source: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["zero_to_fp32.py", source, tmp_path / "a", "--tag", "global_step3"]
    code, out, _ = run(capsys, *words, "--max_shard_size", "5KB", "--safe_serialization", "-d")
    assert code == 0
    assert "note: safetensors" not in out
    assert (tmp_path / "a" / "model.safetensors.index.json").exists()
    assert {t.dtype for t in open_checkpoint(tmp_path / "a").tensors.values()} == {"F32"}

    code, out, _ = run(capsys, "zero-to-fp32", source, tmp_path / "b")
    assert "safetensors are written" in out
    code, _, err = run(capsys, *words[:2], tmp_path / "c", "--exclude_frozen_parameters")
    assert (code, "leave --exclude_frozen_parameters away" in err) == (2, True)


def test_fp32_of_narrow_weights_are_the_masters(tmp_path: Path, capsys: Any) -> None:
    import ml_dtypes

    record = samples.model("gpt2")
    arrays = samples.arrays(record)
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    folder = samples.save(tmp_path / "ckpt", record, narrow, masters=arrays)

    code, out, _ = run(capsys, "convert", folder, tmp_path / "a", "--to", "hf", "--dtype", "fp32")

    assert code == 0
    assert "the fp32 masters are written in their place" in out
    found = open_checkpoint(tmp_path / "a")
    assert all(np.array_equal(found.tensors[name].numpy(), arrays[name]) for name in arrays)


def test_hf2megads_both_ways(huggingface: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["hf2megads_weight_converter.py", "--save", tmp_path / "a", "--hf-ckpt-dir"]
    flags = ["--hf-ckpt-num-shards", 1, "--load-mode", "auto", "--tensor-model-parallel-size", 2]
    rest = ["--pipeline-model-parallel-size", 2, "--bf16", "--num-layers", 2, "--swiglu"]
    code, out, _ = run(capsys, *words, huggingface, *flags, *rest)
    assert code == 0
    assert "--num-layers and --swiglu do nothing here: the checkpoint itself says" in out
    assert "--hf-ckpt-num-shards and --load-mode do nothing here" in out
    found = open_checkpoint(tmp_path / "a")
    assert (found.parallel["tp"], found.parallel["pp"]) == (2, 2)
    assert {tensor.dtype for tensor in found.tensors.values()} == {"BF16"}

    back = ["hf2megads-weight-converter", "--to-hf-ckpt", "--load", tmp_path / "a"]
    assert run(capsys, *back, "--save", tmp_path / "b", "--fp16")[0] == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float16"
    assert run(capsys, *words[:3])[0] == 2


def test_checkpoint_util(source: Path, huggingface: Path, tmp_path: Path, capsys: Any) -> None:
    megatron = tmp_path / "megatron"
    assert run(capsys, "convert", source, megatron, "--to", "megatron", "--tp", 2)[0] == 0
    (tmp_path / "vocab.json").write_text(json.dumps({f"w{i}": i for i in range(9)}))
    words = ["checkpoint_util.py", "--model-type", "GPT", "--load-dir", megatron, "--save-dir"]
    flags = ["--max-queue-size", 50, "--no-checking", "--megatron-path", "/x"]

    code, out, _ = run(capsys, *words, tmp_path / "a", *flags)
    assert code == 0
    assert "--max-queue-size and --no-checking and --megatron-path do nothing here" in out
    assert open_checkpoint(tmp_path / "a").parallel["tp"] == 2  # as the source
    more = ["--target-tensor-parallel-size", 1, "--target-pipeline-parallel-size", 2]
    assert run(capsys, *words, tmp_path / "b", *more, "--true-vocab-size", 10)[0] == 0
    found = open_checkpoint(tmp_path / "b")
    assert (found.parallel["pp"], found.model.vocab_size) == (2, 10)
    more = ["--saver", "hf", "--vocab-file", tmp_path / "vocab.json"]
    assert run(capsys, *words, tmp_path / "c", *more)[0] == 0
    assert open_checkpoint(tmp_path / "c").model.vocab_size == 9

    words = ["checkpoint-util", "--model-type", "BERT", "--loader", "llama2_hf"]
    code, _, err = run(capsys, *words, "--load-dir", huggingface, "--save-dir", tmp_path / "d")
    assert (code, "--model-type says BERT" in err) == (3, True)


def test_inspect_checkpoint_prints_every_leaf(source: Path, capsys: Any) -> None:
    path = source / "global_step3" / "mp_rank_00_model_states.pt"
    code, out, _ = run(capsys, "inspect_checkpoint.py", path)
    assert code == 0
    assert "[other] args.num_layers = 4\n" in out
    layer = path.with_name("layer_01-model_00-model_states.pt")
    out = run(capsys, "inspect-checkpoint", layer)[1]
    assert "[tensor] word_embeddings.weight = [16, 8]" in out


def test_inspect_deepspeed_checkpoint(source: Path, capsys: Any) -> None:
    words = ["inspect_deepspeed_checkpoint.py", "--folder", source]
    code, out, _ = run(capsys, *words, "--target_tp", 2, "--target_pp", 1)
    assert code == 0
    assert "--target_tp and --target_pp do nothing here" in out
    assert "nothing is missing" in out


def test_an_existing_output_is_refused_with_3(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out").mkdir()
    words = ["ds-to-universal", "--input_folder", source, "--output_folder", tmp_path / "out"]
    code, _, err = run(capsys, *words)
    assert (code, "it is there already" in err) == (3, True)


def test_mistyped_words_get_a_suggestion(source: Path, tmp_path: Path, capsys: Any) -> None:
    for words, nearest in {
        ("inspekt", str(source)): "inspect",
        ("convert", "a", "b", "--to", "hf", "--vocabsize", "3"): "--vocab-size",
        ("zero-to-fp32", "a", "b", "--max-shard-size", "3"): "--max_shard_size",
    }.items():
        with pytest.raises(SystemExit):
            main(list(words))
        assert f"did you mean {nearest}?" in capsys.readouterr().err
    code, _, err = run(capsys, "convert", source, tmp_path / "x", "--to", "megatrn")
    assert (code, "did you mean megatron?" in err) == (2, True)
    code, _, err = run(capsys, "inspect", source, "--from", "deepsped")
    assert (code, "did you mean deepspeed?" in err) == (2, True)


def test_a_folder_one_level_too_high_names_the_right_ones(
    source: Path, huggingface: Path, tmp_path: Path, capsys: Any
) -> None:
    code, _, err = run(capsys, "inspect", tmp_path)
    assert code == 3
    assert "checkpoints lie in its folders 'ckpt', 'hf', 'in'" in err
    assert f"name one of them, such as {tmp_path / 'ckpt'}" in err
