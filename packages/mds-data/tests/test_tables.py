"""Parquet and Arrow give the documents that the same rows give as JSON lines."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from text_material import small_tokenizer, text

from mds_data import DataError, open_store
from mds_data.cli import main
from mds_data.preprocess.inputs import InputReader, find_inputs
from mds_data.preprocess.tables import table_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ROWS = [{"text": text(n, words=60), "url": f"https://e.example/{n}", "id": n} for n in range(50)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(small_tokenizer())
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, "rows.parquet", row_group_size=20)
    with pyarrow.OSFile("rows.arrow", "wb") as file:
        write_batches(pyarrow.ipc.new_file(file, table.schema), table)
    Path("saved").mkdir()
    for part in range(2):
        with pyarrow.OSFile(f"saved/data-0000{part}-of-00002.arrow", "wb") as file:
            rows = table.slice(25 * part, 25)
            write_batches(pyarrow.ipc.new_stream(file, table.schema), rows)
    names = [{"filename": f"data-0000{part}-of-00002.arrow"} for part in range(2)]
    Path("saved/state.json").write_text(json.dumps({"_data_files": names}))
    Path("saved/dataset_info.json").write_text("{}")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def write_batches(writer, table) -> None:
    with writer:
        for batch in table.to_batches(max_chunksize=7):
            writer.write_batch(batch)


def preprocess(source: str, output: str, *options: str) -> int:
    command = ["preprocess", "--input", source, "--tokenizer", "tokenizer.json", "--append-eod"]
    return main([*command, "--workers", "1", "--output", output, *options])


@pytest.mark.parametrize("source", ["rows.parquet", "rows.arrow", "saved"])
def test_a_table_gives_the_store_of_the_same_json_lines(folder: Path, source: str) -> None:
    assert preprocess("rows.jsonl", "expected", "--columns", "url:hash", "id:int") == 0
    assert preprocess(source, "store", "--columns", "url:hash", "id:int") == 0

    expected, store = open_store("expected"), open_store("store")
    assert store.manifest.files == expected.manifest.files
    inputs = [each["path"] for each in store.manifest.provenance["inputs"]]
    assert inputs == (
        [source] if source != "saved" else sorted(map(str, Path("saved").glob("d*.arrow")))
    )


def test_a_killed_run_over_a_table_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mds_data.preprocess import source
    from mds_data.store.writer import StoreWriter

    monkeypatch.setattr(source, "_BATCH_BYTES", 2000)
    assert preprocess("rows.parquet", "expected") == 0
    keep = StoreWriter.checkpoint

    def checkpoint(self: StoreWriter, state: dict) -> None:
        keep(self, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "checkpoint", checkpoint)
        assert preprocess("rows.parquet", "store", "--checkpoint-mb", "1") in {0, 130}
        patch.setattr("mds_data.commands.preprocess.PreprocessConfig", frequent)
        assert preprocess("rows.parquet", "again") == 130
    assert preprocess("rows.parquet", "again", "--resume") == 0

    assert open_store("again").manifest.files == open_store("expected").manifest.files


def frequent(**options):
    from mds_data.preprocess.pipeline import PreprocessConfig

    return PreprocessConfig(**options | {"checkpoint_batches": 1})


def test_only_the_wanted_columns_are_read_and_odd_values_become_json(folder: Path) -> None:
    table = pyarrow.table(
        {"text": ["a", None], "when": [pyarrow.scalar(0, "date32")] * 2, "x": [1, 2]}
    )
    parquet.write_table(table, "odd.parquet")

    read = [
        json.loads(line)
        for _, line in table_rows(Path("odd.parquet"), format="parquet", members=["text"])
    ]
    whole = [
        json.loads(line)
        for _, line in table_rows(Path("odd.parquet"), format="parquet", members=None)
    ]

    assert read == [{"text": "a"}, {"text": None}]
    assert whole[0] == {"text": "a", "when": "1970-01-01", "x": 1}


def test_a_text_that_is_no_utf8_is_one_broken_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buffers = pyarrow.array([b"fine", b"b\xffd", b"good"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, buffers.buffers())
    parquet.write_table(pyarrow.table({"text": column}), "broken.parquet")

    assert preprocess("broken.parquet", "store", "--on-error", "skip") == 0

    assert len(open_store("store")) == 2
    assert "skipped 1 not JSON or not UTF-8: broken.parquet line 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "saved/data-00001-of-00002.arrow"])
def test_cut_and_changed_tables_are_named(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(name).read_bytes()
    chance = random.Random(7)
    bad = [data[: len(data) * n // 8] for n in range(8)] + [b"PAR1" + bytes(100) + b"PAR1"]
    for _ in range(20):
        changed = bytearray(data)
        for _ in range(8):
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        bad.append(bytes(changed))
    suffix = Path(name).suffix
    for number, content in enumerate(bad):
        Path(f"bad-{number}{suffix}").write_bytes(content)

        code = preprocess(f"bad-{number}{suffix}", f"store-{number}", "--on-error", "skip")

        said = capsys.readouterr().err
        assert code == 3 or (code == 0 and number > 0), said
        assert "Traceback" not in said
        assert code == 0 or f"bad-{number}{suffix}" in said
        assert Path(f"store-{number}").exists() == (code == 0)


def test_folders_and_columns_that_are_not_there_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preprocess("rows.parquet", "store", "--json-keys", "content") == 3
    assert (
        "rows.parquet has no column 'content' (it has: 'text', 'url', 'id')"
        in capsys.readouterr().err
    )
    Path("dict").mkdir()
    Path("dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert preprocess("dict", "store") == 3
    assert "several splits; name one of them: dict/train or dict/test" in capsys.readouterr().err
    Path("saved/state.json").write_text('{"_data_files": [{"filename": "../rows.arrow"}]}')
    assert preprocess("saved", "store") == 3
    assert "names no data files of its own folder" in capsys.readouterr().err


def test_progress_ends_at_the_whole_file(folder: Path) -> None:
    (file,) = find_inputs(["rows.parquet"])
    reader = InputReader(file)

    sizes = [reader.bytes_read for _ in reader.records()]

    assert sizes == sorted(sizes)
    assert reader.bytes_read == Path("rows.parquet").stat().st_size
    assert len(sizes) == 50


def test_a_missing_library_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)

    with pytest.raises(ImportError, match=r"pip install 'mds-data\[parquet\]'"):
        next(table_rows(Path("rows.parquet"), format="parquet", members=None))


def test_data_error_is_what_a_damaged_table_raises(folder: Path) -> None:
    Path("no.parquet").write_bytes(b"no table")

    with pytest.raises(DataError, match=r"no\.parquet is damaged, cut or no parquet file"):
        list(table_rows(Path("no.parquet"), format="parquet", members=None))


def test_columns_hold_what_the_rows_say(folder: Path) -> None:
    preprocess("rows.parquet", "store", "--columns", "id:int", "where=@file")

    store = open_store("store")
    np.testing.assert_array_equal(store.column("id"), np.arange(50))
