"""The kinds of parameters that an optimizer steps differently."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mds_core.models import no_weight_decay

__all__ = ["DECAYED", "MATRICES", "UNDECAYED", "kind_of"]

MATRICES = "matrices"
"""Of Muon: matrices of the layers; decayed."""
DECAYED = "decayed"
UNDECAYED = "undecayed"

_LAYER = re.compile(r"\.layers\.\d+\.")


def kind_of(name: str, shape: Sequence[int], *, muon: bool) -> str:
    """What a parameter is to the optimizer.

    Args:
        name: Its canonical name.
        shape: Its shape.
        muon: Whether matrices are told from the rest. Embeddings, heads and routers are no
            matrices: their rows stand each for itself.
    """
    if no_weight_decay(name, tuple(shape)):
        return UNDECAYED
    in_layer = len(shape) == 2 and _LAYER.search(name) is not None and ".router." not in name
    return MATRICES if muon and in_layer else DECAYED
