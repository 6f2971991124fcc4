"""Backups on a real S3 protocol server of this machine, moto's, through s3fs."""

from __future__ import annotations

import importlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
pytest.importorskip("s3fs", reason="s3fs is not installed")

from mds_ckpt import KeySource, MachineError, RejectedError, commit  # noqa: E402
from mds_ckpt.encryption.keys import new_identity  # noqa: E402
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file  # noqa: E402
from mds_ckpt.manifest import CheckpointManifest, ModelRecord  # noqa: E402
from mds_ckpt.protection.backup import (  # noqa: E402
    back_up,
    check_backups,
    drill,
    prune_backups,
    restore,
    snapshots,
)
from mds_ckpt.protection.places import RemotePlace  # noqa: E402
from mds_ckpt.protection.retention import newest_steps  # noqa: E402


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket, reached by what the environment says, as a user would."""
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"{endpoint}/backups", data=b"", method="PUT")
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        yield "s3://backups"
    running.stop()


@pytest.fixture
def url(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{abs(hash(request.node.name))}"


def save(root: Path, step: int, *, size: int = 3_000_000) -> Path:
    array = np.random.default_rng(step).standard_normal(size).astype(np.float32)
    partial = commit.stage(root, step)
    written = write_rank_file(partial, 0, [("w", "weight", ((0, size),), None, array)])
    parameters, files = merge_rank_files({"w": (size,)}, [written])
    manifest = CheckpointManifest(
        producer={"name": "test", "version": "0"},
        step=step,
        counters={},
        model=ModelRecord(family="gpt", config={}, vocab_size=5, tied_embeddings=True),
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=root)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("encrypted", [False, True])
def test_checkpoints_go_to_a_bucket_and_come_back(
    url: str, tmp_path: Path, *, encrypted: bool
) -> None:
    """Files of 12 MB, so that an upload has parts."""
    key = None
    if encrypted:
        new_identity(tmp_path / "key.txt")
        key = KeySource(identity=tmp_path / "key.txt")
    for step in (1, 2):
        back_up(save(tmp_path / "run", step), url, key=key)

    assert back_up(tmp_path / "run" / "step-2", url, key=key).copied == 0
    restore(url, tmp_path / "back", name="step-2", key=key)
    assert contents(tmp_path / "back") == contents(tmp_path / "run" / "step-2")
    assert drill(url, name="step-1", key=key)[1] == []
    assert prune_backups(url, keep=newest_steps(1), key=key) == ["step-1"]
    assert [each.name for each in snapshots(url, key=key)] == ["step-2"]
    assert check_backups(url, key=key)[2] == []


@pytest.mark.timeout(300)
def test_an_upload_that_breaks_off_leaves_no_object(url: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "run", 1)
    path = next(folder.glob("rank-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # found at the last byte, when parts are uploaded already
    path.write_bytes(data)

    with pytest.raises(RejectedError, match="damaged"):
        back_up(folder, url)

    place = RemotePlace(url)
    sizes = [place.size(name) for name in place.names("objects")]
    assert all(size is not None and size < 10_000_000 for size in sizes)
    assert place.names("snapshots") == []


def test_a_service_that_is_not_there_is_one_sentence(bucket: str, url: str) -> None:
    """Also where its driver's errors are none of Python's own."""
    s3fs = importlib.import_module("s3fs")
    place = RemotePlace(url)
    place._files = s3fs.S3FileSystem(
        endpoint_url="http://127.0.0.1:9", config_kwargs={"retries": {"max_attempts": 1}}
    )

    with pytest.raises(MachineError, match="the service can't be used"):
        place.size("backup.json")
