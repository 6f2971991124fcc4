"""What hostile files do to those who open them: ours, torch, DeepSpeed, safetensors, transformers.

    python packages/mds-ckpt/benchmarks/attack_table.py

Three tables: torch files (pickles, archives, bombs, what is no file), headers of safetensors files,
and folders that lie about their files.

DANGER: this runs the payloads of the attack corpus in torch's unpickler, on purpose. They create a
file in a temporary folder; run it where that is all they could do. Each file is opened by a process
of its own, with 10 seconds and 6 GiB of address space. Others than mds-ckpt are measured where they
are installed, and on folders of the kind that they read.
"""

from __future__ import annotations

import importlib
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

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "attacks"), str(TESTS)]
import corpus  # noqa: E402
import hostile_folders  # noqa: E402
import safetensors_attacks  # noqa: E402

SECONDS, GIB = 10, 6
COLUMNS = ("refused", "opened", "ran code", "hung", "256 MB and more", "crashed")
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


def folder_opens(path: Path) -> None:
    """All that mds-ckpt reads of a checkpoint's folder."""
    from mds_ckpt import open_checkpoint

    for tensors in open_checkpoint(path).states.values():
        for tensor in tensors.values():
            tensor.numpy()


def header_opens(path: Path) -> None:
    from mds_ckpt.files.safetensors_file import SafetensorsFile

    _ = SafetensorsFile(path).header


def safetensors_reads(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            file.get_tensor(name)


def transformers_loads(path: Path) -> None:
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(path)


def dcp_loads(path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, f"{path}.pt")


def folder_to_fp32(path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    get_fp32_state_dict_from_zero_checkpoint(str(path))


def actions() -> dict[str, Action]:
    """Who opens torch files: those that are installed, imported once here."""
    found: dict[str, Action] = {"mds-ckpt": mds_ckpt_opens}
    if _imported("torch"):
        found["torch.load, weights_only"] = lambda path: torch_loads(path, weights_only=True)
        found["torch.load, not weights_only"] = lambda path: torch_loads(path, weights_only=False)
    if _imported("deepspeed.utils.zero_to_fp32"):
        found["DeepSpeed's zero_to_fp32"] = zero_to_fp32_opens
    if _imported("picklescan.scanner"):
        found["picklescan (opened = nothing found)"] = picklescan_finds
    return found


def on_headers() -> dict[str, Action]:
    """Who opens safetensors files."""
    found: dict[str, Action] = {"mds-ckpt": header_opens}
    if _imported("safetensors"):
        found["safetensors"] = safetensors_reads
    return found


def on_folders() -> dict[str, Action]:
    """Who opens folders, each those of its own format."""
    found: dict[str, Action] = {"mds-ckpt": folder_opens}
    if _imported("torch.distributed.checkpoint.format_utils"):
        found["torch's DCP (D01, D02)"] = dcp_loads
    if _imported("deepspeed.utils.zero_to_fp32"):
        found["DeepSpeed's zero_to_fp32 (D03, D04)"] = folder_to_fp32
    if _imported("transformers.models.llama.modeling_llama"):
        found["transformers (D05 to D08)"] = transformers_loads
    return found


def _imported(module: str) -> bool:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    importlib.import_module(module)
    return True


def torch_files(folder: Path, mark: Path) -> list[Path]:
    """P1 to P25, B1 to B18, and what is no regular file."""
    for stem, data in {**corpus.pickles(mark), **corpus.bombs()}.items():
        (folder / stem).write_bytes(data)
    corpus.special_files(folder / "special")
    return sorted([*(p for p in folder.iterdir() if p.is_file()), *(folder / "special").iterdir()])


def headers(folder: Path, mark: Path) -> list[Path]:
    """S: everything that a header can lie about."""
    del mark
    return safetensors_attacks.write_all(folder)


def folders(folder: Path, mark: Path) -> list[Path]:
    """D1 to D8 and D11."""
    return list(hostile_folders.hostile_folders(folder, mark).values())


def meant(name: str, path: Path) -> bool:
    """Whether a contestant reads folders of this kind; those that name none read all."""
    known = re.findall(r"D\d\d", name)
    if not known:
        return True
    return known[0] <= path.name[:3] <= known[-1] and not path.name.startswith("D04_tracker")


def main() -> None:
    os.environ["BROWSER"] = "true"  # one payload imports a module that opens one
    os.environ["HF_HUB_OFFLINE"] = "1"
    sets = {
        "torch files": (torch_files, actions()),
        "safetensors headers": (headers, on_headers()),
        "folders": (folders, on_folders()),
    }
    for title, (build, contestants) in sets.items():
        print("| " + " | ".join((title, *COLUMNS, "which ran code, hung, grew or crashed")) + " |")
        print("|---" * (len(COLUMNS) + 2) + "|")
        for name, action in contestants.items():
            print(row(name, action, build), flush=True)
        print()


def row(name: str, action: Action, build: Callable[[Path, Path], list[Path]]) -> str:
    """What became of one contestant, as a line of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        mark = Path(scratch) / "MARK"
        paths = [path for path in build(Path(scratch), mark) if meant(name, path)]
        words = {path.name: attempt(action, path, mark) for path in paths}
        os.chdir("/")
    counts = Counter(words.values())
    bad = [stem.partition("_")[0] for stem, word in words.items() if word in COLUMNS[2:]]
    return "| " + " | ".join([name, *(str(counts[c]) for c in COLUMNS), " ".join(bad)]) + " |"


if __name__ == "__main__":
    main()
