"""Low-rank adapters (LoRA) in the folders of the peft library: read, written, added to weights.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``; for each adapted layer of
transformers' model the file has A [r, in] and B [out, r], and the layer's weight becomes
``W + scale B A``. Where our layers are fused (query, key and value; gate and up) theirs are
several: on the way out these share one A, on the way in each may have its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint, ComputedTensor, LazyTensor
from mds_ckpt.companions import read_json
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.escape import printable
from mds_ckpt.families import choose
from mds_ckpt.families.change import Transposed
from mds_ckpt.files.file_operations import REAL, make_folders, write_file
from mds_ckpt.files.safetensors_file import SafetensorsWriter, TensorSpec
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.stored import Stored, read_safetensors, values
from mds_ckpt.tensors.dtype import numpy_dtype

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array
    from mds_ckpt.families.rule import Rule

__all__ = ["CONFIG_NAME", "Factors", "WrittenAdapter", "with_adapter", "with_factors"]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_OFF: Mapping[str, object] = {
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "megatron_config": None,
}
"""What would mean more than W + scale B A, and its value where it is not used."""
_FLOATS = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter of a layer of ours: A [r, in], B [out, r] and what B A is multiplied by."""

    a: Callable[[], Array]
    b: Callable[[], Array]
    scale: float

    def product(self) -> Array:
        """Scale B A, [out, in], fp32."""
        import numpy as np

        b, a = self.b().astype(np.float32), self.a().astype(np.float32)
        return np.asarray(b @ a * np.float32(self.scale))


def with_factors(checkpoint: Checkpoint, factors: Mapping[str, Factors]) -> Checkpoint:
    """The checkpoint's weights with adapters added to them; optimizer state is left behind.

    Args:
        checkpoint: The model that the adapters belong to.
        factors: By canonical name of the weight.

    Raises:
        RejectedError: The model lacks a weight.
    """
    return _with_changes(checkpoint, {name: each.product for name, each in factors.items()})


def with_adapter(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The checkpoint's weights with an adapter of peft's added to them.

    Args:
        checkpoint: The model that the adapter was trained beside, in any format.
        folder: Holds ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        RejectedError: The folder is damaged, or the adapter belongs to another model.
        UnsupportedError: It is more than a plain LoRA of linear layers.
    """
    config = _read_config(folder)
    products = _read_products(folder, config)
    try:
        family = choose(checkpoint.model, prefer=_model_type(checkpoint))
    except ValueError as error:
        remedy = "an adapter in this format needs a model that transformers has"
        raise UnsupportedError(checkpoint.path, str(error), remedy=remedy) from None
    changes = {}
    for rule in family.rules(checkpoint.model):
        names = [target.name.removesuffix(".weight") for target in rule.hf]
        parts = [products.pop(name, None) for name in names]
        if any(part is not None for part in parts):
            _check_shapes(folder, rule, parts)
            changes[rule.canonical.name] = partial(_joined, rule, tuple(parts))
    if products:
        raise RejectedError(
            folder / WEIGHTS_NAME,
            f"a {family.name} has no such layer, or one without an adapter of this kind",
            remedy="name the model that the adapter was trained beside",
            tensor=next(iter(products)),
        )
    return _with_changes(checkpoint, changes)


# The sum -----------------------------------------------------------------------------------------


def _with_changes(checkpoint: Checkpoint, changes: Mapping[str, Callable[[], Array]]) -> Checkpoint:
    weights = dict(checkpoint.tensors)
    for name, change in changes.items():
        base = checkpoint.tensor(name)
        compute = partial(_sum, base, change)
        weights[name] = ComputedTensor(name, base.shape, base.dtype, compute=compute)
    return replace(checkpoint, states={"weight": weights}, carried={})


def _sum(base: LazyTensor, change: Callable[[], Array]) -> Array:
    """Rounded once, at the end."""
    import numpy as np

    whole = base.numpy().astype(np.float32) + change()
    return np.asarray(whole.astype(numpy_dtype(base.dtype)))


# peft's folders, read ----------------------------------------------------------------------------


def _read_config(folder: Path) -> Mapping[str, Any]:
    config = read_json(folder / CONFIG_NAME)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            folder / CONFIG_NAME,
            f"it holds {printable(str(kind))}, not LORA",
            remedy="merge it with the peft library",
        )
    for key, off in _OFF.items():
        value = config.get(key, off)
        if value != off and value:
            raise UnsupportedError(
                folder / CONFIG_NAME,
                f"'{key}' is {printable(json.dumps(value))[:80]}, which is more than a plain LoRA",
                remedy="merge it with the peft library",
            )
    return config


def _read_products(folder: Path, config: Mapping[str, Any]) -> dict[str, _Product]:
    """The adapters of the file by the name of transformers' layer."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise RejectedError(folder, f"it has no {WEIGHTS_NAME}", remedy="download it again")
    found: dict[str, dict[str, Stored]] = {}
    for key, stored in read_safetensors(path).items():
        match = _KEY.fullmatch(key)
        if match is None or len(stored.shape) != 2 or stored.dtype not in _FLOATS:
            raise UnsupportedError(
                path,
                f"'{printable(key)}' is not a matrix of a linear layer's LoRA",
                remedy="merge it with the peft library",
            )
        found.setdefault(match[1], {})[match[2]] = stored
    return {name: _product(path, name, pair, config) for name, pair in found.items()}


def _product(
    path: Path, name: str, pair: Mapping[str, Stored], config: Mapping[str, Any]
) -> _Product:
    if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
        raise RejectedError(
            path, "its A and B do not fit together", remedy="download it again", tensor=name
        )
    rank = pair["A"].shape[0]
    alpha = _of_layer(path, name, config, pattern="alpha_pattern", usual="lora_alpha")
    stated = _of_layer(path, name, config, pattern="rank_pattern", usual="r")
    if rank < 1 or stated != rank:
        raise RejectedError(
            path,
            f"it has rank {rank} where {CONFIG_NAME} says {stated:g}",
            remedy="take both files from the same training",
            tensor=name,
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return _Product(pair["A"], pair["B"], scale)


def _of_layer(
    path: Path, name: str, config: Mapping[str, Any], *, pattern: str, usual: str
) -> float:
    """A number of one layer: that of the first pattern which its name ends with, or the usual."""
    patterns = config.get(pattern) or {}
    for expression, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if name == expression or name.endswith(f".{expression}"):
            return _number(path, pattern, value)
        if not re.fullmatch(r"[\w.]+", str(expression)):
            raise UnsupportedError(
                path.with_name(CONFIG_NAME),
                f"'{pattern}' has the expression {printable(str(expression))[:80]}",
                remedy="merge it with the peft library",
            )
    return _number(path, usual, config.get(usual))


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RejectedError(
            path.with_name(CONFIG_NAME),
            f"'{key}' is {printable(str(value))[:80]}, not a number",
            remedy="download it again",
        )
    return float(value)


@dataclass(frozen=True, slots=True)
class _Product:
    """One layer's adapter as it is stored."""

    a: Stored
    b: Stored
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    def compute(self) -> Array:
        return Factors(partial(values, self.a), partial(values, self.b), self.scale).product()


def _check_shapes(folder: Path, rule: Rule, parts: Sequence[_Product | None]) -> None:
    for target, part in zip(rule.hf, parts, strict=True):
        wanted = target.shape[::-1] if _stores_columns(rule) else target.shape
        if part is not None and part.shape != wanted:
            raise RejectedError(
                folder / WEIGHTS_NAME,
                f"its product has shape {list(part.shape)}, the model's layer {list(wanted)}",
                remedy="name the model that the adapter was trained beside",
                tensor=target.name,
            )


def _joined(rule: Rule, parts: Sequence[_Product | None]) -> Array:
    """What is added to our weight, of what is added to theirs."""
    import numpy as np

    arrays = []
    for target, part in zip(rule.hf, parts, strict=True):
        if part is None:
            arrays.append(np.zeros(target.shape, np.float32))
        else:
            product = part.compute()
            arrays.append(product.T.copy() if _stores_columns(rule) else product)
    return rule.change.to_canonical(*arrays)


def _stores_columns(rule: Rule) -> bool:
    """Whether theirs is [in, out], as GPT-2's; peft's A and B are a linear layer's even there."""
    return isinstance(rule.change, Transposed)


def _model_type(checkpoint: Checkpoint) -> str | None:
    origin = checkpoint.origin.get("huggingface") or {}
    return origin.get("model_type")


# peft's folders, written -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenAdapter:
    """An adapter of a model of ours, as the peft library is to find it.

    Attributes:
        model: What it was trained beside.
        factors: By canonical name of the weight; all have the rank and the scale.
        rank: Width between A and B.
        alpha: What B A is multiplied by, times the rank.
        dropout: Of the training, for whoever goes on.
        base: Path or name of the model, for people and for peft's own loader.
        model_type: The family of transformers that is wanted where several fit.
    """

    model: ModelRecord
    factors: Mapping[str, Factors]
    rank: int
    alpha: float
    dropout: float
    base: str
    model_type: str | None = None

    def write(self, folder: Path) -> None:
        """Fill a folder, which may hold an older adapter.

        Raises:
            ValueError: If transformers has no such model; the message says why.
        """
        tensors, columns = self._tensors()
        config = self._config(tensors, fan_in_fan_out=columns)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        make_folders(folder)
        weights, settings = (folder / f"{name}.partial" for name in (WEIGHTS_NAME, CONFIG_NAME))
        for path in (weights, settings):
            path.unlink(missing_ok=True)
        specs = [TensorSpec(name, "F32", array.shape) for name, array in tensors.items()]
        with SafetensorsWriter(weights, specs, metadata={"format": "pt"}) as writer:
            for name, array in tensors.items():
                writer.write(name, array)
        write_file(settings, text.encode())
        _put_in_place(folder, weights=weights, settings=settings)

    def _tensors(self) -> tuple[dict[str, Array], bool]:
        """A and B under peft's names, and whether the layers store [in, out]."""
        family = choose(self.model, prefer=self.model_type)
        rules = {rule.canonical.name: rule for rule in family.rules(self.model)}
        tensors: dict[str, Array] = {}
        columns = False
        for name, factors in self.factors.items():
            rule = rules[name]
            columns |= _stores_columns(rule)
            for target, b in zip(rule.hf, _divided(rule, factors.b()), strict=True):
                layer = f"base_model.model.{target.name.removesuffix('.weight')}"
                tensors[f"{layer}.lora_A.weight"] = factors.a().astype("<f4")
                tensors[f"{layer}.lora_B.weight"] = b.astype("<f4")
        return tensors, columns

    def _config(self, names: Mapping[str, Array], *, fan_in_fan_out: bool) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": sorted({_ending(name.partition(".lora_")[0]) for name in names}),
            "fan_in_fan_out": fan_in_fan_out,
            "bias": "none",
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
            "use_rslora": False,
            "use_dora": False,
        }


def _put_in_place(folder: Path, *, weights: Path, settings: Path) -> None:
    """Let two files take the places of an older adapter's.

    What dies in between leaves a folder without settings, which nobody opens: new weights are never
    there under the old scale.
    """
    if (folder / CONFIG_NAME).exists():
        REAL.remove(folder / CONFIG_NAME)
        REAL.sync_folder(folder)
    for path, name in ((weights, WEIGHTS_NAME), (settings, CONFIG_NAME)):
        REAL.replace(path, folder / name)
        REAL.sync_folder(folder)


def _ending(layer: str) -> str:
    """What peft recognises a layer by: the last words of its name, enough to tell it apart."""
    words = layer.split(".")
    # GPT-2 calls a layer of attention and one of the MLP alike.
    return ".".join(words[-2:]) if words[-1] == "c_proj" else words[-1]


def _divided(rule: Rule, b: Array) -> tuple[Array, ...]:
    """Rows of our B for each layer of theirs."""
    import numpy as np

    parts = rule.change.to_hf(np.ascontiguousarray(b))
    return tuple(np.ascontiguousarray(part.T if _stores_columns(rule) else part) for part in parts)
