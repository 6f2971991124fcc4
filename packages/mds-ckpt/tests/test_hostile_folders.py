"""Folders that lie about their files: nothing is run, followed or waited for; all are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ckpt_samples import arrays, model, save

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.errors import RejectedError

if sys.platform == "win32":
    pytest.skip("links and FIFOs are POSIX", allow_module_level=True)

from hostile_folders import hostile_folders


def refusal(path: Path) -> RejectedError | None:
    """Why it is not opened or not read; None if all of it is read."""
    try:
        for tensors in open_checkpoint(path).states.values():
            for tensor in tensors.values():
                tensor.numpy()
    except RejectedError as error:
        return error
    return None


def test_every_hostile_folder_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    mark = tmp_path / "MARK"

    found = {name: refusal(path) for name, path in hostile_folders(tmp_path, mark).items()}

    assert [name for name, error in found.items() if error is None] == []
    assert not mark.exists()
    for error in found.values():
        assert error is not None
        assert error.reason
        assert error.remedy
        assert len(str(error)) < 4000


def test_a_file_that_is_swapped_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    """D12: what was checked and what is read are one open file, or it is refused."""
    record = model("llama", num_layers=1, vocab_size=5)
    folder = save(tmp_path / "in", record, arrays(record))
    other = save(tmp_path / "other", record, arrays(record, seed=1))
    file = next(folder.rglob("*.safetensors"))
    checkpoint = open_checkpoint(folder)
    checkpoint.tensor("embedding.word_embeddings.weight").numpy()

    next(path for path in other.rglob("*.safetensors") if path.name == file.name).replace(file)

    with pytest.raises(RejectedError, match=r"changed|differ"):
        _ = [tensor.numpy() for tensor in checkpoint.tensors.values()]


def test_a_conversion_writes_neither_through_links_nor_into_its_source(tmp_path: Path) -> None:
    """D9 and D10: a link in the target's place keeps its victim, and a source stays as it is."""
    record = model("llama", num_layers=1, vocab_size=5)
    save(tmp_path / "in", record, arrays(record))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").symlink_to(victim)

    with pytest.raises(Exception, match="link"):
        convert(tmp_path / "in", tmp_path / "out", to="hf", overwrite=True)
    with pytest.raises(Exception, match="inside"):
        convert(tmp_path / "in", tmp_path / "in" / "out", to="hf")

    assert victim.read_text() == "precious"
    assert not (tmp_path / "in" / "out").exists()
