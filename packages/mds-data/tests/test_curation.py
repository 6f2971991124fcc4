"""clean, dedup and decontaminate remove what they should, say why, and leave the rest alone."""

from __future__ import annotations

import gzip
import json
import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_material import WORDS, write_jsonl

from mds_data.cli import main
from mds_data.curation.filters import RepetitionLimits, repetition_faults
from mds_data.curation.minhash import band_keys, plan_bands, shingles, signature
from mds_data.curation.spill import KeySpill
from mds_data.curation.words import hash_sequences, word_hashes, words_of

CHANCE = random.Random(5)


def sentence_of(words: int, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"{chance.choice(WORDS)}{chance.randrange(50)}" for _ in range(words))


def changed(text: str, *, words: int, seed: int) -> str:
    parts = text.split(" ")
    for place in random.Random(seed).sample(range(len(parts)), words):
        parts[place] = "other"
    return " ".join(parts)


def jaccard(one: str, other: str, *, size: int = 5) -> float:
    """The index by sets of strings, without any hash."""
    left, right = (
        {tuple(words[n : n + size]) for n in range(len(words) - size + 1)}
        for words in (text.lower().split() for text in (one, other))
    )
    return len(left & right) / len(left | right)


def read(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, *arguments: str) -> int:
    return main([command, "--workers", "1", "--output", "out.jsonl", *arguments])


# dedup


def near_corpus() -> tuple[list[str], set[int]]:
    """Texts, and which of them are copies of earlier ones by the exact Jaccard index."""
    texts = [sentence_of(200, seed) for seed in range(30)]
    texts += [changed(texts[n], words=2, seed=n) for n in range(10)]  # 0.90 and more alike
    texts += [changed(texts[n], words=60, seed=n) for n in range(10, 20)]  # less than 0.2
    texts += [changed(texts[n], words=8, seed=n + 50) for n in range(20, 30)]  # about 0.66
    texts += [texts[n].upper().replace(" ", ", ") for n in range(20, 25)]  # the same words
    copies = set()
    for first, second in combinations(range(len(texts)), 2):
        plain = [texts[n].lower().replace(",", "") for n in (first, second)]
        if jaccard(*plain) >= 0.8:
            copies.add(second)
    return texts, copies


def test_near_copies_are_those_of_the_exact_jaccard_index() -> None:
    texts, copies = near_corpus()
    write_jsonl(Path("in.jsonl"), texts)

    assert (
        run("dedup", "--input", "in.jsonl", "--report", "why.json", "--removed", "gone.jsonl") == 0
    )

    assert len(copies) == 15
    assert [row["text"] for row in read("out.jsonl")] == [
        text for number, text in enumerate(texts) if number not in copies
    ]
    report = json.loads(Path("why.json").read_text())
    assert (report["records"], report["kept"]) == (65, 50)
    assert report["removed"]["copy"]["count"] == 5
    assert report["removed"]["near copy"]["first"][0]["detail"].endswith("like in.jsonl line 1")
    assert {row["line"] - 1 for row in read("gone.jsonl")} == copies
    assert read("gone.jsonl")[0]["record"] == {"text": texts[30]}
    assert not list(Path().glob("*.work-*"))


def test_exact_mode_removes_the_same_text_only() -> None:
    rows = [{"text": "a b", "id": 1}, {"text": "a b  \n", "id": 2}, {"text": "A b", "id": 3}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert run("dedup", "--input", "in.jsonl", "--mode", "exact") == 0

    assert [row["id"] for row in read("out.jsonl")] == [1, 3]


def test_the_number_of_workers_does_not_matter() -> None:
    texts, _ = near_corpus()
    write_jsonl(Path("in.jsonl"), texts * 3)
    outputs = []
    for workers in ("1", "2"):
        command = ["dedup", "--input", "in.jsonl", "--workers", workers]
        assert (
            main([*command, "--output", f"{workers}.jsonl.gz", "--report", f"{workers}.json"]) == 0
        )
        outputs.append(
            (Path(f"{workers}.jsonl.gz").read_bytes(), Path(f"{workers}.json").read_text())
        )

    assert outputs[0] == outputs[1]
    assert len(gzip.decompress(outputs[0][0]).splitlines()) == 50


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 2**32))
def test_signatures_estimate_the_exact_index(words: int, seed: int) -> None:
    one = sentence_of(120, seed)
    other = changed(one, words=words, seed=seed)

    rows = [signature(shingles(text, size=5), count=256) for text in (one, other)]

    estimate = float((rows[0] == rows[1]).mean())
    assert abs(estimate - jaccard(one, other)) < 4.5 * 0.5 / 256**0.5


def test_the_bands_find_what_is_alike_and_little_else() -> None:
    plan = plan_bands(128, threshold=0.8)

    assert plan.chance(0.9) > 0.99
    assert plan.chance(0.8) > 0.6
    assert plan.chance(0.4) < 0.1
    row = np.arange(128, dtype=np.uint32)
    keys = band_keys(row, plan)
    row[0] = 9
    assert (band_keys(row, plan) != keys).tolist() == [True] + [False] * (plan.bands - 1)


@pytest.mark.parametrize("most", [4, 50, 10**6])
def test_keys_on_disk_give_the_groups_of_a_dictionary(tmp_path: Path, most: int) -> None:
    chance = np.random.default_rng(3)
    pool = chance.integers(0, 2**63, 100, dtype=np.uint64)
    keys = np.concatenate([pool[chance.integers(0, 100, 500)], np.full(300, pool[0])])
    spill = KeySpill(tmp_path / "keys", most=most)
    for start in range(0, len(keys), 90):
        block = keys[start : start + 90]
        spill.add(block, np.arange(start, start + len(block), dtype=np.uint64))

    joined: dict[int, set[int]] = {}
    for group in spill.groups():
        (key,) = {int(keys[document]) for document in group.tolist()}
        joined.setdefault(key, set()).update(group.tolist())

    expected: dict[int, set[int]] = {}
    for document, key in enumerate(keys.tolist()):
        expected.setdefault(key, set()).add(document)
    assert joined == {key: group for key, group in expected.items() if len(group) > 1}
    assert not (tmp_path / "keys").exists()


# decontaminate

QUESTION = (
    "Which of the seven rivers that cross the old town has no bridge "
    "because its banks are too far apart?"
)


def test_a_text_with_a_test_question_is_removed_however_it_is_written() -> None:
    before, after = sentence_of(100, 1), sentence_of(100, 2)
    hidden = QUESTION.upper().replace(" ", "\n ").replace("?", " -- !")
    write_jsonl(Path("in.jsonl"), [before, f"{before} {hidden} {after}", after])
    write_jsonl(Path("tests.jsonl"), [QUESTION, "Too short."], key="question")

    command = ("--input", "in.jsonl", "--against", "tests.jsonl", "--against-keys", "question")
    assert run("decontaminate", *command, "--report", "why.json") == 0

    assert [row["text"] for row in read("out.jsonl")] == [before, after]
    report = json.loads(Path("why.json").read_text())
    (first,) = report["removed"]["contaminated"]["first"]
    assert first["line"] == 2
    assert "tests.jsonl: 'which of the seven rivers" in first["detail"]
    assert report["notes"] == {
        "references": 2,
        "references too short to look for": 1,
        "texts that hold part of tests.jsonl": 1,
    }


def test_a_part_of_a_question_that_is_too_short_is_no_leak() -> None:
    words = QUESTION.split()
    write_jsonl(Path("in.jsonl"), [" ".join(words[:12]), " ".join(words[:13])])
    Path("tests.txt").write_text(f"{QUESTION}\none two three four five six seven eight nine\n")

    assert run("decontaminate", "--input", "in.jsonl", "--against", "tests.txt") == 0

    assert [row["text"] for row in read("out.jsonl")] == [" ".join(words[:12])]


def test_cutting_keeps_the_pieces_around_the_place() -> None:
    before, after = "b" * 150 + " " + "x" * 50, "y" * 50 + " " + "a" * 150
    rows = [{"text": f"{before} {QUESTION} {after}", "id": 7}, {"text": QUESTION, "id": 8}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("tests.txt").write_text(QUESTION + "\n")

    options = ("--action", "cut", "--margin", "60", "--min-piece", "100")
    assert run("decontaminate", "--input", "in.jsonl", "--against", "tests.txt", *options) == 0

    pieces = read("out.jsonl")
    assert [row["id"] for row in pieces] == [7, 7]
    assert set(pieces[0]["text"]) == {"b"}
    assert set(pieces[1]["text"]) == {"a"}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_many_texts_hold_is_no_leak_if_asked(workers: str) -> None:
    licence = "permission is hereby granted free of charge to any person obtaining a copy of this"
    texts = [f"{licence} text number {number}" for number in range(4)]
    texts += [f"{licence} text {QUESTION}", f"{QUESTION} and {QUESTION}"]
    write_jsonl(Path("in.jsonl"), texts)
    Path("tests.txt").write_text(f"{licence}\n{QUESTION}\n")
    command = ["decontaminate", "--input", "in.jsonl", "--against", "tests.txt", "--workers"]

    for most, kept in (("5", []), ("4", texts[:4]), ("1", texts)):
        options = ["--max-texts", most, "--report", "why.json", "--overwrite"]
        assert main([*command, workers, "--output", "out.jsonl", *options]) == 0
        assert [row["text"] for row in read("out.jsonl")] == kept

    report = json.loads(Path("why.json").read_text())
    windows = len(licence.split()) - 12 + len(QUESTION.split()) - 12
    assert report["notes"]["sequences ignored as common"] == windows
    task = ["--max-texts", "5", "--task", "1/1", "--output", "part.jsonl"]
    assert main([*command, workers, *task]) == 2


def test_references_that_say_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(Path("in.jsonl"), ["a"])
    Path("tests.txt").write_text("yes\nno\n")

    assert run("decontaminate", "--input", "in.jsonl", "--against", "tests.txt") == 3
    assert "no reference has 8 words" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=30), st.integers(1, 5))
def test_sequences_have_equal_hashes_exactly_where_words_are_equal(
    words: list[str], size: int
) -> None:
    hashes = hash_sequences(word_hashes(words), size).tolist()

    runs = [tuple(words[n : n + size]) for n in range(len(words) - size + 1)]
    assert len(hashes) == len(runs)
    assert len(set(zip(hashes, runs, strict=True))) == len(set(runs)) == len(set(hashes))


def test_words_of_scripts_without_spaces_are_their_characters() -> None:
    assert words_of("Don't 你好, x1!") == ["don", "t", "你", "好", "x1"]


# clean


def test_texts_are_judged_by_length_and_keep_their_bytes() -> None:
    lines = ['{"text": "one two",   "id": 1}', '{"text": "one two three four"}', '{"text": ""}']
    Path("in.jsonl").write_text("\n".join(lines) + "\n")

    limits = ("--min-words", "2", "--max-characters", "10")
    assert run("clean", "--input", "in.jsonl", *limits, "--report", "why.json") == 0

    assert Path("out.jsonl").read_text() == lines[0] + "\n"
    removed = json.loads(Path("why.json").read_text())["removed"]
    assert removed["length"]["first"][0]["detail"] == "18 characters, more than 10"
    assert removed["empty"]["count"] == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "\n".join(["the same line again"] * 3 + ["another one", "one more line"]),
            "40% of the lines",
        ),
        (
            "\n".join([sentence_of(20, 1)] * 2 + ["a", "b", "c", "d", "e", "f"]),
            "of the characters lie",
        ),
        ("\n\n".join(["one\ntwo", "three\nfour"] + ["five\nsix"] * 2), "repeat"),
        ("buy now " * 10 + sentence_of(40, 2), "of the text is 'buy now'"),
        (" ".join([sentence_of(30, 3), sentence_of(200, 4), sentence_of(30, 3)]), "sequences of"),
    ],
)
def test_each_kind_of_repetition_is_named(text: str, fault: str) -> None:
    found = list(repetition_faults(text, RepetitionLimits()))

    assert any(fault in each for each in found), found


@pytest.mark.parametrize("text", ["", "word", sentence_of(300, 9), "line one\nline two\n\nend"])
def test_ordinary_texts_do_not_repeat(text: str) -> None:
    assert list(repetition_faults(text, RepetitionLimits())) == []


def test_texts_are_mended_and_other_languages_removed() -> None:
    pytest.importorskip("ftfy")
    pytest.importorskip("py3langid")
    german = "Dieser deutsche Satz war lang genug, damit man es merken kann."
    english = "This is an English sentence that is long enough for anyone to tell it."
    write_jsonl(
        Path("in.jsonl"),
        [german, english, f"{english} The café is open.".encode().decode("latin-1")],
    )

    options = ("--fix-text", "--languages", "en", "--report", "why.json")
    assert run("clean", "--input", "in.jsonl", *options) == 0

    assert [row["text"] for row in read("out.jsonl")] == [english, f"{english} The café is open."]
    report = json.loads(Path("why.json").read_text())
    assert report["notes"] == {"texts mended": 1}
    assert report["removed"]["language"]["first"][0]["detail"].startswith("de (")


def test_an_unknown_language_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("py3langid")
    write_jsonl(Path("in.jsonl"), ["a"])

    assert run("clean", "--input", "in.jsonl", "--languages", "xx") == 3
    assert "the language 'xx' is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("clean",), "nothing to do"),
        (("clean", "--languages", "en", "--min-probability", "2"), "from 0 to 1"),
        (("dedup", "--threshold", "0"), "above 0"),
        (("dedup", "--permutations", "4"), "16 to 1024"),
        (("decontaminate", "--against", "x", "--min-words", "0"), "from 1"),
    ],
)
def test_settings_that_make_no_sense_are_wrong_usage(
    command: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command[0], "--input", "in.jsonl", *command[1:]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [("clean", "--min-words", "1"), ("dedup",)])
def test_broken_lines_stop_the_work_or_are_counted(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text('{"text": "a b"}\n{"text": \n{"other": "x"}\n')

    assert run(command[0], "--input", "in.jsonl", *command[1:]) == 3
    assert "in.jsonl, line 2: not JSON" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
    assert run(command[0], "--input", "in.jsonl", "--on-error", "skip", *command[1:]) == 0
    said = capsys.readouterr().err
    assert "skipped 1 for broken" in said
    assert "skipped 1 for no-key" in said
    assert len(read("out.jsonl")) == 1


def test_an_output_that_is_an_input_or_exists_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_jsonl(Path("out.jsonl"), ["a b"])

    assert run("clean", "--input", "out.jsonl", "--min-words", "1") == 3
    assert "is an input too" in capsys.readouterr().err
    write_jsonl(Path("in.jsonl"), ["a b"])
    assert run("clean", "--input", "in.jsonl", "--min-words", "1") == 3
    assert "replace it by --overwrite" in capsys.readouterr().err
