"""What hostile files do to those who open them: ours, torch, DCP, DeepSpeed, safetensors, zarr.

    python benchmarks/hostile_files.py

DANGER: this runs the payloads of the attack corpus in torch's unpickler, on purpose. They create a
file in a temporary folder; run it where that is all they could do. Each file is opened by a process
of its own, with 10 seconds and 6 GiB of address space; "opened" means that nothing was noticed.
The files are those that the tests build; whoever is not installed is left out. It ends with 1 if
ours opened a file, ran its code, hung, grew or crashed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
for folder in ("packages/mds-ckpt/benchmarks", "packages/mds-ckpt/tests", "tests/reliability"):
    sys.path.insert(0, str(ROOT / folder))
import attack_table  # noqa: E402
import corpus  # noqa: E402
import numpy as np  # noqa: E402
import safetensors_attacks  # noqa: E402
import test_hostile_data as hostile_stores  # noqa: E402

import mds_data  # noqa: E402

COLUMNS = ("refused", "opened", "ran code", "hung", "256 MB and more", "crashed")


def dcp_reads(path: Path) -> None:
    """The file as the description of a distributed checkpoint of torch."""
    from torch.distributed.checkpoint import FileSystemReader

    folder = Path(f"{path}.dcp")
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").symlink_to(path)
    FileSystemReader(str(folder)).read_metadata()


def mds_ckpt_reads(path: Path) -> None:
    from mds_ckpt.files.safetensors_file import SafetensorsFile

    _ = SafetensorsFile(path).header


def safetensors_reads(path: Path) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            file.get_tensor(name)


def mds_data_verifies(path: Path) -> None:
    from mds_data.cli import main

    if main(["verify", str(path)]) != 0:
        raise ValueError("refused")


def zarr_reads(path: Path) -> None:
    import zarr

    group = zarr.open_group(str(path), mode="r")
    for _, array in group.arrays():
        _ = array[:]


def torch_files(folder: Path) -> list[Path]:
    """Pickles, zip directories, bombs, and what is no file at all."""
    for stem, data in {**corpus.pickles(folder / "MARK"), **corpus.bombs()}.items():
        (folder / stem).write_bytes(data)
    corpus.special_files(folder / "special")
    return sorted([*(p for p in folder.iterdir() if p.is_file()), *(folder / "special").iterdir()])


def safetensors_files(folder: Path) -> list[Path]:
    """Headers that lie."""
    return [
        _written(folder / f"{number:02}.safetensors", build())
        for number, (_, build) in enumerate(safetensors_attacks.REFUSED.values())
    ]


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def stores(folder: Path) -> list[Path]:
    """Zarr groups whose sizes and digests are right, and whose content lies."""
    found = []
    for number, (layout, change) in enumerate(hostile_stores.STORES.values()):
        place = folder / f"{number:02}"
        place.mkdir()
        os.chdir(place)
        _write_store(layout)
        change(layout)
        hostile_stores.reseal(layout)
        found.append(place / layout)
    return found


def _write_store(layout: str) -> None:
    chance = np.random.default_rng(1)
    with mds_data.StoreWriter(
        layout,
        layout=layout,
        columns={"kind": "uint64"},
        sentences=True,
        **hostile_stores.SETTINGS,
    ) as writer:
        for _ in range(30):
            ids = chance.integers(0, 1000, 40)
            writer.add(ids, sentence_lengths=[15, 25], columns={"kind": 7})
        writer.commit()


def table(title: str, actions: Mapping[str, attack_table.Action], files_in: object) -> bool:
    """Print what became of every file; whether the first contestant, ours, refused them all."""
    print(f"\n{title}\n\n| " + " | ".join(("", *COLUMNS)) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    verdicts = []
    for name, action in actions.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            files = files_in(Path(folder))
            mark = Path(folder) / "MARK"
            counts = Counter(attack_table.attempt(action, path, mark) for path in files)
            os.chdir("/")
        print("| " + " | ".join([name, *(str(counts[c]) for c in COLUMNS)]) + " |", flush=True)
        verdicts.append(counts["refused"] == len(files))
    return verdicts[0]


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def main() -> int:
    os.environ["BROWSER"] = "true"  # one payload imports a module that opens one
    pickled = attack_table.actions()
    if installed("torch"):
        pickled["torch's DCP"] = dcp_reads
    strict = {"mds-ckpt": mds_ckpt_reads}
    if installed("safetensors"):
        strict["safetensors"] = safetensors_reads
    arrays = {"mds-data verify": mds_data_verifies, "zarr-python": zarr_reads}
    ours = [
        table("Pickles, archives, bombs", pickled, torch_files),
        table("safetensors headers", strict, safetensors_files),
        table("Zarr stores", arrays, stores),
    ]
    return 0 if all(ours) else 1


if __name__ == "__main__":
    sys.exit(main())
