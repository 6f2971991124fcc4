"""A backup brings back the very bytes, whatever died in between, or says that it can't."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import fsspec
import pytest
from ckpt_disks import (
    BreakingDisk,
    Killed,
    RecordingDisk,
    materialise,
    refused,
    states_after_power_loss,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_ckpt import CheckpointError, KeySource, LockedError, RejectedError, SealedError, verify
from mds_ckpt.cli import main
from mds_ckpt.encryption import keys
from mds_ckpt.files.lock import lock
from mds_ckpt.protection.backup import (
    back_up,
    check_backups,
    drill,
    prune_backups,
    restore,
    snapshots,
)
from mds_ckpt.protection.encrypt import encrypt_checkpoint
from mds_ckpt.protection.retention import newest_steps

MODEL = samples.model("gpt2", num_layers=1, hidden_size=4, num_attention_heads=2, vocab_size=5)
WEIGHTS = {seed: dict(list(samples.arrays(MODEL, seed=seed).items())[:3]) for seed in range(5)}


def save(root: Path, step: int, *, seed: int | None = None) -> Path:
    return samples.save(root, MODEL, WEIGHTS[step if seed is None else seed], step=step)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return save(tmp_path / "run", 1)


@pytest.fixture(params=["folder", "file-url", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "url":
        url = f"memory://{tmp_path.name}/backups"
        yield url
        files, root = fsspec.core.url_to_fs(url)
        if files.exists(root):
            files.rm(root, recursive=True)
    else:
        yield f"{'file://' if request.param == 'file-url' else ''}{tmp_path / 'backups'}"


@pytest.fixture(params=["plain", "encrypted"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> KeySource | None:
    if request.param == "plain":
        return None
    keys.new_identity(tmp_path / "key.txt")
    return KeySource(identity=tmp_path / "key.txt")


def tree(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_the_very_bytes_come_back(step: Path, place: str, key: Any, tmp_path: Path) -> None:
    found = back_up(step, place, key=key)

    restored = restore(place, tmp_path / "back", key=key, expect=found.snapshot.digest)

    assert tree(tmp_path / "back") == tree(step)
    assert restored == found.snapshot
    assert not verify(tmp_path / "back").problems
    assert drill(place, key=key) == (restored, [])


def test_what_is_there_is_not_copied_again(step: Path, place: str, key: Any) -> None:
    first = back_up(step, place, key=key)
    again = back_up(step, place, key=key)
    # The same numbers at a later step: only the manifest is new.
    later = back_up(save(step.parent, 2, seed=1), place, key=key)

    assert first.copied == len(first.snapshot.files)
    assert (again.copied, again.nbytes) == (0, 0)
    assert later.copied == 1
    assert [each.name for each in snapshots(place, key=key)] == ["step-1", "step-2"]


def test_a_token_store_and_an_encrypted_checkpoint_are_backed_up_as_they_are(
    step: Path, tmp_path: Path
) -> None:
    recipient = keys.new_identity(tmp_path / "key.txt")
    encrypt_checkpoint(step, tmp_path / "sealed", recipients=[recipient])
    store = tmp_path / "store"
    (store / "segments/0000/c").mkdir(parents=True)
    for folder, inner in ((store, ["segments/0000"]), (store / "segments/0000", [])):
        _write_store(folder, inner)

    for folder in (tmp_path / "sealed", store):
        back_up(folder, tmp_path / "backups")
        restore(tmp_path / "backups", tmp_path / f"back-{folder.name}", name=folder.name)
        assert tree(tmp_path / f"back-{folder.name}") == tree(folder)
        assert drill(tmp_path / "backups", name=folder.name)[1] == []


def _write_store(folder: Path, segments: list[str]) -> None:
    import hashlib
    import json

    data = folder.name.encode() * 9
    (folder / "c").mkdir(exist_ok=True)
    (folder / "c" / "0").write_bytes(data)
    files = {"c/0": {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    members = {"format": "mds-store", "files": files, "segments": [{"path": s} for s in segments]}
    (folder / "manifest.json").write_text(json.dumps(members))


def test_every_flipped_bit_is_found(step: Path, tmp_path: Path, key: Any, capsys: Any) -> None:
    place = tmp_path / "backups"
    back_up(step, place, key=key)
    words = [] if key is None else ["--identity", str(key.identity)]
    for path in sorted([*(place / "objects").rglob("*"), *(place / "snapshots").iterdir()]):
        if path.is_dir():
            continue
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(good) // 2] ^= 1
        path.write_bytes(bad)
        assert check_backups(place, key=key)[2], path
        assert main(["restore", str(place), "--drill", *words]) in (1, 3), path
        with pytest.raises(CheckpointError):
            restore(place, tmp_path / "back", key=key)
        assert not (tmp_path / "back").exists()
        path.write_bytes(good)
    assert check_backups(place, key=key)[2] == []
    capsys.readouterr()


def test_a_missing_object_is_found_and_copied_again(step: Path, tmp_path: Path) -> None:
    back_up(step, tmp_path / "backups")
    path = max((tmp_path / "backups" / "objects").rglob("*/*"), key=lambda p: p.stat().st_size)
    path.unlink()

    assert len(check_backups(tmp_path / "backups")[2]) == 1
    assert back_up(step, tmp_path / "backups").copied == 1
    assert check_backups(tmp_path / "backups")[2] == []


def test_a_damaged_original_is_no_backup(step: Path, tmp_path: Path) -> None:
    path = next(step.glob("rank-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(RejectedError, match="damaged"):
        back_up(step, tmp_path / "backups")
    assert not list((tmp_path / "backups").glob("snapshots/*"))


def test_encrypted_backups_say_nothing(step: Path, tmp_path: Path) -> None:
    recipient = keys.new_identity(tmp_path / "key.txt")
    key = KeySource(identity=tmp_path / "key.txt")
    back_up(step, tmp_path / "backups", recipients=[recipient], key=key)

    held = b"".join(tree(tmp_path / "backups").values())
    names = " ".join(tree(tmp_path / "backups"))

    digests = [
        record.sha256 for record in snapshots(tmp_path / "backups", key=key)[0].files.values()
    ]
    for array in WEIGHTS[1].values():
        assert array.tobytes() not in held
    for word in ("embedding", "rank-0", *digests):
        assert word.encode() not in held
        assert word not in names
    with pytest.raises(SealedError, match="no key was given"):
        restore(tmp_path / "backups", tmp_path / "back")
    keys.new_identity(tmp_path / "other.txt")
    with pytest.raises(SealedError, match="does not open"):
        restore(
            tmp_path / "backups", tmp_path / "back", key=KeySource(identity=tmp_path / "other.txt")
        )


def test_pruning_keeps_the_newest_steps_and_what_they_need(
    tmp_path: Path, place: str, key: Any
) -> None:
    for number in (1, 2, 3, 4):
        back_up(save(tmp_path / "run", number, seed=number % 2), place, key=key)

    gone = prune_backups(place, keep=newest_steps(1, keep_every=2), key=key)

    assert gone == ["step-1", "step-3"]
    assert [each.name for each in snapshots(place, key=key)] == ["step-2", "step-4"]
    assert check_backups(place, key=key)[2] == []
    assert back_up(tmp_path / "run" / "step-1", place, key=key).copied > 1  # its ranks went, too


@pytest.mark.parametrize("make", [Killed, refused])
def test_breaking_at_any_operation_leaves_the_earlier_backup(tmp_path: Path, make: Any) -> None:
    one, two = save(tmp_path / "run", 1), save(tmp_path / "run", 2)
    back_up(one, tmp_path / "before")
    seen = set()
    for at in count():
        place = shutil.copytree(tmp_path / "before", tmp_path / f"at-{at}")
        try:
            back_up(two, place, operations=BreakingDisk(at=at, make=make))
            died = False
        except (Killed, OSError):
            died = True
        names = tuple(each.name for each in snapshots(place))
        seen.add(names)
        assert check_backups(place)[2] == []
        restore(place, tmp_path / f"one-{at}", name="step-1")
        assert tree(tmp_path / f"one-{at}") == tree(one)
        back_up(two, place)  # what the dead one left is no obstacle
        assert not [path for path in tree(place) if ".partial-" in path]
        if not died:
            break
    assert seen == {("step-1",), ("step-1", "step-2")}
    assert at > 10


def test_power_loss_leaves_no_snapshot_whose_objects_are_missing(tmp_path: Path) -> None:
    step = save(tmp_path / "run", 1)
    place = tmp_path / "backups"
    place.mkdir()
    before = tmp_path / "before"
    before.mkdir()
    disk = RecordingDisk(place)

    back_up(step, place, operations=disk)

    for done, state in states_after_power_loss(before, disk):
        after = materialise(state, tmp_path / "after")
        held = list(after.glob("snapshots/*.json"))
        if held:
            assert check_backups(after)[2] == [], done
        assert held or done < len(disk.log)
        shutil.rmtree(after)


def test_two_writers_one_of_whom_is_told(step: Path, tmp_path: Path) -> None:
    back_up(step, tmp_path / "backups")

    with lock(tmp_path / "backups"), pytest.raises(LockedError, match="another process"):
        back_up(step, tmp_path / "backups")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["backup", "nothing", "--to", "backups"], 3, "no such file"),
        (["backup", "run", "--to", "run"], 2, "itself lies"),
        (["backup", "run", "--to", "strange://x"], 3, "fsspec knows"),
        (["restore", "backups", "back"], 3, "there are no backups"),
        (["restore", "backups"], 2, "give DST"),
        (["verify"], 2, "takes a PATH"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    step: Path, monkeypatch: Any, capsys: Any, words: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(step.parent.parent)

    assert main(words) == code
    assert said in capsys.readouterr().err


def test_a_hostile_snapshot_writes_nothing_outside(step: Path, tmp_path: Path) -> None:
    back_up(step, tmp_path / "backups")
    (path,) = (tmp_path / "backups" / "snapshots").iterdir()
    path.write_text(path.read_text().replace('"rank-00000', '"../rank-00000'))

    with pytest.raises(RejectedError, match=r"path separator|is empty or a folder"):
        restore(tmp_path / "backups", tmp_path / "back")


JUNK = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.sampled_from(["../x", "0" * 64, "age", "mds-store"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["kind", "file", "size"]), st.integers(), max_size=2),
)


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A place with plain backups, one with encrypted ones, and their key."""
    folder = tmp_path_factory.mktemp("forged")
    keys.new_identity(folder / "key.txt")
    key = KeySource(identity=folder / "key.txt")
    step = save(folder / "run", 1)
    back_up(step, folder / "plain")
    back_up(step, folder / "sealed", key=key)
    return folder, key


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_forged_heads_and_snapshots_are_refused_by_our_own_errors(forged: Any, data: Any) -> None:
    folder, key = forged
    sealed = data.draw(st.booleans())
    place = folder / ("sealed" if sealed else "plain")
    path = place / "backup.json"
    if not sealed and data.draw(st.booleans()):
        (path,) = (place / "snapshots").iterdir()
    good = path.read_bytes()
    members = json.loads(good)
    at = members
    while True:
        name = data.draw(st.sampled_from(sorted(at)))
        inner = at[name]
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            break
        at = inner
    at[name] = data.draw(JUNK)
    path.write_text(json.dumps(members))

    with suppress(CheckpointError):
        check_backups(place, key=key if sealed else None)

    path.write_bytes(good)


def test_without_fsspec_the_extra_is_named(step: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)

    assert main(["backup", str(step), "--to", "memory://x"]) == 4
    assert "mds-ckpt[remote]" in capsys.readouterr().err
