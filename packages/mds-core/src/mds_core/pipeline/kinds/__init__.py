"""The kinds of models whose stages a pipeline can run, by the type of their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mds_core.bert_config import BertConfig
from mds_core.config import GPTConfig
from mds_core.pipeline.kinds.bert import BertPart
from mds_core.pipeline.kinds.gpt import GPTPart
from mds_core.pipeline.kinds.t5 import T5Part
from mds_core.pipeline.part import Part
from mds_core.t5_config import T5Config

__all__ = ["part_of"]

_PARTS: Mapping[type[GPTConfig], type[Part]] = MappingProxyType(
    {T5Config: T5Part, BertConfig: BertPart}
)


def part_of(config: GPTConfig) -> type[Part]:
    """How the stages of this kind of model are run."""
    for kind, part in _PARTS.items():
        if isinstance(config, kind):
            return part
    return GPTPart
