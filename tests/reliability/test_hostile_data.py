"""Hostile stores, pairs and tokenizers through every command: one sentence, no crash, no hang.

Each store is sealed anew after the change, as an attacker would: sizes and digests are right, only
the content lies.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from numcodecs.zstd import Zstd

mds_data = pytest.importorskip("mds_data")

from mds_data import DataError  # noqa: E402
from mds_data.cli import main  # noqa: E402
from mds_data.corpus import sample_corpus  # noqa: E402
from mds_data.store.megatron import export_megatron  # noqa: E402
from mds_data.store.remote import open_remote_store  # noqa: E402
from mds_data.store.schema import FileRecord, manifest_from_json, manifest_to_json  # noqa: E402
from mds_data.tokenizers.train import train_tokenizer  # noqa: E402

pytestmark = pytest.mark.timeout(60)

SETTINGS = {"vocab_size": 1000, "chunk_tokens": 64, "chunks_per_shard": 4}
MOST_MEMORY = 256 * 2**20


@pytest.fixture(autouse=True)
def bounded_memory() -> object:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for layout in ("hot", "archive"):
        chance = np.random.default_rng(1)
        with mds_data.StoreWriter(
            layout, layout=layout, columns={"kind": "uint64"}, sentences=True, **SETTINGS
        ) as writer:
            for _ in range(30):
                ids = chance.integers(0, 1000, 40)
                writer.add(ids, sentence_lengths=[15, 25], columns={"kind": 7})
            writer.commit()
    return tmp_path


def reseal(store: str) -> None:
    """Make sizes and digests right again."""
    root = Path(store)
    manifest = manifest_from_json((root / "manifest.json").read_bytes())
    files = {}
    for name in manifest.files:
        data = (root / name).read_bytes()
        files[name] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (root / "manifest.json").write_bytes(manifest_to_json(replace(manifest, files=files)))


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    members = json.loads(path.read_bytes())
    change(members)
    path.write_text(json.dumps(members))


def tokens_json(change: Callable[[dict], object]) -> Callable[[str], None]:
    return lambda store: edit_json(Path(store) / "tokens/zarr.json", change)


def sharding(members: dict) -> dict:
    return members["codecs"][0]["configuration"]


def replace_chunk(store: str, payload: bytes) -> None:
    """Put another first chunk into a shard, with a right checksum and a right index."""
    path = Path(store) / "tokens/c/0"
    data = path.read_bytes()
    index = np.frombuffer(data[-68:-4], "<u8").reshape(4, 2).copy()
    chunks = [data[start : start + length] for start, length in index.tolist()]
    chunks[0] = payload + int(google_crc32c.value(payload)).to_bytes(4, "little")
    write_shard(path, chunks)


def write_shard(
    path: Path, chunks: list[bytes], *, index: list[tuple[int, int]] | None = None
) -> None:
    starts = np.cumsum([0, *map(len, chunks)])[:-1].tolist()
    entries = index or list(zip(starts, map(len, chunks), strict=True))
    tail = np.array(entries, "<u8").tobytes()
    seal = int(google_crc32c.value(tail)).to_bytes(4, "little")
    path.write_bytes(b"".join(chunks) + tail + seal)


def with_index(*entries: tuple[int, int]) -> Callable[[str], None]:
    def change(store: str) -> None:
        path = Path(store) / "tokens/c/0"
        write_shard(path, [path.read_bytes()[:-68]], index=list(entries))

    return change


def replaced(name: str, data: bytes) -> Callable[[str], None]:
    return lambda store: Path(store, name).write_bytes(data) and None


def documents(name: str, values: np.ndarray) -> Callable[[str], None]:
    """Write another store with such an array, and take its file."""

    def change(store: str) -> None:
        from mds_data.store.array_metadata import layout_for_documents
        from mds_data.store.shard import ABSENT, encode_chunk

        layout = layout_for_documents(np.dtype("<i8"))
        chunk = encode_chunk(values.astype("<i8"), layout=layout)
        rest = [(ABSENT, ABSENT)] * (layout.chunks_per_shard - 1)
        write_shard(Path(store) / name / "c/0", [chunk], index=[(0, len(chunk)), *rest])

    return change


BOMB = bytes(Zstd(level=1).encode(bytes(2**28)))
STREAMED = BOMB[:4] + b"\x00\x58" + BOMB[4 + 6 :] if BOMB[4] & 0x20 else BOMB
EIGHT = bytes(Zstd().encode(bytes(8)))
STARTS = np.arange(30) * 40

NESTED = b'{"attributes":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001

STORES: dict[str, tuple[str, Callable[[str], object]]] = {
    "zstd bomb": ("archive", lambda store: replace_chunk(store, BOMB)),
    "zstd bomb without a size": ("archive", lambda store: replace_chunk(store, STREAMED)),
    "chunk too short": ("archive", lambda store: replace_chunk(store, EIGHT)),
    "raw chunk too short": ("hot", lambda store: replace_chunk(store, bytes(8))),
    "raw chunk too long": ("hot", lambda store: replace_chunk(store, bytes(1000))),
    "shape 2^60": ("hot", tokens_json(lambda m: m.update(shape=[2**60]))),
    "shape negative": ("hot", tokens_json(lambda m: m.update(shape=[-1]))),
    "shape of two dimensions": ("hot", tokens_json(lambda m: m.update(shape=[2**40, 2**40]))),
    "shape is a fraction": ("hot", tokens_json(lambda m: m.update(shape=[1.5]))),
    "zero chunk": ("hot", tokens_json(lambda m: sharding(m).update(chunk_shape=[0]))),
    "huge chunk": ("hot", tokens_json(lambda m: sharding(m).update(chunk_shape=[2**31]))),
    "zero shard": (
        "hot",
        tokens_json(lambda m: m["chunk_grid"]["configuration"].update(chunk_shape=[0])),
    ),
    "pickle codec": (
        "hot",
        tokens_json(lambda m: sharding(m)["codecs"].insert(0, {"name": "numcodecs.pickle"})),
    ),
    "gzip codec": (
        "hot",
        tokens_json(lambda m: sharding(m)["codecs"].insert(1, {"name": "gzip"})),
    ),
    "blosc codec": (
        "hot",
        tokens_json(lambda m: sharding(m)["codecs"].insert(1, {"name": "blosc"})),
    ),
    "lz4 codec": (
        "hot",
        tokens_json(lambda m: sharding(m)["codecs"].insert(1, {"name": "numcodecs.lz4"})),
    ),
    "fill value NaN": ("hot", tokens_json(lambda m: m.update(fill_value="NaN"))),
    "fill value of 1": ("hot", tokens_json(lambda m: m.update(fill_value=1))),
    "object type": ("hot", tokens_json(lambda m: m.update(data_type="|O"))),
    "other type": ("hot", tokens_json(lambda m: m.update(data_type="float64"))),
    "storage transformer": (
        "hot",
        tokens_json(lambda m: m.update(storage_transformers=[{"name": "x"}])),
    ),
    "nested attributes": (
        "hot",
        replaced(
            "tokens/zarr.json", b'{"attributes":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001
        ),
    ),
    "100 MB of attributes": (
        "hot",
        replaced("tokens/zarr.json", b'{"attributes":"' + b"x" * 10**8 + b'"}'),
    ),
    "metadata is no JSON": ("hot", replaced("tokens/zarr.json", b"\xff\xfe\0")),
    "metadata is a list": ("hot", replaced("tokens/zarr.json", b"[]")),
    "key stands twice": ("hot", replaced("tokens/zarr.json", b'{"shape":[1],"shape":[2]}')),
    "index beyond the shard": ("hot", with_index((0, 132), (2**40, 132), (264, 132), (396, 132))),
    "index overflows": ("hot", with_index((2**64 - 8, 132), (132, 132), (264, 132), (396, 132))),
    "index overlaps": ("hot", with_index((0, 132), (100, 132), (264, 132), (396, 132))),
    "index backwards": ("hot", with_index((132, 132), (0, 132), (264, 132), (396, 132))),
    "chunk absent": ("hot", with_index((0, 132), (2**64 - 1, 2**64 - 1), (264, 132), (396, 132))),
    "chunk empty": ("hot", with_index((0, 132), (132, 0), (264, 132), (396, 132))),
    "index crc wrong": (
        "hot",
        lambda store: (path := Path(store) / "tokens/c/0").write_bytes(
            path.read_bytes()[:-1] + b"\x01"
        ),
    ),
    "shard empty": ("hot", replaced("tokens/c/0", b"")),
    "documents backwards": ("hot", documents("doc_start", STARTS[::-1])),
    "documents beyond": ("hot", documents("doc_start", STARTS + 10**9)),
    "documents overlap": ("hot", documents("doc_length", np.full(30, 41))),
    "lengths negative": ("hot", documents("doc_length", np.full(30, -1))),
    "lengths overflow": ("hot", documents("doc_length", np.full(30, 2**62))),
}


def seen(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    code = main(arguments)
    said = capsys.readouterr()
    text = said.out + said.err
    assert code in {0, 1, 3}, (arguments, code, text[:500])
    assert "Traceback" not in text
    if code == 3:
        assert text.count("\n") <= 2, text[:500]
        assert len(text) < 2000
    return code, text


def all_commands(store: str) -> list[list[str]]:
    return [
        ["verify", store],
        ["inspect", store],
        ["inspect", store, "--json"],
        ["inspect", store, "--html", "page.html", "--overwrite"],
        ["repack", store, "--layout", "archive", "--output", "out-repack"],
        ["export", store, "--output-prefix", "out-export"],
        ["split", store, "--split", "9,1,0", "--output", "out-split"],
        ["merge", store, "--output", "out-merge"],
        ["merge", store, "--rewrite", "--output", "out-join"],
        ["erase", store, "--documents", "1", "--reason", "asked"],
    ]


@pytest.mark.parametrize("name", STORES)
def test_a_hostile_store_is_refused_by_every_command(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store, change = STORES[name]
    change(store)
    reseal(store)

    codes = {}
    for command in all_commands(store):
        code, text = seen(capsys, command)
        codes[" ".join(command[:1] + command[2:3])] = code
        assert code == 0 or store in text
    with pytest.raises(DataError, match=store):
        list(open_remote_store(_local(store)))

    # A merge links files unread, and an erasure may not touch the damage; the rest must refuse.
    lax = {"merge --output", "erase --documents"}
    assert codes.pop("verify") == 1
    assert all(code == 3 for command, code in codes.items() if command not in lax), codes
    assert not Path("out-repack").exists()
    assert not Path("out-join").exists()


def _local(store: str) -> object:
    from zarr.storage import LocalStore

    return LocalStore(store, read_only=True)


def test_flipped_bits_in_every_file_are_found_by_verify(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = np.random.default_rng(2)
    for path in sorted(Path("hot").rglob("*")):
        if not path.is_file():
            continue
        data = bytearray(path.read_bytes())
        for place in chance.integers(0, 8 * len(data), 5).tolist():
            data[place // 8] ^= 1 << place % 8
            path.write_bytes(data)
            code, text = seen(capsys, ["verify", "hot"])
            assert code == 1
            assert path.as_posix() in text
            data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
    assert main(["verify", "hot"]) == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "missing", "device"])
def test_a_shard_that_is_no_file_is_refused(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = Path("hot/tokens/c/1")
    shutil.copy(shard, "elsewhere")
    shard.unlink()
    if kind == "link":
        shard.symlink_to(Path("elsewhere").absolute())
    elif kind == "device":
        shard.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(shard)
    elif kind == "folder":
        shard.mkdir()

    for command in all_commands("hot"):
        code, text = seen(capsys, command)
        assert code == (1 if command[0] == "verify" else 3)
        assert "hot/tokens/c/1" in text


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "c:\\x", "a\0b", ""])
def test_a_file_outside_the_store_is_refused(
    folder: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    members = json.loads(Path("hot/manifest.json").read_bytes())
    members["files"][path] = members["files"]["zarr.json"]
    del members["digest"]
    Path("hot/manifest.json").write_text(json.dumps(members))

    for command in all_commands("hot"):
        code, _ = seen(capsys, command)
        assert code == (1 if command[0] == "verify" else 3)


def test_consolidated_metadata_lead_nowhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [document.tolist() for document in mds_data.open_store("hot")]
    elsewhere = {"metadata": {"../outside": {}, "tokens": {"shape": [7]}}}
    edit_json(Path("hot/zarr.json"), lambda m: m.update(consolidated_metadata=elsewhere))
    reseal("hot")

    for command in all_commands("hot")[:-1]:
        assert seen(capsys, command)[0] == 0
    assert [document.tolist() for document in mds_data.open_store("hot")] == before


def test_tokens_beyond_the_vocabulary_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = manifest_from_json(Path("hot/manifest.json").read_bytes())
    Path("hot/manifest.json").write_bytes(manifest_to_json(replace(manifest, vocab_size=10)))

    code, text = seen(capsys, ["verify", "hot"])

    assert code == 1
    assert "outside the vocabulary of 10" in text
    assert seen(capsys, ["repack", "hot", "--layout", "archive", "--output", "o"])[0] == 3


PAIRS: dict[str, Callable[[bytearray], object]] = {
    "bad magic": lambda data: data.__setitem__(slice(0, 4), b"EVIL"),
    "other version": lambda data: data.__setitem__(slice(9, 17), struct.pack("<Q", 9)),
    "type 0": lambda data: data.__setitem__(17, 0),
    "type 7": lambda data: data.__setitem__(17, 7),
    "type 99": lambda data: data.__setitem__(17, 99),
    "count 2^60": lambda data: data.__setitem__(slice(18, 26), struct.pack("<Q", 2**60)),
    "count negative": lambda data: data.__setitem__(slice(18, 26), struct.pack("<q", -1)),
    "documents 2^60": lambda data: data.__setitem__(slice(26, 34), struct.pack("<Q", 2**60)),
    "size -1": lambda data: data.__setitem__(slice(34, 38), struct.pack("<i", -1)),
    "size 2^31-1": lambda data: data.__setitem__(slice(34, 38), struct.pack("<i", 2**31 - 1)),
    "pointer beyond": lambda data: data.__setitem__(slice(-8 * 31 - 8, -8 * 31), b"\x7f" * 8),
    "pointers overlap": lambda data: data.__setitem__(
        slice(-8 * 31 - 8, -8 * 31), data[-8 * 31 - 16 : -8 * 31 - 8]
    ),
    "document 99 of 30": lambda data: data.__setitem__(slice(-16, -8), struct.pack("<q", 99)),
    "documents backwards": lambda data: data.__setitem__(slice(-16, -8), struct.pack("<q", 1)),
    "empty": lambda data: data.clear(),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_hostile_pair_is_refused_by_every_command(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    export_megatron(_without_sentences(), "pair")
    data = bytearray(Path("pair.idx").read_bytes())
    PAIRS[name](data)
    Path("pair.idx").write_bytes(data)

    for command in [
        *all_commands("pair")[:-1],
        ["import", "pair", "--output", "out-import"],
        ["repair", "pair", "--output", "out-repair"],
    ]:
        code, text = seen(capsys, command)
        assert code == (1 if command[0] == "verify" else 3), (command, text)
        assert "pair" in text
    assert not list(Path().glob("out-*"))


def _without_sentences() -> str:
    mds_data.write_store("plain", [np.arange(40)] * 30, vocab_size=1000)
    return "plain"


def test_a_pair_cut_anywhere_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_megatron(_without_sentences(), "pair")
    for suffix in ("idx", "bin"):
        data = Path(f"pair.{suffix}").read_bytes()
        for part in range(16):
            Path(f"pair.{suffix}").write_bytes(data[: len(data) * part // 16])
            assert seen(capsys, ["import", "pair", "--output", "out"])[0] == 3
            assert seen(capsys, ["verify", "pair"])[0] == 1
        Path(f"pair.{suffix}").write_bytes(data)
    assert seen(capsys, ["verify", "pair"])[0] == 0


@pytest.fixture(scope="module")
def tokenizer() -> dict:
    texts = [document.text for _, document in zip(range(30), sample_corpus(), strict=False)]
    return json.loads(train_tokenizer(texts, vocab_size=400).content)


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
TOKENIZERS: dict[str, Callable[[dict], object]] = {
    "regex without end": lambda t: t.update(
        pre_tokenizer={
            "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
        }
    ),
    "regex broken": lambda t: t.update(
        pre_tokenizer={
            "type": "Split", "pattern": {"Regex": "((("}, "behavior": "Isolated", "invert": False
        }
    ),
    "growing normalizer": lambda t: t.update(
        normalizer={"type": "Sequence", "normalizers": [REPLACE] * 10}
    ),
    "nested normalizer": lambda t: t.update(normalizer=_nested(100)),
    "id 2^32 - 1": lambda t: t["model"]["vocab"].update(zzz=2**32 - 1),
    "id 2^31 - 2": lambda t: t["model"]["vocab"].update(zzz=2**31 - 2),
    "id negative": lambda t: t["model"]["vocab"].update(zzz=-1),
    "id is text": lambda t: t["model"]["vocab"].update(zzz="7"),
    "added id 2^32 - 1": lambda t: t["added_tokens"].append({"id": 2**32 - 1, "content": "<x>"}),
    "id stands twice": lambda t: t["model"]["vocab"].update(zzz=7),
    "merge of unknown tokens": lambda t: t["model"]["merges"].append(["qqq", "zzz"]),
    "unknown model": lambda t: t["model"].update(type="Evil"),
    "no model": lambda t: t.pop("model"),
    "unknown decoder": lambda t: t.update(decoder={"type": "Evil"}),
}  # fmt: skip


def _nested(depth: int) -> dict:
    value: dict = REPLACE
    for _ in range(depth):
        value = {"type": "Sequence", "normalizers": [value]}
    return value


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(
    folder: Path, tokenizer: dict, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = json.loads(json.dumps(tokenizer))
    TOKENIZERS[name](changed)
    Path("tokenizer.json").write_text(json.dumps(changed))
    Path("in.jsonl").write_text(json.dumps({"text": "a" * 60 + "!"}) + "\n")

    command = ["preprocess", "--input", "in.jsonl", "--tokenizer", "tokenizer.json"]
    code, text = seen(capsys, [*command, "--workers", "1", "--output", "store"])

    assert code == 3
    assert "tokenizer" in text
    assert not list(Path().glob("store*"))


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"[" * 10**6, b"{", b'{"model": NaN}', b"\xff" * 99, b"7", b"null"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_what_is_no_tokenizer_file_is_refused(
    folder: Path, content: bytes, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(content)
    Path("in.jsonl").write_text('{"text": "a"}\n')

    command = ["preprocess", "--input", "in.jsonl", "--tokenizer", name, "--output", "store"]
    code, text = seen(capsys, [*command, "--workers", "1"])

    assert code == 3
    assert name in text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_of_a_gigabyte_is_refused_unread(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(name).open("wb") as file:
        file.truncate(2**30)
    Path("in.jsonl").write_text('{"text": "a"}\n')

    command = ["preprocess", "--input", "in.jsonl", "--tokenizer", name, "--output", "store"]
    code, text = seen(capsys, [*command, "--workers", "1"])

    assert code == 3
    assert name in text


def test_a_sentencepiece_model_cut_anywhere_is_refused_or_harmless(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [document.text for _, document in zip(range(40), sample_corpus(), strict=False)]
    data = train_tokenizer(texts, vocab_size=400, model="unigram").content
    Path("in.jsonl").write_text('{"text": "a text"}\n')
    chance = np.random.default_rng(3)
    bad = [data[: len(data) * part // 16] for part in range(16)]
    for _ in range(16):
        changed = bytearray(data)
        for place in chance.integers(0, 8 * min(len(data), 400), 4).tolist():
            changed[place // 8] ^= 1 << place % 8
        bad.append(bytes(changed))
    for number, content in enumerate(bad):
        Path("t.model").write_bytes(content)
        command = ["preprocess", "--input", "in.jsonl", "--tokenizer", "t.model"]
        seen(capsys, [*command, "--workers", "1", "--output", f"store-{number}"])
