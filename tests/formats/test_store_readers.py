"""Token stores as others see them: four Zarr readers, and a plain torch DataLoader."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mds_data = pytest.importorskip("mds_data")

SHARD = 64 * 4


@pytest.fixture(params=["hot", "archive"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def row() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50_000, 3 * SHARD + 77).astype(np.uint16)


@pytest.fixture
def path(tmp_path: Path, row: np.ndarray, layout: str) -> Path:
    with mds_data.StoreWriter(
        tmp_path / "store",
        vocab_size=50_257,
        layout=layout,
        chunk_tokens=64,
        chunks_per_shard=4,
        columns={"source": "int32"},
    ) as writer:
        for number, document in enumerate(np.array_split(row, 31)):
            writer.add(document, columns={"source": number})
        writer.commit()
    return tmp_path / "store"


def flip(path: Path) -> None:
    file = path / "tokens/c/1"
    data = bytearray(file.read_bytes())
    data[30] ^= 4
    file.write_bytes(data)


def read_zarr_python(path: Path, name: str) -> np.ndarray:
    zarr = pytest.importorskip("zarr")
    return zarr.open_group(path, mode="r")[name][:]


def read_zarrs(path: Path, name: str) -> np.ndarray:
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("zarrs")
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return zarr.open_array(path / name, mode="r")[:]


def read_tensorstore(path: Path, name: str) -> np.ndarray:
    tensorstore: Any = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / name)}}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())


def read_xarray(path: Path, name: str) -> np.ndarray:
    xarray: Any = pytest.importorskip("xarray")
    return xarray.open_zarr(path, consolidated=False)[name].values


READERS = [read_zarr_python, read_zarrs, read_tensorstore, read_xarray]


@pytest.mark.parametrize("read", READERS)
def test_other_readers_see_the_same_tokens_and_documents(
    path: Path, row: np.ndarray, read: Any
) -> None:
    store = mds_data.open_store(path)

    np.testing.assert_array_equal(read(path, "tokens"), row)
    np.testing.assert_array_equal(read(path, "doc_start"), store.doc_start)
    np.testing.assert_array_equal(read(path, "doc_length"), store.doc_length)


@pytest.mark.parametrize("read", READERS[:3])
def test_other_readers_see_columns(path: Path, read: Any) -> None:
    np.testing.assert_array_equal(read(path, "columns/source"), np.arange(31))


@pytest.mark.parametrize("read", READERS)
def test_other_readers_notice_a_flipped_bit(path: Path, read: Any) -> None:
    flip(path)

    with pytest.raises(Exception, match=r"(?i)checksum|crc|digest"):
        read(path, "tokens")


def test_a_plain_torch_loader_reads_resumable_batches(path: Path) -> None:
    pytest.importorskip("torch")
    from mds_data.torch_dataset import TorchDataset, data_loader

    dataset = mds_data.GPTDataset(mds_data.open_store(path), seq_length=16)
    sampler = mds_data.ResumableSampler(
        len(dataset), global_batch_size=8, micro_batch_size=2, rank=1, num_ranks=2
    )
    batches = {
        workers: list(islice(data_loader(dataset, sampler, num_workers=workers), 6))
        for workers in (0, 2)
    }

    for alone, shared in zip(batches[0], batches[2], strict=True):
        assert alone.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
        for name, values in alone.items():
            assert values.shape == (2, 16)
            assert (values == shared[name]).all()
    expected = [sample for batch in islice(sampler, 6) for sample in batch]
    tokens = np.concatenate([batch["tokens"].numpy() for batch in batches[0]])
    np.testing.assert_array_equal(tokens, [dataset[number]["tokens"] for number in expected])
    assert TorchDataset(dataset)[3]["labels"].tolist() == dataset[3]["labels"].tolist()
