"""Names of persons through the real Presidio and spaCy, with a model that is made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

spacy = pytest.importorskip("spacy", reason="spaCy is not installed")
pytest.importorskip("presidio_analyzer", reason="Presidio is not installed")

from mds_data.cli import main  # noqa: E402
from mds_data.privacy import names  # noqa: E402
from mds_data.privacy.rules import RedactionRules  # noqa: E402

TEXT = "Yesterday Angela Merkel wrote to John Smith <john@example.org> about Berlin."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that knows two names, in place of one that would have to be downloaded."""
    language = spacy.blank("en")
    ruler = language.add_pipe("entity_ruler")
    known = ["Angela Merkel", "John Smith", "NAME"]
    ruler.add_patterns([{"label": "PERSON", "pattern": name} for name in known])
    folder = tmp_path_factory.mktemp("models") / "en_two_names"
    language.to_disk(folder)
    return str(folder)


def test_names_are_replaced_with_all_else(model: str) -> None:
    redactor = RedactionRules(names=model).redactor()

    once = redactor(TEXT)

    assert once == "Yesterday <NAME> wrote to <NAME> <<EMAIL>> about Berlin."
    assert redactor(once) == once
    assert redactor.counts == {"NAME": 2, "EMAIL": 1}
    kept = RedactionRules(names=model, allow=("Angela Merkel",)).redactor()
    assert "Angela Merkel" in kept(TEXT)


def test_long_texts_are_cut_for_the_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_MOST", 200)
    text = f"{TEXT}\n" * 40

    found = names.NameFinder(model)(text)

    assert [text[start:end] for start, end, _ in found].count("John Smith") == 40


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_commands_take_a_model(
    tmp_path: Path, model: str, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    command = ["redact", "--input", "raw.jsonl", "--output", "clean.jsonl", "--workers", workers]

    assert main([*command, "--names", model, "--report", "report.json"]) == 0

    assert "Merkel" not in Path("clean.jsonl").read_text()
    report = json.loads(Path("report.json").read_text())
    assert report["replaced"]["NAME"] == 2
    assert report["rules"]["names"] == "en_two_names"


def test_nothing_is_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "raw.jsonl"
    source.write_text('{"text": "a"}\n')
    command = ["redact", "--input", str(source), "--output", str(tmp_path / "out.jsonl")]

    assert main([*command, "--names", "en_no_such_model"]) == 3
    assert "is not installed, and nothing is downloaded" in capsys.readouterr().err
