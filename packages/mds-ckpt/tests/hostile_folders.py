"""Hostile folders of the attack list (D1 to D8, D11), each right but for one thing.

What concerns the place that a conversion writes to (D9, D10) and a file that is swapped while it is
read (D12) are tests of their own. Every payload would create the file ``mark``; nothing here runs
one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from attacks import corpus
from ckpt_samples import arrays, model, save
from deepspeed_samples import Sample
from torch_dist_samples import Sample as DistributedSample
from torch_dist_samples import gpt

from mds_ckpt import convert

__all__ = ["hostile_folders"]

_TRACKER = "latest_checkpointed_iteration.txt"
_LATEST = {
    "parent": b"../evil",
    "absolute": b"/etc",
    "empty": b"",
    "digits": b"9" * 10_000_000,
    "newline": b"1\n../../x",
    "nul": b"global_step3\0",
    "negative": b"-1",
}


def hostile_folders(root: Path, mark: Path) -> dict[str, Path]:
    """All of them below ``root``, by name."""
    evil = bytes(corpus.torch_zip(corpus.call("posix", "system", corpus.text(f"touch {mark}"))))
    right = _right_ones(root / "right")
    found: dict[str, Path] = {}

    def add(name: str, kind: str, change: Callable[[Path], None]) -> None:
        found[name] = root / name
        shutil.copytree(right[kind], root / name, symlinks=True)
        change(root / name)

    _distributed(add, evil, corpus.call("posix", "system", corpus.text(f"touch {mark}")))
    _deepspeed(add, evil)
    _index(add)
    _special(add)
    return found


def _right_ones(root: Path) -> dict[str, Path]:
    small = {"layers": 1, "hidden": 4, "heads": 2, "groups": 2, "width": 4, "vocab": 5}
    deepspeed = Sample(**small, tp=2).write(root / "deepspeed")
    convert(deepspeed, root / "megatron", to="megatron")
    record = model("llama", num_layers=1, vocab_size=5)
    save(root / "mds", record, arrays(record))
    convert(root / "mds", root / "hf", to="hf", max_shard_bytes=2000)
    sample = DistributedSample(root / "torch_dist")
    for name, array in gpt().items():
        sample.tensor(name, array)
    sample.stored_object("common_state/shard_0_1", {"iteration": 1})
    sample.write()
    places = ("deepspeed", "megatron", "mds", "hf", "torch_dist")
    return {name: root / name for name in places}


Add = Callable[[str, str, Callable[[Path], None]], None]


def _distributed(add: Add, evil: bytes, pickle: bytes) -> None:
    add("D01_metadata", "torch_dist", lambda f: _put(f / ".metadata", pickle))

    def in_object(folder: Path) -> None:
        # The object is the last record of the file: the attack takes its place and its length.
        sample = DistributedSample(folder / "again")
        for name, array in gpt().items():
            sample.tensor(name, array)
        at = len(sample.data)
        sample.data += evil
        sample.stored_object("common_state/shard_0_1", {})
        sample.places[-1] = sample.places[-1][0], sample.places[-1][1]
        sample.places[-1][1].state.update(offset=at, length=len(evil))
        sample.write()
        for path in (folder / "again").iterdir():
            path.replace(folder / path.name)
        (folder / "again").rmdir()

    add("D02_object", "torch_dist", in_object)


def _deepspeed(add: Add, evil: bytes) -> None:
    step = "global_step3"
    for kind, name in {
        "model": "mp_rank_00_model_states.pt",
        "layer": "layer_02-model_01-model_states.pt",
        "optimizer": "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    }.items():
        add(f"D03_{kind}", "deepspeed", lambda f, name=name: _put(f / step / name, evil))
    for kind, text in _LATEST.items():
        add(f"D04_latest_{kind}", "deepspeed", lambda f, text=text: _put(f / "latest", text))
        add(f"D04_tracker_{kind}", "megatron", lambda f, text=text: _put(f / _TRACKER, text))


def _index(add: Add) -> None:
    def changed(change: Callable[[dict[str, str], Path], None]) -> Callable[[Path], None]:
        def edit(folder: Path) -> None:
            path = folder / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            change(index["weight_map"], folder)
            path.write_text(json.dumps(index))

        return edit

    def point(to: str) -> Callable[[dict[str, str], Path], None]:
        return lambda names, _: names.update({next(iter(names)): to})

    def linked(names: dict[str, str], folder: Path) -> None:
        first = folder / next(iter(names.values()))
        shutil.copy(first, folder.parent / f"{folder.name}.stolen")
        first.unlink()
        first.symlink_to(folder.parent / f"{folder.name}.stolen")

    def missing(names: dict[str, str], folder: Path) -> None:
        (folder / next(iter(names.values()))).unlink()

    def doubled(names: dict[str, str], folder: Path) -> None:
        shutil.copy(folder / next(iter(names.values())), folder / "model-extra.safetensors")
        names["extra"] = "model-extra.safetensors"

    cases = {
        "parent": point("../right/hf/model-00001-of-00002.safetensors"),
        "absolute": point("/etc/passwd"),
        "link": linked,
        "missing": missing,
        "twice": doubled,
        "itself": point("model.safetensors.index.json"),
    }
    for kind, change in cases.items():
        add(f"D05_index_{kind}", "hf", changed(change))


def _special(add: Add) -> None:
    def shard(folder: Path) -> Path:
        path = sorted(folder.glob("*.safetensors"))[0]
        path.unlink()
        return path

    add("D06_link_out", "hf", lambda f: shard(f).symlink_to("/etc/passwd"))
    add("D07_link_loop", "hf", lambda f: (path := shard(f)).symlink_to(path))
    add("D08_pipe", "hf", lambda f: os.mkfifo(shard(f)))
    add("D08_device", "hf", lambda f: shard(f).symlink_to("/dev/zero"))

    def one_for_two(folder: Path) -> None:
        names = [f"layer_02-model_{rank:02d}-model_states.pt" for rank in (0, 1)]
        (folder / "global_step3" / names[1]).unlink()
        os.link(*(folder / "global_step3" / name for name in names))

    add("D11_one_file_for_two_ranks", "deepspeed", one_for_two)


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
