"""Adapters of peft's format are added to weights, whose parts it counts as layers of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.adapter import Factors, WrittenAdapter
from mds_ckpt.cli import main
from mds_ckpt.errors import UnsupportedError
from mds_ckpt.families import choose
from mds_ckpt.read_options import ReadOptions

RANK, ALPHA = 3, 6.0
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
def numbers() -> np.random.Generator:
    return np.random.default_rng(5)


def exported(tmp_path: Path, name: str) -> Path:
    record = samples.model(name)
    source = samples.save(tmp_path / "ckpt", record, samples.arrays(record))
    convert(source, tmp_path / "hf", to="hf")
    return tmp_path / "hf"


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    numbers: np.random.Generator,
    **config: Any,
) -> dict[str, Array]:
    """An adapter as peft writes it; returns what it adds to each layer, [out, in]."""
    tensors, products = {}, {}
    for layer, (rows, columns) in shapes.items():
        a = numbers.standard_normal((RANK, columns)).astype("f4")
        b = numbers.standard_normal((rows, RANK)).astype("f4")
        tensors[f"base_model.model.{layer}.lora_A.weight"] = a
        tensors[f"base_model.model.{layer}.lora_B.weight"] = b
        products[layer] = ALPHA / RANK * b.astype("f8") @ a.astype("f8")
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    members = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(members))
    return products


def layers_of(folder: Path, endings: Iterable[str], *, turned: bool) -> dict[str, tuple[int, int]]:
    found = {}
    for name, array in load_file(folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and layer.endswith(tuple(endings)):
            found[layer] = array.shape[::-1] if turned else array.shape
    return found


@pytest.mark.parametrize(
    ("name", "endings", "turned"),
    [
        ("llama", ("q_proj", "v_proj"), False),
        ("llama", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), False),
        ("gpt2", ("c_attn", "attn.c_proj", "c_fc"), True),
        ("gpt_neox", ("query_key_value", "dense_h_to_4h"), False),
    ],
)
def test_the_product_is_added_to_the_layers_of_transformers(
    tmp_path: Path,
    numbers: np.random.Generator,
    name: str,
    endings: tuple[str, ...],
    turned: bool,
) -> None:
    base = exported(tmp_path, name)
    shapes = layers_of(base, endings, turned=turned)
    products = write_adapter(tmp_path / "adapter", shapes, numbers)

    arguments = ["--to", "hf", "--adapter", str(tmp_path / "adapter")]
    assert main(["convert", str(base), str(tmp_path / "merged"), *arguments]) == 0

    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert len(products) >= 4
    for key, array in load_file(base / "model.safetensors").items():
        product = products.get(key.removesuffix(".weight"), 0.0)
        wanted = array + (np.transpose(product) if turned else product)
        np.testing.assert_allclose(merged[key], wanted, rtol=1e-6, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mistral", "qwen2"])
def test_what_is_written_adds_what_it_was_made_of(
    tmp_path: Path, numbers: np.random.Generator, name: str
) -> None:
    record = samples.model(name)
    base = samples.save(tmp_path / "ckpt", record, samples.arrays(record))
    wanted, factors = {}, {}
    for key, array in samples.arrays(record).items():
        if any(part in key for part in ("linear_qkv", "linear_fc")) and array.ndim == 2:
            a = numbers.standard_normal((RANK, array.shape[1])).astype("f4")
            b = numbers.standard_normal((array.shape[0], RANK)).astype("f4")
            factors[key] = Factors(partial(np.copy, a), partial(np.copy, b), ALPHA / RANK)
            wanted[key] = array + ALPHA / RANK * b.astype("f8") @ a.astype("f8")
    adapter = WrittenAdapter(
        model=record, factors=factors, rank=RANK, alpha=ALPHA, dropout=0.0, base="somewhere"
    )

    for _ in range(2):  # the second one takes the place of the first
        adapter.write(tmp_path / "adapter")

    found = open_checkpoint(base, options=ReadOptions(adapter=tmp_path / "adapter"))
    assert len(wanted) >= 4
    for key, array in samples.arrays(record).items():
        got = found.tensors[key].numpy()
        np.testing.assert_allclose(got, wanted.get(key, array), rtol=1e-6, atol=2e-6, err_msg=key)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_the_scale_may_differ_by_layer_and_go_with_the_root_of_the_rank(
    tmp_path: Path, numbers: np.random.Generator
) -> None:
    base = exported(tmp_path, "llama")
    shapes = layers_of(base, ("o_proj",), turned=False)
    patterns = {"alpha_pattern": {"model.layers.1.self_attn.o_proj": 2 * ALPHA}}
    products = write_adapter(tmp_path / "adapter", shapes, numbers, use_rslora=True, **patterns)

    found = open_checkpoint(base, options=ReadOptions(adapter=tmp_path / "adapter"))

    plain = open_checkpoint(base)
    for layer, factor in ((0, 1.0), (1, 2.0)):
        name = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
        product = products[f"model.layers.{layer}.self_attn.o_proj"] * factor * RANK**0.5
        change = found.tensors[name].numpy() - plain.tensors[name].numpy()
        np.testing.assert_allclose(change, product, rtol=1e-6, atol=5e-6)


def spoil_config(folder: Path, **members: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


def spoil_tensors(folder: Path, change: Callable[[dict[str, Array]], None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def rename_one(tensors: dict[str, Array]) -> None:
    for half in "AB":
        name = f"base_model.model.model.layers.0.self_attn.o_proj.lora_{half}.weight"
        tensors[name.replace("layers.0", "layers.7")] = tensors.pop(name)


def lose_half(tensors: dict[str, Array]) -> None:
    del tensors["base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"]


def widen(tensors: dict[str, Array]) -> None:
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    tensors[name] = np.zeros((RANK, 7), "f4")


def embed(tensors: dict[str, Array]) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    tensors[name] = np.zeros((RANK, 7), "f4")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (partial(spoil_config, peft_type="IA3"), "it holds IA3, not LORA"),
        (partial(spoil_config, use_dora=True), "'use_dora' is true"),
        (partial(spoil_config, modules_to_save=["lm_head"]), "'modules_to_save'"),
        (partial(spoil_config, r=5), "rank 3 where adapter_config.json says 5"),
        (partial(spoil_config, lora_alpha="much"), "'lora_alpha' is much, not a number"),
        (partial(spoil_config, rank_pattern={"^a|b": 4}), "has the expression"),
        (partial(spoil_tensors, change=rename_one), "a llama has no such layer"),
        (partial(spoil_tensors, change=lose_half), "A and B do not fit together"),
        (partial(spoil_tensors, change=widen), "its product has shape"),
        (partial(spoil_tensors, change=embed), "not a matrix of a linear layer's LoRA"),
    ],
)
def test_other_and_broken_adapters_are_refused(
    tmp_path: Path,
    numbers: np.random.Generator,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    said: str,
) -> None:
    base = exported(tmp_path, "llama")
    write_adapter(tmp_path / "adapter", layers_of(base, ("o_proj",), turned=False), numbers)
    spoil(tmp_path / "adapter")

    arguments = ["--to", "hf", "--adapter", str(tmp_path / "adapter")]
    assert main(["convert", str(base), str(tmp_path / "merged"), *arguments]) == 3

    assert said in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_optimizer_state_stays_behind(tmp_path: Path, numbers: np.random.Generator) -> None:
    record = samples.model("llama")
    arrays = samples.arrays(record)
    base = samples.save(tmp_path / "ckpt", record, arrays, optimizer=True)
    convert(base, tmp_path / "hf", to="hf", weights_only=True)
    shapes = layers_of(tmp_path / "hf", ("o_proj",), turned=False)
    write_adapter(tmp_path / "adapter", shapes, numbers)

    convert(base, tmp_path / "merged", to="mds", adapter=tmp_path / "adapter")

    assert set(open_checkpoint(tmp_path / "merged").states) == {"weight"}
    assert choose(open_checkpoint(tmp_path / "merged").model).name == "llama"


@pytest.mark.parametrize("to", ["hf", "megatron", "deepspeed"])
def test_adapters_without_their_model_are_told_where_to_go(tmp_path: Path, to: str) -> None:
    name = "decoder.layers.0.self_attention.linear_proj.adapter.linear_{}.weight"
    arrays = {name.format("in"): np.ones((2, 8), "f4"), name.format("out"): np.ones((8, 2), "f4")}
    source = samples.save(tmp_path / "ckpt", samples.model("llama"), arrays)

    with pytest.raises(UnsupportedError, match=r"holds the adapters of a run .* with --adapter"):
        convert(source, tmp_path / "out", to=to)

    convert(source, tmp_path / "copy", to="mds")
    assert open_checkpoint(tmp_path / "copy").tensors.keys() == arrays.keys()
