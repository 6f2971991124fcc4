"""Continues texts with a trained model: loading, decoding, sampling, beam search."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mds_train.generate.batch import ContinuousBatch
    from mds_train.generate.beams import Beam, BeamSearch, beam_search
    from mds_train.generate.decoding import Completion, complete, generate, search_beams
    from mds_train.generate.model import end_tokens, find_checkpoint, load_model, load_tokenizer
    from mds_train.generate.request import Request, Running, Token
    from mds_train.generate.sampling import Sampling
    from mds_train.generate.text import TextStream

__all__ = [
    "Beam",
    "BeamSearch",
    "Completion",
    "ContinuousBatch",
    "Request",
    "Running",
    "Sampling",
    "TextStream",
    "Token",
    "beam_search",
    "complete",
    "end_tokens",
    "find_checkpoint",
    "generate",
    "load_model",
    "load_tokenizer",
    "search_beams",
]

# torch takes seconds to import; `mds-train --help` is spared them.
_HOMES = {
    "Beam": "beams",
    "BeamSearch": "beams",
    "Completion": "decoding",
    "ContinuousBatch": "batch",
    "Request": "request",
    "Running": "request",
    "Sampling": "sampling",
    "TextStream": "text",
    "Token": "request",
    "beam_search": "beams",
    "complete": "decoding",
    "end_tokens": "model",
    "find_checkpoint": "model",
    "generate": "decoding",
    "load_model": "model",
    "load_tokenizer": "model",
    "search_beams": "decoding",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
