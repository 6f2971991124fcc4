"""What hostile files do to those who open them: mds-ckpt, torch.load, zero_to_fp32, picklescan.

    python packages/mds-ckpt/benchmarks/attack_table.py

DANGER: this runs the payloads of the attack corpus in torch's unpickler, on purpose. They create a
file in a temporary folder; run it where that is all they could do. Each file is opened by a process
of its own, with 10 seconds and 6 GiB of address space. torch, deepspeed and picklescan are measured
where they are installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "attacks"))
import corpus

SECONDS, GIB = 10, 6
Action = Callable[[Path], Any]


def mds_ckpt_opens(path: Path) -> None:
    from mds_ckpt.pickles.archive import open_torch_file

    file = open_torch_file(path)
    for tensor in _tensors(file.value):
        file.read(tensor)


def _tensors(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else ()
    return [item for item in items if hasattr(item, "numel")]


def torch_loads(path: Path, *, weights_only: bool) -> None:
    import torch

    torch.load(path, weights_only=weights_only, map_location="cpu")


def zero_to_fp32_opens(path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    root = Path(f"{path}.folder")
    step = root / "global_step1"
    step.mkdir(parents=True)
    (root / "latest").write_text("global_step1")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        if path.is_file():
            os.link(path, step / name)
        else:
            (step / name).symlink_to(path)
    get_fp32_state_dict_from_zero_checkpoint(str(root))


def picklescan_finds(path: Path) -> None:
    from picklescan.scanner import scan_file_path

    result = scan_file_path(str(path))
    if result.infected_files or result.scan_err or result.issues_count:
        raise ValueError("flagged")


def attempt(action: Action, path: Path, mark: Path) -> str:
    """What came of one file, as a word."""
    mark.unlink(missing_ok=True)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(action, path, writing)
    os.close(writing)
    start = time.monotonic()
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if mark.exists():
        return "ran code"
    if os.WIFSIGNALED(status):
        is_late = os.WTERMSIG(status) == signal.SIGALRM
        return "hung" if is_late and time.monotonic() - start > SECONDS - 1 else "crashed"
    word, _, grown = text.partition(" ")
    return "256 MB and more" if float(grown or 0) > 256 else word or "crashed"


def _be_the_child(action: Action, path: Path, writing: int) -> None:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (GIB << 30, GIB << 30))
    signal.alarm(SECONDS)
    before = _peak()
    word = "opened"
    try:
        action(path)
    except BaseException:  # noqa: BLE001 - whatever it says, it did not open the file
        word = "refused"
    os.write(writing, f"{word} {_peak() - before:.0f}".encode())
    os._exit(0)


def _peak() -> float:
    text = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+)", text)
    return int(match[1]) / 1024 if match else 0.0


def actions() -> dict[str, Action]:
    """Those that are installed, imported once here."""
    found: dict[str, Action] = {"mds-ckpt": mds_ckpt_opens}
    if importlib.util.find_spec("torch"):
        import torch  # noqa: F401

        found["torch.load, weights_only"] = lambda path: torch_loads(path, weights_only=True)
        found["torch.load, not weights_only"] = lambda path: torch_loads(path, weights_only=False)
    if importlib.util.find_spec("deepspeed"):
        import deepspeed.utils.zero_to_fp32  # noqa: F401

        found["DeepSpeed's zero_to_fp32"] = zero_to_fp32_opens
    if importlib.util.find_spec("picklescan"):
        import picklescan.scanner  # noqa: F401

        found["picklescan (opened = nothing found)"] = picklescan_finds
    return found


def main() -> None:
    os.environ["BROWSER"] = "true"  # one payload imports a module that opens one
    columns = ("refused", "opened", "ran code", "hung", "256 MB and more", "crashed")
    print("| " + " | ".join(("", *columns, "which ran code, hung, grew or crashed")) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for name, action in actions().items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            mark = Path(folder) / "MARK"
            files = {**corpus.pickles(mark), **corpus.bombs()}
            paths = []
            for stem, data in files.items():
                (Path(folder) / stem).write_bytes(data)
                paths.append(Path(folder) / stem)
            paths += corpus.special_files(Path(folder) / "special").values()
            words = {path.name: attempt(action, path, mark) for path in sorted(paths)}
            os.chdir("/")
        counts = Counter(words.values())
        bad = [stem.partition("_")[0] for stem, word in words.items() if word in columns[2:]]
        row = [name, *(str(counts[column]) for column in columns), " ".join(bad)]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
