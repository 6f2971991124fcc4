"""Run in a child process: open every attack through every door, under an audit hook and limits.

Arguments: a folder with the attacks, a file for the report. The report has one JSON object a line:
the attack, the door, what came of it, seconds, and what the hook saw.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import resource
import sys
import time
from pathlib import Path

import google_crc32c
import ml_dtypes  # noqa: F401 - all that readers need is imported before the hook
import numpy as np  # noqa: F401

import mds_ckpt.checkpoint
import mds_ckpt.files.safetensors_file
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.pickles.archive import open_torch_file, read_pickle_file
from mds_ckpt.scan import scan_path

sys.path.insert(0, str(Path(__file__).parents[1]))
from torch_dist_samples import Object, Sample, tensor_entry

DANGEROUS = {
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "exec",
    "compile", "marshal.loads", "code.__new__", "os.fork", "ctypes.dlopen", "socket.connect",
}  # fmt: skip
seen: list[str] = []
watching: list[bool] = []


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if watching and (event in DANGEROUS or event == "import"):
        seen.append(f"{event} {str(arguments)[:80]}")


def layouts(file: Path, folder: Path) -> dict[str, Path]:
    """The attack as each kind of file of a checkpoint folder."""
    places = {
        "pipeline": "global_step1/mp_rank_00_model_states.pt",
        "layer": "global_step1/layer_02-model_00-model_states.pt",
        "zero": "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "legacy": "iter_0000001/mp_rank_00/model_optim_rng.pt",
        "universal": "global_step1_universal/zero/embed.weight/fp32.pt",
    }
    made = {}
    for door, name in places.items():
        target = folder / f"{file.name}.{door}" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to(file) if not file.is_file() else target.hardlink_to(file)
        (folder / f"{file.name}.{door}" / "latest").write_text("global_step1")
        made[door] = folder / f"{file.name}.{door}"
    return made


def distributed(file: Path, folder: Path) -> dict[str, Path]:
    """The attack as ``.metadata`` of a distributed checkpoint, as its object, and as its tensor."""
    made = {}
    entries = {"dcp_metadata": None, "dcp_object": Object("BytesStorageMetadata")}
    entries["dcp_tensor"] = tensor_entry((4,), [((0,), (4,))])
    for door, entry in entries.items():
        made[door] = folder / f"{file.name}.{door}"
        sample = Sample(made[door])
        name = "common_state/shard_0_1" if door == "dcp_object" else "w"
        target = made[door] / (".metadata" if entry is None else "__0_0.distcp")
        target.symlink_to(file) if not file.is_file() else target.hardlink_to(file)
        if entry is not None:
            length = file.stat().st_size if file.is_file() else 64
            sample.described[name] = entry
            sample.place(name, (0,) if door == "dcp_tensor" else None, 0, length)
            (made[door] / ".metadata").write_bytes(sample.metadata())
    return made


def read_first(path: Path) -> None:
    """Open a checkpoint and read a tensor of it."""
    next(iter(open_checkpoint(path).tensors.values())).numpy()


def try_door(name: str, door: str, action: object, path: Path) -> dict[str, object]:
    seen.clear()
    # Processor time: the wall's would count the neighbours on a busy machine.
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, detail = "opened", ""
    watching.append(True)
    try:
        action(path)  # type: ignore[operator]
    except RejectedError as error:
        outcome, detail = "rejected", str(error)
    except BaseException as error:  # noqa: BLE001 - anything else is what this is looking for
        outcome, detail = "crashed", f"{type(error).__name__}: {error}"
    watching.clear()
    return {
        "attack": name,
        "door": door,
        "outcome": outcome,
        "detail": detail[:2000],
        "seconds": time.process_time() - begin,
        "grown_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "seen": list(seen),
    }


def main() -> None:
    folder, report = Path(sys.argv[1]), Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for module in pkgutil.walk_packages(mds_ckpt.__path__, "mds_ckpt."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    google_crc32c.value(b"")
    sys.addaudithook(hook)
    with report.open("w") as stream:
        for file in sorted((folder / "files").iterdir()):
            doors = [
                ("torch file", open_torch_file, file),
                ("pickle", read_pickle_file, file),
                ("scan", scan_path, file),
                ("checkpoint", open_checkpoint, file),
            ]
            # Its million operations take half a second through each door.
            places = {} if file.name.startswith("B18") else layouts(file, folder / "folders")
            for door, path in places.items():
                doors.append((door, open_checkpoint, path))
            for door, path in distributed(file, folder / "distributed").items():
                action = read_first if door == "dcp_tensor" else open_checkpoint
                doors.append((door, action, path))
            for door, action, path in doors:
                stream.write(json.dumps(try_door(file.name, door, action, path)) + "\n")
                stream.flush()


if __name__ == "__main__":
    main()
