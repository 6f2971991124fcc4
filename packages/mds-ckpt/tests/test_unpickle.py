from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_ckpt.pickles.records import EnumRecord, Global, Namespace, NumpyArray, Opaque, as_fragment
from mds_ckpt.pickles.unpickle import PickleError, PickleLimits, unpickle, unpickle_next

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.text()
    | st.floats(allow_nan=False)
)
plain = st.recursive(
    scalars | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text() | st.integers(-(2**60), 2**60), inner, max_size=5)
        | st.tuples(inner, inner, inner)
        | st.tuples(inner)
    ),
    max_leaves=20,
)


@given(plain, st.sampled_from(PROTOCOLS[2:]))
def test_plain_values_come_back_as_they_were(value: Any, protocol: int) -> None:
    assert unpickle(pickle.dumps(value, protocol)).value == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_is_read(protocol: int) -> None:
    value = {"a": [1, -2, 2**70, 1.5, None, True], "b": ("x", ("y",)), 3: {"c"}}

    assert unpickle(pickle.dumps(value, protocol)).value == value


def test_shared_values_stay_shared() -> None:
    inner = [1, 2]

    value = unpickle(pickle.dumps([inner, inner], 2)).value

    assert value[0] is value[1]


def test_python_collections_become_plain_ones() -> None:
    value = {
        "ordered": collections.OrderedDict(a=1, b=2),
        "default": collections.defaultdict(list, x=[1]),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=4),
        "frozen": frozenset({1, 2}),
    }

    read = unpickle(pickle.dumps(value, 2)).value

    assert list(read["ordered"]) == ["a", "b"]
    assert read["default"] == {"x": [1]}
    assert read["counter"] == {"a": 2, "b": 1}
    assert read["frozen"] == {1, 2}


def test_an_argparse_namespace_is_a_mapping_of_its_fields() -> None:
    value = unpickle(pickle.dumps(argparse.Namespace(hidden_size=8, rope=True), 2)).value

    assert isinstance(value, Namespace)
    assert dict(value) == {"hidden_size": 8, "rope": True}


class ModelEnum(enum.Enum):
    ENCODER = 1


class Settings:
    def __init__(self) -> None:
        self.size = 3


def test_foreign_objects_are_shown_by_name_and_not_built() -> None:
    value = unpickle(pickle.dumps([Settings(), ModelEnum.ENCODER], 2)).value

    settings, member = value
    assert isinstance(settings, Opaque)
    assert str(settings.cls) == f"{__name__}.Settings"
    assert settings.get("size") == 3
    assert member == EnumRecord(Global(__name__, "ModelEnum"), 1)


@pytest.mark.parametrize("dtype", ["u1", "<u4", "<f8", "<i2", "?", "<U3"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_numpy_arrays_keep_their_bytes(dtype: str, protocol: int) -> None:
    array = np.asfortranarray(np.array([[0, 1], [2, 3]]).astype(dtype))

    value = unpickle(
        pickle.dumps([array, array[0, 1], np.random.RandomState(3).get_state()], protocol)
    ).value

    assert isinstance(value[0], NumpyArray)
    np.testing.assert_array_equal(value[0].numpy(), array)
    assert value[1] == array[0, 1]
    assert value[2][0] == "MT19937"


def test_the_random_state_of_python_is_read() -> None:
    state = random.Random(5).getstate()

    assert unpickle(pickle.dumps(state, 2)).value == state


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(PickleError, match="not a plain number"):
        unpickle(pickle.dumps(np.array([{}], dtype=object), 2))


def test_fragments_are_recognised() -> None:
    data = (
        b"\x80\x02cdeepspeed.utils.tensor_fragment\nfragment_address\n)\x81}"
        b"(X\x05\x00\x00\x00numelK\x05X\x05\x00\x00\x00startK\x07ub."
    )

    fragment = as_fragment(unpickle(data).value)

    assert fragment is not None
    assert (fragment.numel, fragment.start) == (5, 7)


def test_several_pickles_in_a_row_are_read_one_by_one() -> None:
    data = pickle.dumps(1, 2) + pickle.dumps("two", 2)

    first = unpickle_next(data, 0)
    second = unpickle_next(data, first.end)

    assert (first.value, second.value, second.end) == (1, "two", len(data))
    with pytest.raises(PickleError, match="bytes follow its end"):
        unpickle(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02cos\nsystem\n.", "would import os.system"),
        (b"\x80\x02cbuiltins\neval\n.", "would import builtins.eval"),
        (b"\x80\x02cmylib.tools\nrun\n)R.", "would call the function mylib.tools.run"),
        (b"\x80\x02}}s.", "empty stack"),
        (b"\x80\x02}}Ns.", "used as a dictionary key"),
        (b"\x80\x02K\x01K\x02K\x03s.", "no dictionary"),
        (b"\x80\x02K\x01K\x02a.", "no list"),
        (b"\x80\x02h\x05.", "memo entry 5"),
        (b"\x80\x02NN.", "2 values are left"),
        (b"\x80\x02N", "ends before its STOP"),
        (b"\x80\x07N.", "protocol 7"),
        (b"\x80\x02\x97.", "opcode 0x97"),
        (b"\x80\x02P1\n.", "opcode 0x50"),
        (b"\x80\x02NQ.", "does not name a storage"),
        (b"\x80\x02K\x01)R.", "not a plain global name"),
        (b"\x80\x02X\xff\xff\xff\x7fa.", "over the limit"),
        (b"\x80\x02]q\x00h\x00a.", "contains itself"),
        (b"\x80\x02" + b"]" * 150 + b"a" * 149 + b".", "nested more than 100"),
        (b"\x80\x02ctorch\nSize\n(\x8a\x08" + b"\xff" * 7 + b"\x7ft\x85R.", "entry is"),
    ],
)
def test_what_no_checkpoint_needs_is_refused_with_its_reason(data: bytes, message: str) -> None:
    with pytest.raises(PickleError, match=message):
        unpickle(data)


def test_naming_a_function_of_a_stranger_is_harmless() -> None:
    value = unpickle(b"\x80\x02cmylib.tools\nrun\n.").value

    assert value == Global("mylib.tools", "run")


@given(st.binary(max_size=200))
def test_noise_never_raises_anything_else(data: bytes) -> None:
    with contextlib.suppress(PickleError):
        unpickle(b"\x80\x02" + data)


@given(plain, st.data())
def test_a_damaged_pickle_never_raises_anything_else(value: Any, data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(value, 2))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(PickleError):
        unpickle(bytes(raw))


def test_limits_are_the_callers() -> None:
    data = pickle.dumps(list(range(100)), 2)

    with pytest.raises(PickleError, match="more than 50 operations"):
        unpickle(data, limits=PickleLimits(operations=50))
