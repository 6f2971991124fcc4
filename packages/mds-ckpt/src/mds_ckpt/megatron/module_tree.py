"""Names and nesting of parameters in the files of Megatron's models that are no pipeline modules.

The stacks (``encoder``, ``decoder``) are flat inside, the rest is nested by module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mds_ckpt.megatron.naming import Named, stored_block_name, stored_module_name
from mds_ckpt.megatron.target_layout import LocalTensor
from mds_ckpt.pickles.torch_writer import ordered

__all__ = ["module_tree", "plain_name"]


def plain_name(name: str, *, family: str, first_layer: int = 0) -> tuple[str, Named] | None:
    """How Megatron calls a parameter, with its joined module names; None if it has no word for it.

    Args:
        name: Canonical name.
        family: ``gpt``, ``bert`` or ``t5``.
        first_layer: The layer that the file counts as 0.
    """
    parts = name.split(".", 3)
    main = "decoder" if family == "gpt" else "encoder"
    stack = "encoder" if parts[0] == main else parts[0]
    if parts[1] == "layers":
        is_crossed = family == "t5" and parts[0] == "decoder"
        block = stored_block_name(parts[3], has_cross_attention=is_crossed)
        if block is None:
            return None
        place = f"language_model.{stack}.layers.{int(parts[2]) - first_layer}"
        return f"{place}.{block[0]}", Named(name, block[1].sharing)
    if parts[1] == "final_layernorm":
        return f"language_model.{stack}.final_layernorm.{parts[2]}", Named(name, "replicated")
    return stored_module_name(name)


def module_tree(tensors: Iterable[tuple[str, LocalTensor]]) -> dict[str, Any]:
    """Parameters, given by joined names, nested as Megatron's modules save themselves."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors:
        _insert(tree, name, tensor)
    return _ordered_tree(tree)


def _insert(tree: dict[str, Any], name: str, value: LocalTensor) -> None:
    parts = name.split(".")
    if parts[0] == "language_model" and parts[1] in ("encoder", "decoder"):
        tree.setdefault("language_model", {}).setdefault(parts[1], {})[".".join(parts[2:])] = value
    elif parts[0] == "lm_head":
        tree.setdefault("lm_head", {})[".".join(parts[1:])] = value
    elif parts[:2] == ["language_model", "pooler"]:
        tree.setdefault("language_model", {}).setdefault("pooler", {})[".".join(parts[2:])] = value
    else:
        for part in parts[:-1]:
            tree = tree.setdefault(part, {})
        tree[parts[-1]] = value


def _ordered_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dictionaries as Megatron nests them; those with tensors are ordered ones, as torch writes."""
    if any(isinstance(value, LocalTensor) for value in tree.values()):
        return ordered(tree)  # type: ignore[return-value]
    return {
        key: _ordered_tree(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }
