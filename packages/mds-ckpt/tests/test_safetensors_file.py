"""The strict reader against hostile files and the official library; the writer against both."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors_attacks as attacks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.safetensors_file import (
    SafetensorsFile,
    SafetensorsWriter,
    StoredTensor,
    TensorSpec,
)


@pytest.mark.parametrize("name", attacks.REFUSED)
@pytest.mark.timeout(30)
def test_a_hostile_file_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    word, build = attacks.REFUSED[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(build())

    start = time.perf_counter()
    with pytest.raises(RejectedError) as caught:
        _ = SafetensorsFile(path).header

    assert time.perf_counter() - start < 5
    message = str(caught.value)
    assert word in message
    assert str(path) in message
    assert "; get the file again" in message
    assert message.endswith(".")
    assert message.isprintable()
    assert len(message) < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux only")
def test_refusing_takes_less_than_256_mb(tmp_path: Path) -> None:
    """In a process of its own, since peaks of the test process would hide it."""
    paths = attacks.write_all(tmp_path)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from mds_ckpt.files.safetensors_file import SafetensorsFile\n"
        "from mds_ckpt.errors import RejectedError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        SafetensorsFile(Path(path)).header\n"
        "        print('read', path)\n"
        "    except RejectedError:\n"
        "        pass\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], check=True, capture_output=True, text=True
    )

    assert int(done.stdout) < 256, done.stdout


def test_ugly_names_are_read_and_never_printed_raw(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(attacks.ugly().replace(b"\\ud800", b"\\ud800"))

    file = SafetensorsFile(path)

    assert set(file.header.entries) == set(attacks.UGLY_NAMES)
    for name in attacks.UGLY_NAMES:
        error = RejectedError(path, "no", remedy="yes", tensor=name)
        assert str(error).isprintable()
        assert len(str(error)) < 1000


def test_a_header_may_end_in_spaces_and_tensors_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    members = dict.fromkeys("ab", attacks.tensor("F32", (0, 5), (0, 0)))
    text = json.dumps(members | {"w": attacks.tensor()}).encode()
    path.write_bytes(attacks.file(text + b"   ", attacks.ZEROS))

    assert set(SafetensorsFile(path).header.entries) == {"a", "b", "w"}


def test_files_of_the_official_library_are_read_alike(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        "f32": random.standard_normal((3, 5)).astype("f4"),
        "f16": random.standard_normal(7).astype("f2"),
        "i64": np.arange(4),
        "bool": np.array([True, False]),
        "scalar": np.array(3.0),
        "empty": np.zeros((0, 3), "u1"),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})

    file = SafetensorsFile(tmp_path / "x.safetensors")

    assert file.header.metadata == {"format": "pt"}
    for name, array in arrays.items():
        entry = file.entry(name)
        stored = StoredTensor(file, name, dtype=entry.dtype, shape=entry.shape)
        assert np.array_equal(stored.read(0, array.size).reshape(array.shape), array)


def test_the_official_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)}
    specs = [TensorSpec("w", "F32", (2, 3)), TensorSpec("b", "BF16", (3,))]

    with SafetensorsWriter(path, specs, metadata={"format": "pt"}) as writer:
        writer.write("w", arrays["w"][:1])
        writer.write("w", arrays["w"][1:])
        writer.write("b", arrays["b"])

    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert np.array_equal(file.get_tensor("w"), arrays["w"])
        assert file.get_slice("b").get_shape() == [3]
    assert writer.result.size == path.stat().st_size
    assert writer.result.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_data_starts_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for length in range(1, 9):
        path = tmp_path / f"{length}.safetensors"
        with SafetensorsWriter(path, [TensorSpec("n" * length, "U8", (1,))]) as writer:
            writer.write("n" * length, np.zeros(1, "u1"))
        assert SafetensorsFile(path).entry("n" * length).start % 8 == 0


def test_a_transposed_or_big_endian_array_is_written_as_its_numbers(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    path = tmp_path / "x.safetensors"

    with SafetensorsWriter(path, [TensorSpec("w", "F32", (3, 2))]) as writer:
        writer.write("w", array)

    file = SafetensorsFile(path)
    assert np.array_equal(
        StoredTensor(file, "w", dtype="F32", shape=(3, 2)).read(0, 6), array.ravel()
    )


def test_a_tensor_left_out_or_out_of_order_is_an_error(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))]

    with (
        pytest.raises(ValueError, match="'b' was written where 'a' was declared"),
        SafetensorsWriter(tmp_path / "1", specs) as writer,
    ):
        writer.write("b", np.zeros(2, "f4"))
    with (
        pytest.raises(ValueError, match="'b' was declared, not written"),
        SafetensorsWriter(tmp_path / "2", specs) as writer,
    ):
        writer.write("a", np.zeros(2, "f4"))
    with (
        pytest.raises(ValueError, match="declared as F32"),
        SafetensorsWriter(tmp_path / "3", specs) as writer,
    ):
        writer.write("a", np.zeros(3, "f4"))


def test_a_changed_byte_is_found_at_the_first_touch_even_of_another_part(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, [TensorSpec("w", "F32", (1000,))]) as writer:
        writer.write("w", np.arange(1000, dtype="f4"))
    checksum = writer.result.crc32c["w"]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    stored = StoredTensor(SafetensorsFile(path), "w", dtype="F32", shape=(1000,), checksum=checksum)

    for span in ((0, 1), (0, 1000)):
        with pytest.raises(RejectedError, match="tensor 'w': its bytes have checksum"):
            stored.read(*span)


def test_a_file_that_is_swapped_between_two_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(attacks.file({"w": attacks.tensor()}, attacks.ZEROS))
    file = SafetensorsFile(path)
    stored = StoredTensor(file, "w", dtype="F32", shape=(4,))
    stored.read(0, 4)

    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    other.replace(path)

    with pytest.raises(RejectedError, match="changed while it was being read"):
        stored.read(0, 4)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_file_is_read_right_or_refused(tmp_path_factory, data) -> None:
    """Structure-aware: bytes of a good file are replaced, cut or doubled."""
    good = attacks.file({"a": attacks.tensor(), "b": attacks.tensor(offsets=(16, 32))}, bytes(32))
    mutated = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not mutated:
            break
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(mutated)

    try:
        header = SafetensorsFile(path).header
    except RejectedError:
        return
    assert sum(e.stop - e.start for e in header.entries.values()) <= len(mutated)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_threads_may_meet_a_tensor_for_the_first_time_together(
    tmp_path: Path, is_damaged: bool
) -> None:
    """Each reads a part, so each checks the whole; one of them is done first."""
    values = np.arange(3_000_000, dtype="f4")
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, [TensorSpec("w", "F32", values.shape)]) as writer:
        writer.write("w", values)
    checksum = writer.result.crc32c["w"]
    if is_damaged:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    for _ in range(3):
        stored = StoredTensor(
            SafetensorsFile(path),
            "w",
            dtype="F32",
            shape=values.shape,
            checksum=checksum,
        )
        with ThreadPoolExecutor(8) as pool:
            parts = [pool.submit(stored.read, n * 1000, n * 1000 + 1000) for n in range(8)]
        if is_damaged:
            assert all(isinstance(part.exception(), RejectedError) for part in parts)
        else:
            found = np.concatenate([part.result() for part in parts])
            np.testing.assert_array_equal(found, values[:8000])
