from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_ckpt.megatron.naming import Named, Sharing
from mds_ckpt.megatron.reshard import ModelFacts, divide_layers, pieces, shard_of
from mds_ckpt.tensors.qkv import Heads

KINDS: list[Sharing] = ["replicated", "column", "row", "vocab", "qkv", "gated"]


@given(
    st.sampled_from(KINDS),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["grouped", "thirds"]),
    st.booleans(),
    st.data(),
)
def test_any_cut_of_the_ranks_flat_tensors_covers_the_whole_once(
    kind: Sharing, tp: int, layout: str, gated: bool, data: st.DataObject
) -> None:
    heads = Heads(8, 4, 2)
    facts = ModelFacts(heads=heads, layout=layout, is_gated=gated, vocab_size=11, tp_size=tp)  # type: ignore[arg-type]
    rows = {"qkv": heads.rows // tp, "gated": 8, "vocab": 16 // tp}.get(kind, 4)
    local = (rows, 3)
    named = Named("w", kind)
    seen = np.zeros(shard_of(named, local, 0, facts).shape, int)

    for rank in range(1 if kind == "replicated" else tp):
        shard = shard_of(named, local, rank, facts)
        cuts = sorted(data.draw(st.sets(st.integers(1, rows * 3 - 1), max_size=3)) | {0, rows * 3})
        for start, stop in pairwise(cuts):
            for part in pieces(shard, start, stop):
                box = tuple(slice(*span) for span in part.box)
                flat = np.arange(seen.size).reshape(seen.shape)[box].reshape(-1)
                seen.reshape(-1)[flat[slice(*part.flat)] if part.flat else flat] += 1

    assert (seen == 1).all()


@given(st.integers(1, 200), st.integers(1, 20))
def test_layers_are_divided_contiguously_and_evenly(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match="can't be divided"):
            divide_layers(layers, stages)
        return

    parts = divide_layers(layers, stages)

    assert [layer for part in parts for layer in part] == list(range(layers))
    assert len(parts) == stages
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
