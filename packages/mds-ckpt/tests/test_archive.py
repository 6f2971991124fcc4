from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mds_ckpt.errors import RejectedError
from mds_ckpt.pickles.archive import open_torch_file, read_pickle_file
from mds_ckpt.pickles.records import EnumRecord, Global, Namespace, Opaque, TensorRef, TorchDtype
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file, size

DTYPES = ["<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "i1", "u1", "?", "<c8", ml_dtypes.bfloat16]


def saved(path: Path, value: Any) -> Path:
    save_torch_file(path, value)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)

    file = open_torch_file(saved(tmp_path / "a.pt", {"w": array, "s": np.array(1.0, array.dtype)}))

    tensor = file.value["w"]
    assert isinstance(tensor, TensorRef)
    assert file.read(tensor).dtype == array.dtype
    np.testing.assert_array_equal(file.read(tensor), array)
    np.testing.assert_array_equal(file.read(tensor, start=5, stop=9), array.reshape(-1)[5:9])
    assert file.read(file.value["s"]).shape == ()
    assert file.damaged_members() == []


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    value = {
        "args": Namespace({"num_layers": 2, "dtype": TorchDtype("bfloat16"), "big": 2**40}),
        "kind": EnumRecord(Global("megatron.core.enums", "ModelType"), 1),
        "shapes": ordered({"w": size((2, 3))}),
        "scaler": Opaque(Global("deepspeed.x", "LossScaler"), state={"cur_scale": 1.0}),
        "bytes": b"\x00\xff",
        "set": {1, 2},
    }

    read = open_torch_file(saved(tmp_path / "a.pt", value)).value

    assert dict(read["args"]) == dict(value["args"])
    assert read["kind"] == value["kind"]
    assert read["shapes"] == {"w": (2, 3)}
    assert read["scaler"].get("cur_scale") == 1.0
    assert (read["bytes"], read["set"]) == (b"\x00\xff", {1, 2})


def test_opening_reads_no_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"w": np.zeros(1 << 20, "u1")})
    at = path.read_bytes().find(bytes(1 << 20))
    with path.open("r+b") as stream:
        stream.seek(at + 100)
        stream.write(b"\xff")

    file = open_torch_file(path)

    assert len(file.damaged_members()) == 1
    assert file.damaged_members()[0].endswith("data/0")


@pytest.mark.parametrize("part", range(1, 16))
def test_a_truncated_file_is_rejected(tmp_path: Path, part: int) -> None:
    data = saved(tmp_path / "a.pt", {"w": np.arange(64.0)}).read_bytes()
    (tmp_path / "b.pt").write_bytes(data[: len(data) * part // 16])

    with pytest.raises(RejectedError, match=r"b\.pt"):
        open_torch_file(tmp_path / "b.pt")


@given(st.data())
def test_a_damaged_file_opens_or_is_rejected(tmp_path_factory: Any, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray(saved(folder / "a.pt", {"w": np.arange(4.0), "n": [1, "x"]}).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "b.pt").write_bytes(raw)

    with contextlib.suppress(RejectedError):
        file = open_torch_file(folder / "b.pt")
        for tensor in [file.value.get("w")] if isinstance(file.value, dict) else []:
            if isinstance(tensor, TensorRef):
                file.read(tensor)
        file.damaged_members()


def pickled_long(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def legacy_file(values: np.ndarray[Any, Any]) -> bytes:
    """What torch 0.1.10 to 1.5 wrote, by hand."""
    key = b"X\x03\x00\x00\x00140"
    count = pickled_long(values.size)
    main = (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"
        b"ctorch\nFloatStorage\n" + key + b"X\x03\x00\x00\x00cpu" + count + b"NtQK\x00"
        + count + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
    )  # fmt: skip
    head = b"\x80\x02" + pickled_long(0x1950A86A20F9469CFC6C) + b".\x80\x02M\xe9\x03."
    system = b"\x80\x02}X\x0d\x00\x00\x00little_endian\x88s."
    keys = b"\x80\x02]" + key + b"a."
    return head + system + main + keys + struct.pack("<Q", values.size) + values.tobytes()


def test_files_of_old_torch_are_read(tmp_path: Path) -> None:
    values = np.arange(5, dtype="<f4")
    (tmp_path / "old.pt").write_bytes(legacy_file(values))

    file = open_torch_file(tmp_path / "old.pt")

    np.testing.assert_array_equal(file.read(file.value["w"]), values)


def test_a_truncated_file_of_old_torch_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(legacy_file(np.arange(5, dtype="<f4"))[:-3])

    with pytest.raises(RejectedError, match="do not fill it exactly"):
        open_torch_file(tmp_path / "old.pt")


def test_a_plain_pickle_is_read_where_one_is_expected(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02K\x05.")

    assert read_pickle_file(tmp_path / ".metadata") == 5
    with pytest.raises(RejectedError, match="not one that torch"):
        open_torch_file(tmp_path / ".metadata")


def test_a_strided_view_is_read_in_its_own_order(tmp_path: Path) -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    path = saved(tmp_path / "a.pt", {"w": array})
    file = open_torch_file(path)
    stored = file.value["w"]
    view = TensorRef(stored.storage, 1, (2, 3), (1, 4), "F32")

    np.testing.assert_array_equal(file.read(view), array.T[1:3])
    np.testing.assert_array_equal(file.read(view, start=2, stop=5), array.T[1:3].reshape(-1)[2:5])


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {})

    with pytest.raises(FileExistsError):
        save_torch_file(path, {})
