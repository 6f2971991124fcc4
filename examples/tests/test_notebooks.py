"""Each notebook runs from the top to the bottom; `nox -s examples` runs this."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def run(path: Path, folder: Path) -> str:
    """Run a notebook as a person would, and return all that it printed."""
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=300, kernel_name="python3")
    client.execute(cwd=str(folder))
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return "".join(str(output.get("text", output.get("data", ""))) for output in outputs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("convert_a_checkpoint", ["52 tensors compared; []", "checksum", "posix.system"]),
        ("embed_the_dataset_library", ["documents", "consumed_samples", "unigram entropy"]),
        ("train_and_watch", ["resumed at (30,)", "image/png", "28 tensors used, each once"]),
    ],
)
def test_a_notebook_runs_and_shows(name: str, words: list[str], tmp_path: Path) -> None:
    (path,) = (path for path in NOTEBOOKS if path.stem == name)

    shown = run(path, tmp_path)

    for word in words:
        assert word in shown, shown


def test_every_notebook_is_run() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "convert_a_checkpoint",
        "embed_the_dataset_library",
        "train_and_watch",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_kept(path: Path) -> None:
    """What is printed depends on machine and day; kept, it would soon be wrong."""
    book = nbformat.read(path, as_version=4)

    for cell in book.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
