"""On a real Ray cluster of this machine: the bytes of a local run, also when a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from mds_data.cli import main  # noqa: E402
from mds_data.corpus import sample_corpus  # noqa: E402
from mds_data.preprocess import pipeline  # noqa: E402
from mds_data.preprocess.inputs import InputError, find_inputs  # noqa: E402
from mds_data.preprocess.ray_engine import RayEngine  # noqa: E402
from mds_data.preprocess.source import Source  # noqa: E402
from mds_data.preprocess.workers import WorkerError  # noqa: E402
from mds_data.tokenizers import spec_of_file  # noqa: E402
from mds_data.tokenizers.train import train_tokenizer  # noqa: E402

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    # The workers know the installed packages, and not this folder.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    texts = [document.text for _, document in zip(range(400), sample_corpus(), strict=False)]
    Path("tokenizer.json").write_bytes(train_tokenizer(texts, vocab_size=1000).content)
    for part in range(5):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[part::5]]
        Path(f"{part}.jsonl").write_text("".join(lines))
    return tmp_path


def contents(store: str) -> dict[str, bytes]:
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in Path(store).rglob("*")
        if path.is_file()
    }


def config(output: str, **options: Any) -> pipeline.PreprocessConfig:
    return pipeline.PreprocessConfig(
        inputs=("*.jsonl",),
        outputs={"text": Path(output)},
        tokenizer=spec_of_file(Path("tokenizer.json")),
        append_eod=True,
        **options,
    )


class KillingEngine(RayEngine):
    """Lets the worker of one file die as by `kill -9`, once or always."""

    def run(self, source: Source, *, make: Callable[[], Any]) -> Iterator[Any]:
        marker = Path.cwd() / "killed"
        return super().run(source, make=partial(_deadly, make, marker, self.retries > 0))


def _deadly(make: Callable[[], Any], marker: Path, once: bool) -> Callable[[Any], Any]:
    function, seen = make(), []

    def work(batch: Any) -> Any:
        seen.append(batch)
        if batch.file == "2.jsonl" and not (once and marker.exists()):
            marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return function(batch)

    return work


def test_the_store_has_the_bytes_of_a_local_run(folder: Path) -> None:
    command = ["preprocess", "--input", "*.jsonl", "--tokenizer", "tokenizer.json", "--append-eod"]
    assert main([*command, "--workers", "1", "--output", "local"]) == 0
    assert main([*command, "--engine", "ray", "--output", "distant"]) == 0

    assert contents("distant") == contents("local")


def test_a_worker_that_is_killed_is_replaced(folder: Path) -> None:
    pipeline.preprocess(config("local"))

    pipeline.preprocess(config("distant"), engine=KillingEngine(tasks=2))

    assert Path("killed").exists()
    assert contents("distant") == contents("local")


def test_a_worker_that_dies_always_ends_the_run_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(WorkerError, match=r"2\.jsonl"):
        pipeline.preprocess(config("distant"), engine=KillingEngine(tasks=2, retries=0))

    assert not list(Path().glob("distant*"))


def test_an_interrupted_local_run_goes_on_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.preprocess(config("local"))

    with monkeypatch.context() as patch:
        left = iter(range(3))
        keep = pipeline.StoreWriter.checkpoint

        def checkpoint(self: Any, state: Any) -> None:
            keep(self, state)
            if next(left, None) is None:
                raise KeyboardInterrupt

        patch.setattr(pipeline.StoreWriter, "checkpoint", checkpoint)
        with pytest.raises(KeyboardInterrupt):
            pipeline.preprocess(config("distant", checkpoint_batches=1))
    pipeline.preprocess(config("distant", resume=True), engine=RayEngine(tasks=2))

    assert contents("distant") == contents("local")


@pytest.mark.parametrize(
    "command",
    [
        ["dedup", "--threshold", "0.5"],
        ["clean", "--min-words", "20", "--repetition"],
        ["decontaminate", "--against", "0.jsonl"],
        ["redact", "--all-fields"],
    ],
)
def test_filters_write_the_same_there(folder: Path, command: list[str]) -> None:
    for engine in ("local", "ray"):
        files = ["--input", "*.jsonl", "--output", f"{engine}.out", "--report", f"{engine}.json"]
        assert main([*command, *files, "--engine", engine, "--workers", "2"]) == 0

    assert Path("ray.out").read_bytes() == Path("local.out").read_bytes()
    assert Path("ray.json").read_bytes() == Path("local.json").read_bytes()


def test_signatures_are_written_there_too(folder: Path) -> None:
    command = ["dedup", "--threshold", "0.5", "--input", "*.jsonl"]
    assert main([*command, "--output", "whole.out"]) == 0
    for number in (1, 2):
        task = ["--task", f"{number}/2", "--engine", "ray", "--output", "part.out"]
        assert main([*command, *task]) == 0
    signatures = sorted(map(str, Path().glob("part.task-*")))
    assert main([*command, "--output", "parts.out", "--signatures", *signatures]) == 0

    assert Path("parts.out").read_bytes() == Path("whole.out").read_bytes()


def test_redacted_stores_have_the_bytes_of_a_local_run(folder: Path) -> None:
    Path("0.jsonl").write_text('{"text": "write to bob@example.org now"}\n' * 9)
    command = ["preprocess", "--input", "*.jsonl", "--tokenizer", "tokenizer.json", "--redact"]
    assert main([*command, "--workers", "1", "--output", "local"]) == 0
    assert main([*command, "--engine", "ray", "--output", "distant"]) == 0

    assert contents("distant") == contents("local")


def test_measures_are_the_same_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mds_data.difficulty.analysis._STRETCH", 100)
    pipeline.preprocess(config("store"))
    command = ["analyze", "store", "--seq-length", "64", "--workers", "2"]
    for engine in ("local", "ray"):
        assert main([*command, "--engine", engine, "--output", engine]) == 0

    assert contents("ray") == contents("local")


def test_an_item_whose_worker_is_killed_is_begun_anew(folder: Path) -> None:
    marker = Path.cwd() / "killed"

    found = list(RayEngine(tasks=2).map(range(6), make=partial(_deadly_items, marker)))

    assert found == [number * number for number in range(6)]
    assert marker.exists()
    with pytest.raises(WorkerError, match="ended without an answer"):
        list(RayEngine(tasks=2, retries=0).map(range(6), make=partial(_deadly_items, None)))


def _deadly_items(marker: Path | None) -> Callable[[int], int]:
    def work(number: int) -> int:
        if number == 3 and not (marker is not None and marker.exists()):
            if marker is not None:
                marker.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    return work


def test_a_broken_line_is_the_same_sentence(folder: Path) -> None:
    Path("3.jsonl").write_text('{"text": "fine"}\n{broken\n')

    with pytest.raises(InputError, match=r"3\.jsonl, line 2: not JSON"):
        pipeline.preprocess(config("distant"), engine=RayEngine(tasks=2))
    Path("4.jsonl.gz").write_bytes(b"no gzip")
    source = Source(find_inputs(["4.jsonl.gz"]))
    with pytest.raises(InputError, match="damaged or cut"):
        list(RayEngine().run(source, make=_nothing))


def _nothing() -> Callable[[Any], None]:
    return lambda batch: None
