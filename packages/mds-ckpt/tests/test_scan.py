from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mds_ckpt.errors import RejectedError
from mds_ckpt.pickles.records import EnumRecord, Global, Namespace
from mds_ckpt.pickles.torch_writer import save_torch_file
from mds_ckpt.scan import scan_path


def verdicts(path: Path) -> dict[str, str]:
    return {finding.name or finding.reason: finding.verdict for finding in scan_path(path)}


def test_a_checkpoint_names_only_known_and_inert_things(tmp_path: Path) -> None:
    kind = EnumRecord(Global("megatron.model.enums", "ModelType"), 1)
    save_torch_file(tmp_path / "a.pt", {"args": Namespace({"kind": kind}), "w": np.zeros(3)})

    assert verdicts(tmp_path) == {
        "argparse.Namespace": "known",
        "megatron.model.enums.ModelType": "inert",
        "torch._utils._rebuild_tensor_v2": "known",
        "torch.DoubleStorage": "known",
        "collections.OrderedDict": "known",
    }


def test_a_name_put_together_from_memoised_strings_is_found(tmp_path: Path) -> None:
    data = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94]\x94h\x00h\x01\x93\x8c\x01x\x85Ra."
    (tmp_path / "a").write_bytes(data)

    assert verdicts(tmp_path / "a") == {"posix.system": "dangerous"}


def test_a_stream_that_breaks_after_the_call_is_reported_twice(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x80\x02cposix\nsystem\n(X\x01\x00\x00\x00xtR0XXXX")

    assert sorted(verdicts(tmp_path / "a").values()) == ["broken", "dangerous"]


def test_names_behind_a_break_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x80\x02\xff\xffcposix\nsystem\n)R.")

    assert verdicts(tmp_path / "a")["posix.system"] == "dangerous"


def test_calling_an_unknown_function_is_dangerous_and_naming_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "named").write_bytes(b"\x80\x02cmylib\nrun\n.")
    (tmp_path / "called").write_bytes(b"\x80\x02cmylib\nrun\n)R.")

    assert verdicts(tmp_path / "named") == {"mylib.run": "inert"}
    assert verdicts(tmp_path / "called") == {"mylib.run": "dangerous"}


def test_texts_and_safetensors_are_not_taken_for_pickles(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os, sys\nimport json\n")
    (tmp_path / "b.json").write_text('{"a": [1, 2]}\n')
    (tmp_path / "c.md").write_text("context\nimport os\ncode\n")
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(0x280)
    (tmp_path / "d.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))

    assert scan_path(tmp_path) == []


def test_pickles_of_old_protocols_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"cposix\nsystem\n(Vtouch x\ntR.")

    assert verdicts(tmp_path) == {"posix.system": "dangerous"}


def test_torch_files_inside_another_file_are_found(tmp_path: Path) -> None:
    save_torch_file(tmp_path / "a.pt", {"x": Namespace({})})
    inner = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "__0_0.distcp").write_bytes(inner + inner)

    assert verdicts(tmp_path / "__0_0.distcp") == {"argparse.Namespace": "known"}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_name_of_a_real_pickle_is_missed(tmp_path: Path, protocol: int) -> None:
    value = [{"deep": [np.arange(3)]}, Path, {1, 2}, frozenset(), complex(1, 2)]
    (tmp_path / "a").write_bytes(pickle.dumps(value, protocol))

    found = verdicts(tmp_path)

    assert "numpy.dtype" in found
    assert any(name.endswith("Path") for name in found)
    assert "broken" not in found.values()


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match="no such file"):
        scan_path(tmp_path / "nothing")


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("x",)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_of_numpy_is_looked_into_and_not_called_broken(
    tmp_path: Path, save: Any
) -> None:
    save(tmp_path / "good.npz", a=np.arange(100_000), b=np.zeros((2, 3), "f4"))
    assert scan_path(tmp_path / "good.npz") == []

    hidden = np.array([1, _Runs()], dtype=object)
    save(tmp_path / "bad.npz", a=np.arange(10), b=hidden)

    assert verdicts(tmp_path / "bad.npz")["builtins.print"] == "dangerous"
    assert "broken" not in verdicts(tmp_path / "bad.npz").values()


def test_a_compressed_torch_file_stays_broken(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/w.npy", b"\x93NUMPY")

    assert "broken" in verdicts(tmp_path / "a.pt").values()
