"""Licences and sources of inputs come through every command, and a policy can refuse them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import mds_data
from mds_data.cli import main
from mds_data.errors import DataError
from mds_data.provenance.family import families_of, store_families
from mds_data.provenance.licence import PRESETS, check_expression, read_policy
from mds_data.store.folder import read_manifest
from mds_data.store.origins import manifests_within

TEXTS = ["11 12 13 14", "21 22 23 24", "31 32 33 34"]
"""Numbers, which the null tokenizer takes for tokens and filters take for words."""


def write_records(path: str, records: list[dict[str, str]]) -> None:
    Path(path).write_text("".join(f"{json.dumps(each)}\n" for each in records))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        write_records(f"{name}.jsonl", [{"text": text, "of": name} for text in TEXTS])
    return tmp_path


def preprocess(output: str, *inputs: str, options: tuple[str, ...] = ()) -> int:
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "300")
    command = ["preprocess", "--input", *inputs, "--output", output, "--workers", "1"]
    return main([*command, *tokenizer, *options])


def licences_in(path: str) -> list[tuple[str, str | None]]:
    found = store_families(Path(path), read_manifest(Path(path))[0])
    return [(each.source, each.licence) for each in found]


# Expressions and policies


@pytest.mark.parametrize(
    ("licence", "policy", "accepted"),
    [
        ("CC-BY-4.0", "permissive", True),
        ("cc-by-4.0", "open", True),
        ("CC-BY-SA-4.0", "permissive", False),
        ("CC-BY-SA-4.0", "open", True),
        ("CC-BY-NC-4.0", "open", False),
        ("CC-BY-ND-4.0", "open", False),
        ("CC-BY-NC-SA-4.0", "known", True),
        ("MIT OR CC-BY-NC-4.0", "open", True),
        ("MIT AND CC-BY-NC-4.0", "open", False),
        ("(MIT OR CC-BY-NC-4.0) AND CC-BY-ND-4.0", "open", False),
        ("(MIT AND ISC) OR CC-BY-ND-4.0", "permissive", True),
        ("Apache-2.0 WITH LLVM-exception", "permissive", True),
        ("GPL-2.0+", "permissive", False),
        ("LicenseRef-Ours", "open", False),
        ("LicenseRef-Ours", "known", True),
        (None, "known", False),
        ("do what you want", "known", False),
    ],
)
def test_a_policy_takes_what_can_be_used_and_nothing_else(
    licence: str | None, policy: str, accepted: bool
) -> None:
    assert (PRESETS[policy].fault(licence) is None) == accepted


def test_a_policy_file_says_what_is_taken(tmp_path: Path) -> None:
    Path("p.toml").write_text('allow = ["CC-*"]\ndeny = ["*-SA-*"]\nunknown = "accept"\n')

    policy = read_policy("p.toml")

    verdicts = [policy.fault(each) for each in ("CC-BY-4.0", "CC-BY-SA-4.0", "MIT", None)]
    assert [each is None for each in verdicts] == [True, False, False, True]


@pytest.mark.parametrize(
    "text",
    [
        *("allow = 3", "allow = [1]", "allowed = []", "x = ", "unknown = 1"),
        *("[" + "a." * 100_000 + "a]", "#" * 2**21, "a = " + "[" * 10_000 + "]" * 10_000),
    ],
    ids=range(8),
)
def test_a_policy_file_with_a_mistake_is_refused(text: str) -> None:
    Path("p.toml").write_text(text)

    with pytest.raises(DataError, match=r"p\.toml"):
        read_policy("p.toml")


def test_a_licence_that_spdx_does_not_list_is_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_expression("mit") == "MIT"
    assert preprocess("store", "a.jsonl", options=("--licence", "Free Beer")) == 2
    assert "SPDX" in capsys.readouterr().err
    assert not Path("store").exists()


# Through the commands


def test_a_store_keeps_licence_address_and_terms_of_each_input() -> None:
    Path("s.toml").write_text(
        '[[source]]\nfiles = "a.*"\nlicence = "CC-BY-4.0"\nurl = "https://e.org/a"\n'
        'retrieved = 2026-02-03\n[[source]]\nfiles = "*"\nlicence = "MIT"\nterms = "by letter"\n'
    )

    assert preprocess("store", "a.jsonl", "b.jsonl", options=("--sources", "s.toml")) == 0

    inputs = read_manifest(Path("store"))[0].provenance["inputs"]
    assert inputs[0] | {"licence": "CC-BY-4.0", "retrieved": "2026-02-03"} == inputs[0]
    assert inputs[1]["terms"] == "by letter"
    assert licences_in("store") == [
        ("https://e.org/a", "CC-BY-4.0"),
        ("b.jsonl", "MIT"),
    ]


def test_filters_hand_on_where_their_output_comes_from() -> None:
    write_records("quiz.jsonl", [{"text": "91 92 93 94 95"}])
    one = ("--workers", "1")
    first = ("--licence", "CC0-1.0", "--source-url", "https://e.org/first", "--min-words", "2")
    held = ("--against", "quiz.jsonl", "--words", "5", "--min-words", "5")
    steps = {"clean": first, "dedup": (), "decontaminate": held, "redact": ()}
    files = ["a.jsonl", "1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]

    for (name, options), (source, target) in zip(steps.items(), pairwise(files), strict=True):
        assert main([name, "--input", source, "--output", target, *one, *options]) == 0
    assert preprocess("store", "4.jsonl") == 0

    assert licences_in("store") == [("https://e.org/first", "CC0-1.0")]
    (record,) = read_manifest(Path("store"))[0].provenance["inputs"]
    names = []
    while origin := record.get("origin"):
        names += [each["name"] for each in origin["transforms"]]
        (record,) = origin["inputs"]
    assert names == ["redact", "decontaminate", "dedup", "clean"]
    assert record["path"] == "a.jsonl"


def test_merged_joined_split_and_repacked_stores_know_all_sources() -> None:
    preprocess("one", "a.jsonl", options=("--licence", "MIT"))
    preprocess("two", "b.jsonl", options=("--licence", "CC-BY-NC-4.0"))
    preprocess("three", "c.jsonl")
    wanted = ["MIT", "CC-BY-NC-4.0", None]

    main(["merge", "one", "two", "--output", "inner"])
    main(["merge", "inner", "three", "--output", "merged"])
    main(["merge", "inner", "three", "--rewrite", "--output", "joined"])
    main(["repack", "merged", "--layout", "archive", "--output", "packed"])
    main(["split", "packed", "--split", "50,50,0", "--output", "parts"])

    for path in ("merged", "joined", "packed", "parts/train", "parts/valid"):
        assert [licence for _, licence in licences_in(path)] == wanted, path


def test_a_resumed_or_repeated_run_with_another_licence_is_another_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--licence", "MIT", "--resume")
    assert preprocess("store", "a.jsonl", options=options) == 0
    assert preprocess("store", "a.jsonl", options=options) == 0
    capsys.readouterr()

    assert preprocess("store", "a.jsonl", options=("--licence", "ISC", "--resume")) == 3
    assert "exists" in capsys.readouterr().err


def test_pairs_and_conversations_keep_their_sources_too() -> None:
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "300")
    write_records("p.jsonl", [{"source": "1 2", "target": "3 4"}])
    command = ["preprocess-nmt", "--input", "p.jsonl", "--output", "pairs", "--workers", "1"]

    assert main([*command, *tokenizer, "--licence", "CC-BY-4.0"]) == 0

    assert licences_in("pairs") == [("p.jsonl", "CC-BY-4.0")]


# What can go wrong


def test_a_record_beside_other_bytes_of_the_same_size_vouches_for_nothing() -> None:
    main(
        [
            "clean",
            "--input",
            "a.jsonl",
            "--licence",
            "MIT",
            "--min-words",
            "2",
            "--output",
            "x.jsonl",
            "--workers",
            "1",
        ]
    )
    preprocess("store", "x.jsonl")
    provenance = dict(read_manifest(Path("store"))[0].provenance)
    assert [each.licence for each in families_of(provenance, name="store")] == ["MIT"]

    provenance["inputs"][0]["sha256"] = "0" * 64

    assert [each.licence for each in families_of(provenance, name="store")] == [None]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"a":1,"a":2}', "[" * 100_000, '{"format":"mds-provenance","file":{}}'],
)
def test_a_damaged_record_is_an_error_and_no_store_is_left(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl.provenance.json").write_text(content)

    command = ["preprocess", "--input", "a.jsonl", "--output", "store", "--workers", "1"]
    code = main([*command, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"])

    assert code == 3
    assert "a.jsonl.provenance.json" in capsys.readouterr().err
    assert not Path("store").exists()


def test_a_pattern_that_covers_no_input_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text('[[source]]\nfiles = "A.jsonl"\nlicence = "MIT"\n')

    assert preprocess("store", "a.jsonl", options=("--sources", "s.toml")) == 3
    assert "A.jsonl" in capsys.readouterr().err


def test_a_glob_of_filtered_files_leaves_their_records_out() -> None:
    main(
        [
            "clean",
            "--input",
            "a.jsonl",
            "--min-words",
            "2",
            "--output",
            "out/x.jsonl",
            "--workers",
            "1",
        ]
    )

    assert main(["dedup", "--input", "out/*", "--output", "y.jsonl", "--workers", "1"]) == 0

    assert len(Path("y.jsonl").read_text().splitlines()) == len(TEXTS)


def test_segments_in_segments_without_end_are_refused() -> None:
    preprocess("one", "a.jsonl")
    main(["merge", "one", "one", "--output", "merged"])
    root, manifest = Path("merged"), read_manifest(Path("merged"))[0]

    with pytest.raises(DataError, match="deep"):
        list(manifests_within(root, manifest, depth=33))


def test_thousands_of_files_become_families_of_folders() -> None:
    inputs = [{"path": f"web/{n % 7}/{n}.jsonl", "size": 2, "licence": "MIT"} for n in range(5000)]

    found = families_of({"inputs": inputs}, name="store")

    assert (found[0].source, found[0].bytes) == ("web/0", 1430)
    assert sum(each.files for each in found) == 5000
    assert len(found) == 7


# The command, the page and the description


def test_licences_lists_sources_and_fails_on_what_the_policy_refuses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    preprocess("good", "a.jsonl", options=("--licence", "MIT", "--terms", "\x1b[31mred"))
    preprocess("bad", "b.jsonl")
    capsys.readouterr()

    assert main(["licences", "good"]) == 0
    shown = capsys.readouterr().out
    assert main(["licences", "good", "bad", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)

    assert "\x1b" not in shown
    assert "0 of 1 sources refused" in shown
    assert [each["sources"][0]["refused"] for each in told["stores"]] == [
        None,
        "no licence is recorded",
    ]


def test_the_page_shows_hostile_facts_as_text() -> None:
    hostile = "<script>alert(1)</script>"
    preprocess("store", "a.jsonl", options=("--source-url", hostile))

    assert main(["inspect", "store", "--html", "page.html"]) == 0

    assert hostile not in Path("page.html").read_text()
    assert "&lt;script&gt;" in Path("page.html").read_text()


def test_a_description_for_catalogues_names_files_and_licences() -> None:
    preprocess("store", "a.jsonl", options=("--licence", "CC-BY-4.0", "--terms", "cite us"))

    assert main(["inspect", "store", "--croissant", "c.json"]) == 0

    told = json.loads(Path("c.json").read_text())
    with mds_data.open_store("store") as store:
        assert {each["@id"] for each in told["distribution"]} == {
            "manifest.json",
            *store.manifest.files,
        }
    assert told["license"] == ["https://spdx.org/licenses/CC-BY-4.0.html"]
    assert told["prov:wasDerivedFrom"][0]["usageInfo"] == "cite us"
