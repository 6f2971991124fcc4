"""Every writer with its word: what is there before, and how old and new are told apart."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import api_writers
import numpy as np
import pytest
import run_writers
from power_loss import tree_of
from test_failing_calls import (
    WORKS,
    Work,
    checkpoint,
    ckpt_main,
    converted,
    data_main,
    quietly,
    stores,
    verified,
)

from mds_ckpt import KeySource, commit, open_checkpoint
from mds_ckpt.adapter import with_adapter
from mds_ckpt.encryption.keys import new_identity
from mds_ckpt.families import choose
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_ckpt.protection.signature import new_signing_key
from mds_ckpt.target_folder import remove_remains
from mds_data import open_store

__all__ = ["PROMISES", "Promise", "recipient_of", "write_step"]


@dataclass(frozen=True)
class Promise:
    """A writer and its word."""

    work: Work
    spare: Sequence[str] = ()
    """What may be left out: it tidies up behind the commit, or guards what this run has not."""


def write_step(root: Path, step: int) -> None:
    """A checkpoint of one rank, in the format of ours, that converts."""
    config = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 5,
        "max_position_embeddings": 8,
        "activation": "gelu_tanh",
    }
    model = ModelRecord(family="gpt", config=config, vocab_size=5, tied_embeddings=True)
    chance = np.random.default_rng(step)
    shapes = {rule.canonical.name: rule.canonical.shape for rule in choose(model).rules(model)}
    pieces = [
        (
            name,
            "weight",
            tuple((0, n) for n in shape),
            None,
            chance.normal(size=shape).astype("<f4"),
        )
        for name, shape in shapes.items()
    ]
    partial = commit.stage(root, step)
    parameters, files = merge_rank_files(shapes, [write_rank_file(partial, 0, pieces)])
    manifest = CheckpointManifest(
        producer={"name": "mds-train", "version": "0"},
        step=step,
        counters={"iteration": step},
        model=model,
        parameters=parameters,
        files=files,
    )
    commit.publish(partial, manifest, root=root)


KEY = "{}/key.txt"


def with_key(folder: Path, step: Path) -> None:
    checkpoint(folder, step)
    (folder / "recipient.txt").write_text(new_identity(folder / "key.txt") + "\n")


def with_signing_key(folder: Path, step: Path) -> None:
    pytest.importorskip("model_signing")
    checkpoint(folder, step)
    new_signing_key(folder / "key.pem")


def signed(folder: Path) -> bool:
    return quietly(ckpt_main, "verify", folder / "step-1", "--public-key", folder / "key.pem.pub")


def sealed(folder: Path, step: Path) -> None:
    with_key(folder, step)
    recipients = folder / "recipient.txt"
    words = ("encrypt", folder / "step-1", folder / "sealed", "--recipients-file", recipients)
    assert quietly(ckpt_main, *words)
    new_identity(folder / "new.txt")


def opens(folder: Path, key: str) -> bool:
    return quietly(ckpt_main, "verify", folder / "sealed", "--identity", folder / key)


def recipient_of(path: Path) -> str:
    return path.read_text().split()[3]


def sealed_stores(folder: Path, _: Path) -> None:
    stores(folder, _)
    (folder / "recipient.txt").write_text(new_identity(folder / "key.txt") + "\n")


def store_opens(folder: Path) -> bool:
    return quietly(data_main, "verify", folder / "sealed", "--identity", folder / "key.txt")


def reached(folder: Path) -> int:
    """How many documents the next writer need not add again; all of them are right."""
    with api_writers.begun(str(folder / "new"), resume=True) as writer:
        found = (writer.restored or {}).get("reached", 0)
        if found:
            writer.commit()
    if found:
        store = open_store(folder / "new")
        wanted = api_writers.documents_of_unfinished()
        assert all(np.array_equal(store[n], wanted[n]) for n in range(found))
    return int(found)


def holds_erased(folder: Path) -> bool:
    """Whether a file of the store still has the tokens of the document that is to be erased."""
    document = open_store(folder.parent / "before" / "a")[1].astype("<u2").tobytes()
    files = [path for path in (folder / "a").rglob("*") if path.is_file()]
    return any(document in path.read_bytes() for path in files)


def length_of(store: Path) -> int:
    """Documents of a store whose every byte is right."""
    assert quietly(data_main, "verify", store), store
    return len(open_store(store))


def first_sealed_save(folder: Path, _: Path) -> None:
    new_identity(folder / "key.txt")
    (folder / "run").mkdir()
    api_writers.sealed_save(str(folder / "run"), recipient_of(folder / "key.txt"))


def newest_sealed(folder: Path) -> tuple[int, int]:
    """The newest step, which opens and is whole, as all are; and the one that `latest` names."""
    newest, skipped = commit.find_latest(folder / "run")
    assert newest is not None
    assert not skipped
    step = int(newest.name.removeprefix("step-"))
    found = open_checkpoint(newest, key=KeySource(identity=folder / "key.txt"))
    wanted = np.random.default_rng(step).normal(size=api_writers.SHAPE).astype("<f4")
    assert np.array_equal(found.tensors["w"].numpy(), wanted)
    return step, ["step-1\n", "step-2\n"].index((folder / "run/latest").read_text()) + 1


def older_adapter(folder: Path, step: Path) -> None:
    checkpoint(folder, step)
    api_writers.adapter(str(folder / "step-1"), str(folder / "adapter"), 6.0)


def sum_of_adapter(folder: Path) -> float | None:
    """What the adapter adds to one weight; None where it is refused."""
    base = open_checkpoint(folder / "step-1")
    name = next(name for name in base.tensors if name.endswith("linear_qkv.weight"))
    try:
        tuned = with_adapter(base, folder / "adapter")
        added = tuned.tensors[name].numpy() - base.tensors[name].numpy()
    except (ValueError, FileNotFoundError):
        return None
    return float(np.round(added.mean(), 2))


def target(folder: Path) -> Path:
    """Where a conversion writes, as the next one finds it."""
    remove_remains(folder / "out", keep=folder / "step-1")
    return folder / "out"


def no_target(folder: Path) -> bool:
    return quietly(ckpt_main, "verify", folder / "step-1") and not target(folder).exists()


def new_target(folder: Path) -> bool:
    """Whether the target has every byte that the command wrote."""
    return target(folder).exists() and tree_of(folder / "out") == tree_of(after(folder) / "out")


def after(folder: Path) -> Path:
    """The folder as the command left it when nothing happened."""
    return folder.parent / "after"


def old_target(folder: Path) -> bool:
    before = folder.parent / "before"
    return target(folder).exists() and tree_of(folder / "out") == tree_of(before / "out")


def snapshots(folder: Path) -> int:
    """How many there are; every byte of all is right."""
    assert quietly(ckpt_main, "verify", "--to", folder / "second")
    return len(list((folder / "second" / "snapshots").glob("*.json")))


def absent(name: str) -> Callable[[Path], bool]:
    """The new store is not there, and those that it was to be made from are as they were."""
    return lambda folder: (
        not (folder / name).exists()
        and all(tree_of(folder / n) == tree_of(folder.parent / "before" / n) for n in ("a", "b"))
    )


SETTINGS = f"[train]\nseed = {run_writers.SEED}\n"


def has_settings(run: Path) -> bool:
    """Whether a run's settings are there; a file that holds others is none of ours."""
    if not (path := run / "config.toml").exists():
        return False
    return bool(tomllib.loads(path.read_text())["train"]["seed"] == run_writers.SEED)


def nothing(folder: Path, _: Path) -> None:
    """Begin with an empty folder."""


def run_with_config(folder: Path, step: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text(SETTINGS)
    shutil.copytree(step, folder / "run" / "checkpoints" / "step-3")


def has_run(name: str) -> Callable[[Path], bool]:
    """Whether a run is there from which one can go on."""

    def found(folder: Path) -> bool:
        return has_settings(folder / name) and has_latest(folder / name)

    return found


def has_latest(run: Path) -> bool:
    """Whether `latest` names the step, which is whole if it does."""
    latest = run / "checkpoints" / "latest"
    if not latest.exists():
        return False
    assert latest.read_text() == "step-3\n"
    assert quietly(ckpt_main, "verify", run / "checkpoints" / "step-3")
    return True


def begun_run(name: str) -> Callable[[Path], bool]:
    """Whether no settings are there yet; what `latest` names is whole even then."""

    def found(folder: Path) -> bool:
        has_latest(folder / name)
        return not (folder / name / "config.toml").exists()

    return found


ARRAYS = ("doc_length", "doc_start", "tokens")
ALL_FILES = [f"{array}/{name}" for array in ARRAYS for name in ("c/0", "zarr.json")]
CONVERT, REPLACE, ERASE = WORKS["convert"], WORKS["replace"], WORKS["erase"]
PROMISES = {
    "append": Promise(
        Work(
            module="api_writers",
            argv=["append", "{}/a"],
            prepare=stores,
            is_old=lambda folder: length_of(folder / "a") == 5,
            is_new=lambda folder: length_of(folder / "a") == 10,
        ),
        # The first keeps names that others need, such as a new array's; the others only give files
        # that count already the names that the next writer would give them.
        spare=[
            "sync a",
            *(f"rename a/{name}.r2" for name in ALL_FILES),
            *(f"sync a/{array}{chunks}" for array in ARRAYS for chunks in ("", "/c")),
        ],
    ),
    "sealed-save": Promise(
        Work(
            module="api_writers",
            argv=["sealed-save", "{}/run", "RECIPIENT"],
            prepare=first_sealed_save,
            is_old=lambda folder: newest_sealed(folder) in ((1, 1), (2, 1)),
            is_new=lambda folder: newest_sealed(folder) == (2, 2),
        )
    ),
    "convert": Promise(
        Work(
            module=CONVERT.module,
            argv=CONVERT.argv,
            prepare=checkpoint,
            is_old=no_target,
            is_new=new_target,
        )
    ),
    "convert over another": Promise(
        Work(
            module=REPLACE.module,
            argv=REPLACE.argv,
            prepare=converted,
            is_old=old_target,
            is_new=new_target,
        )
    ),
    "backup": Promise(
        Work(
            module="mds_ckpt.cli",
            argv=WORKS["backup"].argv,
            prepare=WORKS["backup"].prepare,
            is_old=lambda folder: snapshots(folder) == 1,
            is_new=lambda folder: snapshots(folder) == 2,
        )
    ),
    "encrypt a checkpoint": Promise(
        Work(
            module="mds_ckpt.cli",
            argv=[
                *("encrypt", "{}/step-1", "{}/sealed"),
                *("--recipients-file", "{}/recipient.txt"),
            ],
            prepare=with_key,
            is_old=lambda folder: not (folder / "sealed").exists(),
            is_new=lambda folder: opens(folder, "key.txt"),
        )
    ),
    "sign": Promise(
        Work(
            module="mds_ckpt.cli",
            argv=["sign", "{}/step-1", "--private-key", "{}/key.pem"],
            prepare=with_signing_key,
            is_old=lambda folder: not (folder / "step-1.sig").exists(),
            is_new=signed,
        )
    ),
    "rotate a key": Promise(
        Work(
            module="mds_ckpt.cli",
            argv=[
                *("rotate-key", "{}/sealed", "--identity", "{}/key.txt"),
                *("--new-identity", "{}/newer.txt"),
            ],
            prepare=sealed,
            is_old=lambda folder: opens(folder, "key.txt"),
            is_new=lambda folder: opens(folder, "newer.txt"),
        ),
        spare=["sync sealed"],  # the third: old key files are gone for good
    ),
    "restore": Promise(
        Work(
            module="mds_ckpt.cli",
            argv=["restore", "{}/second", "{}/back"],
            prepare=WORKS["backup"].prepare,
            is_old=lambda folder: not (folder / "back").exists(),
            is_new=verified(ckpt_main, "back"),
        )
    ),
    "adapter": Promise(
        Work(
            module="api_writers",
            argv=["adapter", "{}/step-1", "{}/adapter"],
            prepare=older_adapter,
            is_old=lambda folder: sum_of_adapter(folder) in (36.0, None),
            is_new=lambda folder: sum_of_adapter(folder) == 4.0,
        )
    ),
    "unfinished": Promise(
        Work(
            module="api_writers",
            argv=["unfinished", "{}/new"],
            prepare=nothing,
            is_old=lambda folder: reached(folder) == 0,
            is_new=lambda folder: reached(folder) == 8,
        )
    ),
    "merge": Promise(
        Work(
            module="mds_data.cli",
            argv=WORKS["merge"].argv,
            prepare=stores,
            is_old=absent("whole"),
            is_new=verified(data_main, "whole"),
        )
    ),
    "merge into a new folder": Promise(
        Work(
            module="mds_data.cli",
            argv=[word.replace("{}/whole", "{}/new/deep/whole") for word in WORKS["merge"].argv],
            prepare=stores,
            is_old=absent("new/deep/whole"),
            is_new=verified(data_main, "new/deep/whole"),
        )
    ),
    "back a run up": Promise(
        Work(
            module="run_writers",
            argv=["back-up", "{}/run", "{}/second"],
            prepare=run_with_config,
            is_old=begun_run("second"),
            is_new=has_run("second"),
        )
    ),
    "keep a run's settings": Promise(
        Work(
            module="run_writers",
            argv=["settings", "{}/runs/one"],
            prepare=nothing,
            is_old=lambda folder: not (folder / "runs/one/config.toml").exists(),
            is_new=lambda folder: has_settings(folder / "runs/one"),
        )
    ),
    "repack": Promise(
        Work(
            module="mds_data.cli",
            argv=["repack", "{}/a", "--layout", "archive", "--output", "{}/whole"],
            prepare=stores,
            is_old=absent("whole"),
            is_new=verified(data_main, "whole"),
        )
    ),
    "erase": Promise(
        Work(
            module=ERASE.module,
            argv=ERASE.argv,
            prepare=stores,
            is_old=lambda folder: length_of(folder / "a") == 5,
            is_new=lambda folder: ERASE.is_new(folder) and not holds_erased(folder),
        ),
        # The first four: folders in which this run makes nothing. Then each file of the old state
        # is overwritten and loses its name, of which either is enough to hide it from a reader;
        # the overwriting also hides it from who reads the raw disk.
        spare=[
            *("sync a/doc_start/c", "sync a/doc_start", "sync a/tokens", "sync a"),
            *(
                f"{what}{end}"
                for name in ("doc_length/c/0", "doc_length/zarr.json", "tokens/c/0")
                for what, end in ((f"sync a/{name}", ""), (f"rename a/{name}", ".r2"))
            ),
            *("sync a/doc_length", "sync a/doc_length/c", "sync a/tokens/c"),
        ],
    ),
    "encrypt a store": Promise(
        Work(
            module="mds_data.cli",
            argv=[
                *("encrypt", "{}/a", "--output", "{}/sealed"),
                *("--recipients-file", "{}/recipient.txt"),
            ],
            prepare=sealed_stores,
            is_old=lambda folder: not (folder / "sealed").exists(),
            is_new=store_opens,
        )
    ),
}
