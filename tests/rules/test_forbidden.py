"""The rules of forbidden.py find what they are there for, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest
from forbidden import faults, main


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "import pickle",
        "from pickle import loads",
        "pickle.loads(b'')",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "subprocess.run('ls', shell=True)",
        "np.load('x', allow_pickle=True)",
        "yaml.load(f)",
    ],
)
def test_a_dangerous_call_is_found(tmp_path: Path, code: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"x = 1\n{code}\n")

    assert [":2: " in fault for fault in faults(file)] == [True]
    assert main([str(tmp_path)]) == 1


@pytest.mark.parametrize("code", ["import torch", "from deepspeed import initialize"])
def test_torch_is_found_only_in_the_light_packages(tmp_path: Path, code: str) -> None:
    for package in ("mds_ckpt", "mds_core"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text(code)

    assert len(faults(tmp_path / "mds_ckpt" / "a.py")) == 1
    assert faults(tmp_path / "mds_core" / "a.py") == []


def test_harmless_code_passes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "torch.load('x', weights_only=True)\nmodel.eval()\nnp.load('x')\n"
    )

    assert main([str(tmp_path)]) == 0


def test_an_empty_folder_is_not_a_pass(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1
