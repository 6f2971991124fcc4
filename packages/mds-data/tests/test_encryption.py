"""An encrypted store reads as the plain one does, and gives nothing to anyone who lacks its key."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import stat
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_material import sentence_store
from store_material import assert_holds, random_documents, run_killed, write_small

from mds_data import (
    BertDataset,
    DataError,
    GPTDataset,
    KeySource,
    SealedError,
    StoreError,
    open_store,
)
from mds_data.cli import main
from mds_data.datasets.sentence_dataset import store_vocabulary
from mds_data.encryption import keys, segments
from mds_data.encryption.envelope import envelope_from_json, envelope_to_json
from mds_data.encryption.segments import FileKey, SealedFile, cut_at, sealed_blocks, sealed_size
from mds_data.store import sealed_folder
from mds_data.store.commit import FileOperations
from mds_data.store.encrypt import decrypt_store, encrypt_store, rotate_key
from mds_data.store.erase import erase_documents
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store

DOCUMENTS = random_documents(30, seed=5, longest=90)
CANARY = np.frombuffer(b"THIS-IS-A-SECRET", np.uint16)
FLIP = (
    f"{sys.executable} -c 'import sys; sys.stdout.buffer.write("
    f"bytes(byte ^ 7 for byte in sys.stdin.buffer.read()))'"
)


@pytest.fixture(autouse=True)
def _cheap_passphrases(monkeypatch):
    monkeypatch.setattr(keys, "_SCRYPT_LOG_N", 10)


@pytest.fixture
def identity(tmp_path):
    path = tmp_path / "key.txt"
    return keys.new_identity(path), KeySource(identity=path)


@pytest.fixture(params=["hot", "archive"])
def plain(tmp_path, request):
    write_small(tmp_path / "plain", DOCUMENTS, layout=request.param)
    return tmp_path / "plain"


@pytest.fixture
def sealed(plain, identity):
    encrypt_store(plain, plain.with_name("sealed"), recipients=[identity[0]])
    return plain.with_name("sealed")


def tree(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_documents_and_samples_are_those_of_the_plain_store(plain, sealed, identity):
    one, other = open_store(plain), open_store(sealed, key=identity[1])

    assert_holds(other, DOCUMENTS)
    np.testing.assert_array_equal(one.doc_start, other.doc_start)
    np.testing.assert_array_equal(
        one.tokens(0, one.num_positions), other.tokens(0, one.num_positions)
    )
    first, second = (GPTDataset(store, seq_length=16, split=None) for store in (one, other))
    for number in (0, len(first) // 2, len(first) - 1):
        np.testing.assert_array_equal(first.window(number), second.window(number))
    assert_holds(pickle.loads(pickle.dumps(other)), DOCUMENTS)


def test_decrypting_gives_the_very_bytes_that_were_encrypted(plain, sealed, identity, tmp_path):
    decrypt_store(sealed, tmp_path / "again", key=identity[1])

    assert tree(tmp_path / "again") == tree(plain)


def test_one_inner_chunk_is_one_segment(plain, sealed, identity, monkeypatch):
    part = open_store(sealed, key=identity[1]).parts[0]
    file = part.folder.file("tokens/c/0")
    chunks = part.tokens.layout.chunks_per_shard
    opened = []
    real = segments._Cipher.open
    monkeypatch.setattr(
        segments._Cipher,
        "open",
        lambda self, data, number, kind: opened.append(number) or real(self, data, number, kind),
    )

    file.read(*_chunk_range(plain, 1))

    assert opened == [1]
    assert file.count == chunks + 1


def _chunk_range(plain, number):
    part = open_store(plain).parts[0]
    part.tokens.read(0, 1)
    offset, length = part.tokens._shards[0].index[number]
    return int(offset), int(offset + length)


def test_no_key_and_a_wrong_key_are_refused(sealed, tmp_path, capsys):
    keys.new_identity(tmp_path / "other.txt")

    with pytest.raises(SealedError, match="no key was given"):
        open_store(sealed)
    with pytest.raises(SealedError, match="does not open with the key that was given"):
        open_store(sealed, key=KeySource(identity=tmp_path / "other.txt"))
    assert main(["verify", str(sealed), "--identity", str(tmp_path / "other.txt")]) == 3
    assert main(["inspect", str(sealed)]) == 3
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda store: erase_documents(store, [1], reason="x"),
        lambda store: merge_stores([store, store], store.with_name("merged")),
        lambda store: encrypt_store(store, store.with_name("twice"), recipients=["age1"]),
    ],
)
def test_what_needs_a_plain_store_says_so(sealed, change):
    before = tree(sealed)

    with pytest.raises(SealedError, match="mds-data decrypt"):
        change(sealed)

    assert tree(sealed) == before


def test_every_flipped_bit_is_found(sealed, identity):
    """One in each file; the sealed bytes tell without the key, the segments with it."""
    for path in sorted(sealed.iterdir()):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(good) // 2] ^= 4
        path.write_bytes(bad)
        assert not verify_store(sealed).sound, path.name
        path.write_bytes(good)
    assert verify_store(sealed, key=identity[1]).sound


def _forged(sealed, name, data):
    """Put bytes in a sealed file, and make the envelope agree: what an attacker would do."""
    (sealed / name).write_bytes(data)
    path = sealed / "manifest.json"
    envelope = envelope_from_json(path.read_bytes(), name="x")
    files = dict(envelope.files)
    files[name] = (len(data), hashlib.sha256(data).hexdigest())
    path.write_bytes(envelope_to_json(replace(envelope, files=files)))


def _largest(sealed, count=1):
    paths = sorted(sealed.glob("0*.sealed"), key=lambda path: -path.stat().st_size)
    return [path.name for path in paths[:count]]


def test_forged_bytes_do_not_open_though_the_envelope_agrees(plain, sealed, identity):
    key = identity[1]
    one, other = _largest(sealed, 2)
    twin = plain.with_name("twin")
    encrypt_store(plain, twin, recipients=[identity[0]])
    good = (sealed / one).read_bytes()
    flipped = bytearray(good)
    flipped[100] ^= 1
    part = open_store(sealed, key=key).parts[0].folder
    path = next(path for path, (name, _) in part.contents.files.items() if name == one)
    offset, length = part.file(path).place(0, 1)
    moved = good[:offset] + good[offset + length : offset + 2 * length]
    moved += good[offset : offset + length] + good[offset + 2 * length :]
    forgeries = {
        "flip": bytes(flipped),
        "truncation": good[: len(good) // 2],
        "last segment cut": good[:-20],
        "segments in another order": moved,
        "another file of the store": (sealed / other).read_bytes(),
        "the same file of another store": (twin / one).read_bytes(),
    }
    for what, data in forgeries.items():
        _forged(sealed, one, data)
        report = verify_store(sealed, key=key)
        assert not report.sound, what
    _forged(sealed, one, good)
    assert verify_store(sealed, key=key).sound


KEY = FileKey(data_key=bytes(range(32)), folder=bytes(16), path="a/b", file_id=b"1" * 16)


def sealed_bytes(content, *, key=KEY, cut=16):
    read = io.BytesIO(content).read
    return b"".join(sealed_blocks(read, size=len(content), cut=cut, key=key))


def check_sealed(stored, *, key=KEY):
    SealedFile(lambda at, count: stored[at : at + count], len(stored), key=key, name="f").check()


@pytest.mark.parametrize("what", ["order", "path", "folder", "header", "last", "table"])
def test_a_segment_opens_in_its_own_place_only(what):
    """By the cipher alone, before any digest of the whole file is looked at."""
    stored, key = sealed_bytes(bytes(range(48))), KEY
    check_sealed(stored)
    if what == "order":
        stored = stored[:64] + stored[96:128] + stored[64:96] + stored[128:]
    elif what == "path":
        key = replace(KEY, path="a/c")
    elif what == "folder":
        key = replace(KEY, folder=b"x" * 16)
    elif what == "header":  # the minor version says nothing else
        stored = stored[:10] + b"\x01" + stored[11:]
    elif what == "last":
        header = bytearray(stored[:64])
        header[16], header[24] = 32, 2
        stored = bytes(header) + stored[64:128]
    else:
        lengths = [16, 32]
        blocks = list(sealed_blocks(io.BytesIO(bytes(48)).read, size=48, cut=lengths, key=KEY))
        flipped = bytes([blocks[1][0] ^ 1])
        stored = blocks[0] + flipped + blocks[1][1:] + b"".join(blocks[2:])

    with pytest.raises(SealedError, match="does not open"):
        check_sealed(stored, key=key)


def test_an_older_file_of_the_same_path_is_refused():
    """The file id tells two states of one path apart, under one key."""
    old = sealed_bytes(b"old")

    with pytest.raises(SealedError, match="an older one"):
        check_sealed(old, key=replace(KEY, file_id=b"2" * 16))
    with pytest.raises(SealedError, match="does not open"):  # nor with a forged header
        check_sealed(old[:32] + b"2" * 16 + old[48:], key=replace(KEY, file_id=b"2" * 16))


def test_an_old_manifest_is_refused_where_the_right_digest_is_known(plain, identity, tmp_path):
    recipient, key = identity
    first = encrypt_store(plain, tmp_path / "sealed", recipients=[recipient])
    shutil.copytree(tmp_path / "sealed", tmp_path / "old")
    erase_documents(plain, [2], reason="asked to")
    second = encrypt_store(plain, tmp_path / "new", recipients=[recipient])

    assert first.digest != second.digest
    open_store(tmp_path / "new", key=key, expect=second.digest)
    open_store(plain, expect=second.digest)
    with pytest.raises(SealedError, match="older state"):
        open_store(tmp_path / "old", key=key, expect=second.digest)
    words = ["--expect", second.digest, "--output", str(tmp_path / "out")]
    code = main(["decrypt", str(tmp_path / "old"), "--identity", str(key.identity), *words])
    assert code == 3
    assert not (tmp_path / "out").exists()


def test_a_manifest_says_nothing_of_names_shapes_and_sources(tmp_path, identity):
    from mds_data.store.writer import StoreWriter

    with StoreWriter(
        tmp_path / "plain",
        vocab_size=31337,
        columns={"patient_name": np.dtype("<u2")},
        provenance={"inputs": [{"path": "hospital.jsonl", "sha256": "0" * 64, "size": 1}]},
    ) as writer:
        writer.add(np.arange(10, dtype=np.uint16), columns={"patient_name": 3})
        writer.commit()
    encrypt_store(tmp_path / "plain", tmp_path / "sealed", recipients=[identity[0]])

    said = b"".join(tree(tmp_path / "sealed").values())
    names = " ".join(tree(tmp_path / "sealed"))

    for word in ("patient_name", "hospital", "31337", "doc_start", "tokens", "zarr"):
        assert word.encode() not in said
        assert word not in names


def _ways(tmp_path):
    (tmp_path / "pw").write_text("correct horse\n")
    return {
        "file": KeySource(passphrase_file=tmp_path / "pw"),
        "variable": KeySource(passphrase_variable="MDS_TEST_PASSPHRASE"),
        "command": KeySource(key_command=FLIP),
    }


@pytest.mark.parametrize("way", ["file", "variable", "command"])
def test_passphrase_and_command_open_too(plain, tmp_path, monkeypatch, way):
    monkeypatch.setenv("MDS_TEST_PASSPHRASE", "battery staple")
    key = _ways(tmp_path)[way]

    encrypt_store(plain, tmp_path / "sealed", key=key)

    assert_holds(open_store(tmp_path / "sealed", key=key), DOCUMENTS)
    (tmp_path / "pw").write_text("wrong")
    if way == "file":
        with pytest.raises(SealedError, match="does not open"):
            open_store(tmp_path / "sealed", key=key)


def test_the_identity_file_may_be_named_by_the_environment(sealed, identity, monkeypatch):
    monkeypatch.setenv("MDS_TEST_IDENTITY", str(identity[1].identity))

    assert main(["verify", str(sealed), "--identity-env", "MDS_TEST_IDENTITY"]) == 0


def test_a_passphrase_may_be_typed(plain, tmp_path, monkeypatch):
    typed = iter(["one", "other", "one", "one", "one"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    key = KeySource(ask=True)

    with pytest.raises(SealedError, match="two different passphrases"):
        encrypt_store(plain, tmp_path / "sealed", key=key)
    encrypt_store(plain, tmp_path / "sealed", key=key)

    assert_holds(open_store(tmp_path / "sealed", key=key), DOCUMENTS)


def test_a_rotation_changes_the_envelope_only(sealed, identity, tmp_path):
    recipient = keys.new_identity(tmp_path / "new.txt")
    before = tree(sealed)

    rotate_key(sealed, old=identity[1], recipients=[recipient])

    after = tree(sealed)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == {"manifest.json", "key-1.age", "key-2.age"}
    with pytest.raises(SealedError, match="does not open"):
        open_store(sealed, key=identity[1])
    assert_holds(open_store(sealed, key=KeySource(identity=tmp_path / "new.txt")), DOCUMENTS)


def test_a_store_can_be_opened_while_its_keys_change(sealed, identity, tmp_path, monkeypatch):
    """The old key file goes between the reader's look at the envelope and at the key."""
    recipient = keys.new_identity(tmp_path / "new.txt")
    both = tmp_path / "both.txt"
    both.write_text((tmp_path / "key.txt").read_text() + (tmp_path / "new.txt").read_text())
    waiting = [lambda: rotate_key(sealed, old=identity[1], recipients=[recipient])]
    real = sealed_folder.envelope_from_json

    def slowly(data, *, name):
        found = real(data, name=name)
        if waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(sealed_folder, "envelope_from_json", slowly)

    assert_holds(open_store(sealed, key=KeySource(identity=both)), DOCUMENTS)
    assert not waiting


def test_key_files_are_their_owners_only(identity):
    path = identity[1].identity

    assert stat.S_IMODE(path.stat().st_mode) == 0o600 or sys.platform == "win32"
    with pytest.raises(FileExistsError):
        keys.new_identity(path)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@needs_fork
@pytest.mark.parametrize("step", ["encrypt", "decrypt", "rotate"])
def test_a_kill_anywhere_leaves_the_old_or_the_new(tmp_path, step, identity):
    """Every operation in turn; what a dead one left is no obstacle for the next."""
    recipient, key = identity
    # Few and small files, so that all operations can be tried.
    write_small(tmp_path / "plain", DOCUMENTS[:3], chunks_per_shard=64)
    encrypt_store(tmp_path / "plain", tmp_path / "sealed", recipients=[recipient])
    newer = keys.new_identity(tmp_path / "new.txt")
    new_key = KeySource(identity=tmp_path / "new.txt")

    def start(last):
        folder = tmp_path / f"{step}-{last}"
        folder.mkdir()
        shutil.copytree(tmp_path / "sealed", folder / "sealed")
        return folder

    def act(folder, operations):
        if step == "encrypt":
            encrypt_store(
                tmp_path / "plain", folder / "out", recipients=[recipient], operations=operations
            )
        elif step == "decrypt":
            decrypt_store(folder / "sealed", folder / "out", key=key, operations=operations)
        else:
            rotate_key(folder / "sealed", old=key, recipients=[newer], operations=operations)

    def opens(folder):
        store = folder / ("sealed" if step == "rotate" else "out")
        for each in (key, new_key):
            try:
                return verify_store(store, key=each).sound
            except DataError:
                continue
        return False

    last, died = 0, True
    while died:
        last += 1
        folder = start(last)
        died = run_killed(lambda operations: act(folder, operations), last, torn=True)  # noqa: B023
        if step != "rotate" and not (folder / "out").exists():
            assert died
            act(folder, FileOperations())
        assert opens(folder), last
        shutil.rmtree(folder)
    assert last > 8


class Recorder(FileOperations):
    """Keeps all bytes that are written."""

    def __init__(self):
        self.written = bytearray()

    def write(self, handle, data):
        self.written += data
        super().write(handle, data)


def test_no_plain_byte_and_no_key_is_written(tmp_path, identity, capfd):
    tokens = np.tile(CANARY, 40)
    write_small(tmp_path / "plain", [tokens], vocab_size=65536)
    assert CANARY.tobytes() in b"".join(tree(tmp_path / "plain").values())
    recorder = Recorder()

    encrypt_store(
        tmp_path / "plain", tmp_path / "sealed", recipients=[identity[0]], operations=recorder
    )

    opened = open_store(tmp_path / "sealed", key=identity[1])
    key = opened.parts[0].folder.contents.data_key
    everything = [bytes(recorder.written), *tree(tmp_path / "sealed").values()]
    everything += [text.encode() for text in capfd.readouterr()]
    everything += [repr(opened.parts[0].folder.contents).encode(), pickle.dumps(opened)]
    for secret in (CANARY.tobytes(), key, key.hex().encode()):
        assert not any(secret in each for each in everything)


def test_secrets_are_on_no_command_line(plain, tmp_path):
    """The key command sees the key on its input; its arguments, and ours, hold none."""
    script = tmp_path / "kms.py"
    script.write_text(
        "import pathlib, sys\n"
        "line = pathlib.Path('/proc/self/cmdline')\n"
        "parent = pathlib.Path(f'/proc/{__import__(\"os\").getppid()}/cmdline')\n"
        "data = sys.stdin.buffer.read()\n"
        "seen = b''.join(p.read_bytes() for p in (line, parent) if p.exists())\n"
        "key = data.split()[2] if data.startswith(b'mds-data-key') else b'-none-'\n"
        "sys.exit(9 if key in seen else sys.stdout.buffer.write(data) and 0)\n"
    )
    command = f"{sys.executable} {script}"
    assert (
        main(
            ["encrypt", str(plain), "--key-command", command, "--output", str(tmp_path / "sealed")]
        )
        == 0
    )


@pytest.mark.parametrize("cut", [1, 7, 64, [0, 5, 0, 95], [100]])
def test_any_part_of_a_sealed_file_can_be_read(cut):
    plain = bytes(range(100))
    key = FileKey(data_key=bytes(32), folder=bytes(16), path="p", file_id=bytes(16))
    parts = memoryview(plain)
    position = 0

    def read(count):
        nonlocal position
        position += count
        return parts[position - count : position]

    stored = b"".join(sealed_blocks(read, size=100, cut=cut, key=key))
    file = SealedFile(lambda at, count: stored[at : at + count], len(stored), key=key, name="f")

    assert len(stored) == sealed_size(100, cut)
    for start, stop in [(0, 100), (0, 0), (3, 50), (63, 65), (99, 100), (5, 6), (100, 100)]:
        assert bytes(file.read(start, stop)) == plain[start:stop]
    with pytest.raises(SealedError, match="ends at byte 100"):
        file.read(0, 101)
    for end in range(0, len(stored), 9):
        with pytest.raises(SealedError):
            SealedFile(lambda at, count: stored[at : at + count], end, key=key, name="f").check()


@pytest.mark.parametrize("cut", [2**20, 2**14, 300_000, [5, 2**20, 0, 2**20 - 5, 7, 2**19, 2**18]])
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_hold_whole_segments_and_old_libraries_write_the_same(monkeypatch, cut, in_place):
    """Libraries before cryptography 47 can't seal into a place."""
    plain = np.random.default_rng(1).bytes(sum(cut) if isinstance(cut, list) else 2_700_000)
    stored = sealed_bytes(plain, cut=cut)
    if not in_place:

        class Older:
            def __init__(self, key):
                aes = AESGCM(key)
                self.encrypt, self.decrypt = aes.encrypt, aes.decrypt

        monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", Older)
        assert sealed_bytes(plain, cut=cut) == stored
    file = SealedFile(lambda at, count: stored[at : at + count], len(stored), key=KEY, name="f")

    blocks = list(file.blocks())

    assert b"".join(blocks) == plain
    assert max(map(len, blocks)) <= 2**20
    assert bytes(file.read(3, 2_500_001)) == plain[3:2_500_001]


def test_segments_end_where_chunks_do():
    assert cut_at([0, 10, 20], 25) == 10
    assert cut_at([0, 10, 20], 35) == [10, 10, 15]
    assert cut_at([0, 10, 15], 20) == [10, 5, 5]
    assert cut_at([], 0) == 2**20


JUNK = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.sampled_from(["../x", "key-1.age", "manifest.sealed", "0" * 64, "age", "scrypt"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["kind", "file", "size", "sealed"]), st.integers(), max_size=2),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_forged_envelope_is_refused_by_our_own_errors(one_sealed, data):
    """An attacker makes the envelope's own digest right, too."""
    folder, key, good = one_sealed
    members = json.loads(good)
    place = members
    while True:
        name = data.draw(st.sampled_from(sorted(place)))
        inner = place[name]
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            inner = inner[0]
        if not isinstance(inner, dict) or data.draw(st.booleans()):
            break
        place = inner
    place[name] = data.draw(JUNK)
    members["digest"] = "0" * 64
    blank = json.dumps(members).encode()
    at = blank.rindex(b"0" * 64)
    digest = hashlib.sha256(blank).hexdigest().encode()
    (folder / "manifest.json").write_bytes(blank[:at] + digest + blank[at + 64 :])

    with suppress(DataError):
        open_store(folder, key=key)
    assert isinstance(verify_store(folder).problems, tuple)


@pytest.fixture(scope="module")
def one_sealed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged")
    write_small(folder / "plain", DOCUMENTS[:3], chunks_per_shard=64)
    recipient = keys.new_identity(folder / "key.txt")
    encrypt_store(folder / "plain", folder / "sealed", recipients=[recipient])
    good = (folder / "sealed" / "manifest.json").read_bytes()
    return folder / "sealed", KeySource(identity=folder / "key.txt"), good


def test_a_newer_version_is_refused_by_name(sealed, identity):
    path = sealed / "manifest.json"
    members = json.loads(path.read_text())
    members["encryption"]["version"] = "2.0"
    path.write_text(json.dumps(members))

    with pytest.raises(SealedError, match=r"version 2\.0 .*newer release"):
        open_store(sealed, key=identity[1])


def test_a_missing_library_names_the_extra(sealed, identity, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyrage", None)

    with pytest.raises(ImportError, match=r"mds-data\[encrypt\]"):
        open_store(sealed, key=identity[1])


def test_masked_samples_of_an_encrypted_store_take_the_tokenizer_given(tmp_path, identity):
    recipient, key = identity
    one = sentence_store(tmp_path)
    encrypt_store(one.path, tmp_path / "sealed", recipients=[recipient])
    other = open_store(tmp_path / "sealed", key=key)
    with pytest.raises(StoreError, match="give the tokenizer"):
        BertDataset(other, seq_length=32, num_samples=3)
    vocabulary = store_vocabulary(one, None)

    first, second = (
        BertDataset(store, seq_length=32, num_samples=3, vocabulary=vocabulary)
        for store in (one, other)
    )

    np.testing.assert_array_equal(first[2]["tokens"], second[2]["tokens"])
