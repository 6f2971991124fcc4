import json

import pytest

from mds_data.errors import ManifestError
from mds_data.store.schema import (
    Counts,
    Erasure,
    FileRecord,
    Manifest,
    Segment,
    TokenizerRecord,
    manifest_from_json,
    manifest_to_json,
)

HEX = "ab" * 32


@pytest.fixture
def manifest():
    return Manifest(
        uuid="u",
        vocab_size=600,
        eod_id=599,
        dtype="uint16",
        layout="hot",
        counts=Counts(documents=3, tokens=9, sentences=4),
        files={"zarr.json": FileRecord(size=1, sha256=HEX)},
        created="2026-01-01T00:00:00Z",
        tokenizer=TokenizerRecord(kind="HFTokenizer", file="zarr.json", sha256=HEX),
        split={"train": (0.0, 0.95), "valid": (0.95, 1.0)},
        segments=(
            Segment(
                path="segments/0000",
                uuid="v",
                revision=2,
                manifest_sha256=HEX,
                documents=3,
                tokens=9,
            ),
        ),
        erasures=(
            Erasure(documents=(1, 2), when="2026-01-02T00:00:00Z", reason="asked", tokens=5),
        ),
        requires=("segments/1",),
        provenance={"inputs": [{"path": "a"}]},
    )


def altered(manifest, **members):
    value = json.loads(manifest_to_json(manifest))
    del value["digest"]
    for key, item in members.items():
        if item is ...:
            del value[key]
        else:
            value[key] = item
    return json.dumps(value).encode()


def test_a_manifest_comes_back_as_it_was_written(manifest):
    assert manifest_from_json(manifest_to_json(manifest)) == manifest


def test_members_that_are_not_known_are_passed_over(manifest):
    assert manifest_from_json(altered(manifest, novelty={"a": 1})) == manifest


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"format": "other"}, "format must be 'mds-store'"),
        ({"format_version": "2.0"}, "version 2.0, and mds-data .* reads version 1.x"),
        ({"format_version": "one"}, "must be MAJOR.MINOR"),
        ({"requires": ["segments/1", "time-travel/3"]}, "requires 'time-travel/3'.*newer mds-data"),
        ({"requires": "segments/1"}, "requires must be a list"),
        ({"encryption": {"keys": []}}, "requires 'encryption/1'"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"vocab_size": 600.0}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"vocab_size": 2**31}, "vocab_size must be a whole number"),
        ({"vocab_size": 10**6}, "dtype uint16 can't hold"),
        ({"eod_id": 600}, r"eod_id \(600\) must be smaller"),
        ({"dtype": "float32"}, "dtype must be one of"),
        ({"layout": "warm"}, "layout must be one of"),
        ({"revision": 0}, "revision must be a whole number from 1"),
        ({"counts": {"documents": -1, "tokens": 0}}, "counts.documents must be"),
        ({"counts": []}, "counts must be an object"),
        ({"split": {"train": [0.5, 0.2]}}, "split"),
        ({"split": {"train": [0.5]}}, "split"),
        ({"files": {"../x": {"size": 1, "sha256": HEX}}}, "leaves the store's folder"),
        ({"files": {"/etc/passwd": {"size": 1, "sha256": HEX}}}, "leaves the store's folder"),
        ({"files": {"a//b": {"size": 1, "sha256": HEX}}}, "leaves the store's folder"),
        ({"files": {"a\\b": {"size": 1, "sha256": HEX}}}, "characters that no store uses"),
        ({"files": {"a\x1bb": {"size": 1, "sha256": HEX}}}, "characters that no store uses"),
        ({"files": {"C:x": {"size": 1, "sha256": HEX}}}, "characters that no store uses"),
        ({"files": {"manifest.json": {"size": 1, "sha256": HEX}}}, "names the manifest itself"),
        ({"files": {"a": {"size": 2**63, "sha256": HEX}}}, "size must be a whole number"),
        ({"files": {"a": {"size": 1, "sha256": "AB" * 32}}}, "must be a SHA-256"),
        ({"files": {"a": 1}}, "must be an object"),
        ({"segments": [{"path": "../s"}]}, "leaves the store's folder"),
        ({"segments": {}}, "segments must be a list"),
        ({"erasures": [{"documents": ["1"]}]}, "list of document numbers"),
        ({"tokenizer": {"kind": "x", "file": "/x", "sha256": HEX}}, "leaves the store's folder"),
    ],
)
def test_what_breaks_the_format_is_refused_in_one_sentence(manifest, members, reason):
    with pytest.raises(ManifestError, match=reason) as caught:
        manifest_from_json(altered(manifest, **members), name="S/manifest.json")
    assert str(caught.value).startswith("S/manifest.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"nonsense",
        b"\xff\xfe",
        b'{"format": "mds-store", "format": "mds-store"}',
        b'{"format": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b"[" * 200_000,
    ],
)
def test_what_is_no_strict_json_is_refused(data):
    with pytest.raises(ManifestError):
        manifest_from_json(data)


def test_any_flipped_bit_of_the_manifest_is_noticed(manifest):
    data = manifest_to_json(manifest)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8

        try:
            read = manifest_from_json(bytes(flipped))
        except ManifestError:
            continue

        # the digest's own name may be hit: it is then a member that is not known
        assert read == manifest
