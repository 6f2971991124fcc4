"""A token store on a real S3 protocol server of this machine: moto's, through obstore and s3fs."""

from __future__ import annotations

import pickle
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

moto_server = pytest.importorskip("moto.server", reason="moto is not installed")
pytest.importorskip("obstore")

from mds_data import DamagedError, GPTDataset, StoreError, open_store, write_store  # noqa: E402
from mds_data.cli import main  # noqa: E402
from mds_data.store.append import append_documents  # noqa: E402
from mds_data.store.download import download_store  # noqa: E402
from mds_data.store.erase import erase_documents  # noqa: E402
from mds_data.store.remote import RemoteOptions, open_remote_store  # noqa: E402
from mds_data.store.remote_files import RemoteError, RetryPolicy  # noqa: E402
from mds_data.store.upload import check_writable, upload_store  # noqa: E402
from mds_data.store.verify import verify_store  # noqa: E402

KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
FAST = RetryPolicy(attempts=4, first_wait=0.01, timeout=20)
DOCUMENTS = [
    np.random.default_rng(n).integers(0, 50_000, 1 + 9_000 * (n % 7)).astype(np.uint16)
    for n in range(30)
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(scope="module")
def bucket(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store on the disk, with a copy at s3://bucket/store."""
    path = tmp_path_factory.mktemp("data") / "store"
    write_store(path, DOCUMENTS, vocab_size=50_000)
    put(f"{server}/bucket", b"")
    for file in path.rglob("*"):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            put(f"{server}/bucket/store/{name}", file.read_bytes())
    return path


def put(url: str, data: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    request = urllib.request.Request(url, data=data, headers=headers, method="PUT")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200


def options(endpoint: str, **others: Any) -> RemoteOptions:
    storage = {**KEYS, "endpoint": endpoint, "client_options": {"allow_http": True}}
    # The retries to be tested are ours.
    storage["retry_config"] = {"max_retries": 0}
    return RemoteOptions(storage=storage, retries=FAST, **others)


class _Bad(BaseHTTPRequestHandler):
    """Passes requests on; each one fails so many times before it does."""

    server: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_HEAD(self) -> None:
        self._pass_on(None)

    def do_DELETE(self) -> None:
        self._pass_on(None)

    def do_PUT(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def do_POST(self) -> None:
        self.do_PUT()

    def _pass_on(self, sent: bytes | None) -> None:
        wanted = {key: value for key, value in self.headers.items() if key.lower() != "host"}
        wanted.setdefault("content-type", "application/octet-stream")  # urllib's is of forms
        tries = self.server.tries
        key = (self.path, self.headers.get("Range"), self.command)
        tries[key] = tries.get(key, 0) + 1
        if tries[key] <= self.server.failing:
            self._fail(tries[key])
            return
        try:
            request = urllib.request.Request(
                self.server.behind + self.path, data=sent, headers=wanted, method=self.command
            )
            with urllib.request.urlopen(request) as answer:
                self._answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            self._answer(error.code, error.headers, error.read())

    def _fail(self, times: int) -> None:
        if times % 2:
            self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if self.command != "GET":  # hang up without an answer
            self.close_connection = True
            return
        self.send_response(200)  # and then hang up in the middle
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 10)
        self.close_connection = True

    def _answer(self, status: int, headers: Any, body: bytes) -> None:
        self.send_response(status)
        for name in ("Content-Range", "ETag", "Last-Modified", "Content-Type"):
            if headers.get(name):
                self.send_header(name, headers[name])
        self.send_header("Content-Length", headers.get("Content-Length") or str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bad_server(server: str, bucket: Path) -> Iterator[Any]:
    proxy: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Bad)
    proxy.behind, proxy.failing, proxy.tries = server, 0, {}
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    proxy.url = f"http://127.0.0.1:{proxy.server_port}"
    yield proxy
    proxy.shutdown()
    proxy.server_close()


def check(store: Any) -> None:
    assert len(store) == len(DOCUMENTS)
    for number, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(store[number], document)


def test_obstore_reads_the_store(server: str, bucket: Path) -> None:
    store = open_remote_store("s3://bucket/store", options=options(server))

    check(store)
    check(pickle.loads(pickle.dumps(store)))
    near = GPTDataset(open_store(bucket), seq_length=1000)
    far = GPTDataset(store, seq_length=1000)
    for number in range(0, len(near), 7):
        np.testing.assert_array_equal(near.window(number), far.window(number))


def test_s3fs_reads_the_store(server: str, bucket: Path) -> None:
    pytest.importorskip("s3fs")
    from zarr.storage import FsspecStore

    settings = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": server}}

    def place() -> Any:
        return FsspecStore.from_url("s3://bucket/store", storage_options=settings, read_only=True)

    check(open_remote_store(place(), options=RemoteOptions(retries=FAST)))


def test_failing_and_broken_answers_are_asked_for_again(bad_server: Any) -> None:
    bad_server.failing = 2

    check(open_remote_store("s3://bucket/store", options=options(bad_server.url)))

    assert max(bad_server.tries.values()) == 3


def test_a_server_that_never_answers_right_is_named(bad_server: Any) -> None:
    bad_server.failing = 99

    with pytest.raises(RemoteError, match=r"s3://bucket/store/manifest\.json: can't be read"):
        open_remote_store("s3://bucket/store", options=options(bad_server.url))


def test_the_local_cache_needs_no_server_for_tokens(bad_server: Any, tmp_path: Path) -> None:
    settings = options(bad_server.url, cache=tmp_path / "cache")
    check(open_remote_store("s3://bucket/store", options=settings))
    bad_server.tries.clear()

    check(open_remote_store("s3://bucket/store", options=settings))

    assert not [path for path, *_ in bad_server.tries if "/c/" in path]


def test_a_missing_shard_is_an_error(server: str, bucket: Path) -> None:
    for file in bucket.rglob("*"):
        name = file.relative_to(bucket).as_posix()
        if file.is_file() and name != "tokens/c/0":
            put(f"{server}/bucket/broken/{name}", file.read_bytes())

    store = open_remote_store("s3://bucket/broken", options=options(server))

    with pytest.raises(DamagedError, match="tokens/c/0: is missing"):
        check(store)


def test_no_store_is_no_store(server: str, bucket: Path) -> None:
    with pytest.raises(FileNotFoundError, match="s3://bucket/nothing"):
        open_remote_store("s3://bucket/nothing", options=options(server))


def test_a_store_is_sent_and_read_again(server: str, bucket: Path) -> None:
    check_writable("s3://bucket/sent", options=options(server))

    upload_store(bucket, "s3://bucket/sent", options=options(server))

    check(open_remote_store("s3://bucket/sent", options=options(server)))
    with urllib.request.urlopen(f"{server}/bucket?prefix=sent/upload") as answer:
        assert b"<Key>" not in answer.read()  # neither claim nor probe is left


def test_s3fs_sends_a_store_and_reads_several(
    server: str, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.delattr("zarr.storage.ObjectStore")  # as if obstore were not installed
    storage = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": server}}
    settings = RemoteOptions(storage=storage, retries=FAST)

    check_writable("s3://bucket/by-s3fs", options=settings)
    upload_store(bucket, "s3://bucket/by-s3fs", options=settings)

    for name in ("by-s3fs", "store"):
        check(open_remote_store(f"s3://bucket/{name}", options=settings))
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        upload_store(bucket, "s3://nowhere/s", options=settings)


def test_failing_and_broken_writes_are_tried_again(bad_server: Any, bucket: Path) -> None:
    bad_server.failing = 2

    upload_store(bucket, "s3://bucket/hard", options=options(bad_server.url))

    bad_server.failing = 0
    check(open_remote_store("s3://bucket/hard", options=options(bad_server.url)))
    written = [tries for (_, _, command), tries in bad_server.tries.items() if command == "PUT"]
    assert len(written) > 5
    assert min(written) == 3


def test_a_server_that_takes_nothing_leaves_no_store(bad_server: Any, bucket: Path) -> None:
    bad_server.failing = 99

    with pytest.raises(RemoteError, match=r"s3://bucket/never/manifest\.json: can't be read"):
        upload_store(bucket, "s3://bucket/never", options=options(bad_server.url))


def test_another_store_is_refused_and_a_missing_bucket_named(
    server: str, bucket: Path, tmp_path: Path
) -> None:
    upload_store(bucket, "s3://bucket/taken", options=options(server))
    write_store(tmp_path / "other", DOCUMENTS[:3], vocab_size=50_000)

    with pytest.raises(StoreError, match="s3://bucket/taken: holds a store"):
        upload_store(tmp_path / "other", "s3://bucket/taken", options=options(server))
    with pytest.raises(FileNotFoundError, match="s3://nowhere/s: there is no such bucket"):
        upload_store(bucket, "s3://nowhere/s", options=options(server))


def test_preprocess_writes_to_a_url(
    server: str, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("numbers.jsonl").write_text('{"a": "1 2 3", "b": "4"}\n{"a": "5 6", "b": "7 8"}\n')
    command = ["preprocess", "--input", "numbers.jsonl", "--tokenizer-type", "NullTokenizer"]
    command += ["--vocab-size", "10", "--json-keys", "a", "b", "--workers", "1"]

    assert main([*command, "--output", "s3://bucket/made"]) == 0

    assert open_store("s3://bucket/made_a")[0].tolist() == [1, 2, 3]
    assert open_store("s3://bucket/made_b")[1].tolist() == [7, 8]
    assert main(["verify", "s3://bucket/made_b"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["numbers.jsonl"]


def test_a_store_there_grows_and_forgets(server: str, bucket: Path, tmp_path: Path) -> None:
    upload_store(bucket, "s3://bucket/changed", options=options(server))
    more = DOCUMENTS[3]

    append_documents("s3://bucket/changed", [more], options=options(server))
    erase_documents("s3://bucket/changed", [2], reason="asked for", options=options(server))

    store = open_remote_store("s3://bucket/changed", options=options(server))
    expected = [*DOCUMENTS[:2], [], *DOCUMENTS[3:], more]
    assert len(store) == len(expected)
    for number, document in enumerate(expected):
        np.testing.assert_array_equal(store[number], document)
    download_store("s3://bucket/changed", tmp_path / "here", options=options(server))
    assert verify_store(tmp_path / "here").sound
    with urllib.request.urlopen(f"{server}/bucket?prefix=changed/") as answer:
        listed = answer.read()
    assert listed.count(b"<Key>") == len(store.manifest.files) + 1  # and the manifest
    assert b"change.json" not in listed


def test_failing_answers_do_not_hurt_a_change(bad_server: Any, bucket: Path) -> None:
    upload_store(bucket, "s3://bucket/tried", options=options(bad_server.url))
    bad_server.tries.clear()
    bad_server.failing = 2

    append_documents("s3://bucket/tried", [DOCUMENTS[3]], options=options(bad_server.url))

    bad_server.failing = 0
    store = open_remote_store("s3://bucket/tried", options=options(bad_server.url))
    np.testing.assert_array_equal(store[-1], DOCUMENTS[3])


def test_s3fs_changes_a_store(server: str, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.delattr("zarr.storage.ObjectStore")  # as if obstore were not installed
    storage = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": server}}
    settings = RemoteOptions(storage=storage, retries=FAST)
    upload_store(bucket, "s3://bucket/changed-by-s3fs", options=settings)

    append_documents("s3://bucket/changed-by-s3fs", [DOCUMENTS[3]], options=settings)

    store = open_remote_store("s3://bucket/changed-by-s3fs", options=settings)
    np.testing.assert_array_equal(store[-1], DOCUMENTS[3])
