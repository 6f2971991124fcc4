"""What may be asked of a conversion, checked before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mds_ckpt import convert
from mds_ckpt.errors import UsageError
from mds_ckpt.plan import Options
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.wishes import options_of, read_options_of


def test_who_asks_for_nothing_gets_the_defaults() -> None:
    assert options_of({}) == Options()
    assert read_options_of({}) == ReadOptions()


def test_a_release_holds_weights_only() -> None:
    options = options_of({"release": True, "tp": 2, "layers_per_stage": [1, 2]})

    assert options.weights_only
    assert options.is_release
    assert (options.tp_size, options.layers_per_stage) == (2, (1, 2))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"tp": 0}, "--tp is 0"),
        ({"zero_stage": 4}, "--zero-stage is 4"),
        ({"dtype": "F99"}, "'F99' is no type for weights"),
        ({"max_shard_bytes": -1}, "--max-shard-bytes is -1"),
    ],
)
def test_a_wish_that_makes_no_sense_is_named(wish: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options_of(wish)


def test_an_argument_that_convert_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no argument tensor_parallel"):
        convert(tmp_path, tmp_path / "out", to="hf", tensor_parallel=2)  # type: ignore[call-arg]
