"""The rules of forbidden.py find what they are there for, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest
from forbidden import FORBIDDEN_CALLS, LOADERS_OF_CODE, faults, main


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
        "load_checkpoint(weights_only=False)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        *[f"{name}('x')" for name in FORBIDDEN_CALLS],
        *[f"import {name}" for name in sorted(LOADERS_OF_CODE)],
        *[f"from {name} import loads" for name in sorted(LOADERS_OF_CODE)],
    ],
)
def test_a_dangerous_call_is_found(tmp_path: Path, code: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"x = 1\n{code}\n")

    assert [":2: " in fault for fault in faults(file)] == [True]
    assert main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from os import system as run; run('ls')",
        "import yaml as y; y.load(f)",
        "from torch import load; load('x')",
        "import numpy as np; np.load('x', None, True)",
        "import builtins; builtins.eval('1')",
        "import torch.hub as hub; hub.load('x', 'y')",
    ],
)
def test_another_name_does_not_hide_a_dangerous_call(tmp_path: Path, code: str) -> None:
    (tmp_path / "module.py").write_text(f"{code}\n")

    assert len(faults(tmp_path / "module.py")) == 1


@pytest.mark.parametrize(
    ("code", "right", "wrong"),
    [
        ("import torch", "mds_core/a.py", "mds_ckpt/a.py"),
        ("import torch", "mds_data/torch_dataset.py", "mds_data/reader.py"),
        ("from deepspeed import initialize", "mds_train/engines/deepspeed.py", "mds_train/loop.py"),
        ("x = os.environ['HOME']", "mds_train/launch.py", "mds_train/loop.py"),
    ],
)
def test_some_things_are_right_in_one_place_only(
    tmp_path: Path, code: str, right: str, wrong: str
) -> None:
    for name in (right, wrong):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)

    assert faults(tmp_path / right) == []
    assert len(faults(tmp_path / wrong)) == 1


def test_harmless_code_passes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "torch.load('x', weights_only=True)\nmodel.eval()\nnp.load('x')\n"
    )

    assert main([str(tmp_path)]) == 0


def test_an_empty_folder_is_not_a_pass(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1
