"""The command lines, from outside: what exists, how fast it starts, how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import PROGRAMS, everything

FROZEN = Path(__file__).with_name("commands.txt")


def call(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120, **options
    )


def test_the_commands_and_flags_are_the_frozen_ones() -> None:
    assert everything() == FROZEN.read_text().splitlines()


@pytest.mark.parametrize("module", ["mds_ckpt", "mds_data"])
def test_the_light_packages_load_neither_torch_nor_deepspeed(module: str) -> None:
    code = (
        f"import sys, {module}, {module}.cli; {module}.cli.build_parser();"
        "print({'torch', 'deepspeed', 'transformers'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)

    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("module", [name.split(".")[0] for name in PROGRAMS.values()])
def test_help_works_and_a_wrong_command_is_a_usage_error(module: str) -> None:
    assert call(module, "--help").returncode == 0

    wrong = call(module, "no-such-command")

    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("mds_ckpt", "inspect", "nowhere"),
        ("mds_ckpt", "verify", "nowhere"),
        ("mds_data", "inspect", "nowhere"),
        (
            "mds_data",
            "preprocess",
            "--input",
            "nowhere.jsonl",
            "--output",
            "store",
            "--tokenizer",
            "t.json",
        ),
        ("mds_train", "run", "nowhere.toml"),
        ("mds_train", "resume", "nowhere"),
        ("mds_train", "generate", "nowhere", "--prompt", "x"),
    ],
    ids=" ".join,
)
def test_a_missing_input_is_one_sentence_and_exit_code_3(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    done = call(*command, cwd=tmp_path)

    assert done.returncode == 3, done.stderr
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "something half-written was left"
