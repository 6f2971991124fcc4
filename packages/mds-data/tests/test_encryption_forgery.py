"""Changed, swapped, shortened and older files of an encrypted store are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from dataclasses import replace

import pytest
from encryption_material import DOCUMENTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_material import write_small

from mds_data import (
    DataError,
    KeySource,
    SealedError,
    open_store,
)
from mds_data.cli import main
from mds_data.encryption import keys
from mds_data.encryption.envelope import envelope_from_json, envelope_to_json
from mds_data.store.encrypt import encrypt_store
from mds_data.store.erase import erase_documents
from mds_data.store.verify import verify_store


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
