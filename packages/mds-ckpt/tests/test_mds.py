"""Our format: any cut by any number of ranks is read back, whole and in parts."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_ckpt import commit, open_checkpoint
from mds_ckpt.errors import RejectedError, UnknownFormatError, UsageError
from mds_ckpt.formats import mds
from mds_ckpt.formats.mds import LazyArray, check, merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord


def publish(
    root: Path, shapes: dict[str, tuple[int, ...]], rank_files: list[Any], partial: Path
) -> Path:
    parameters, files = merge_rank_files(shapes, rank_files)
    manifest = CheckpointManifest(
        producer={"name": "test", "version": "1"},
        step=0,
        counters={},
        model=ModelRecord(family="gpt", config={}, vocab_size=4, tied_embeddings=True),
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=root)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_is_read_back_whole_and_in_parts(tmp_path_factory: Any, data: Any) -> None:
    """Cut by a tensor-parallel box first, then by flat ranges, as tp and ZeRO do."""
    root = tmp_path_factory.mktemp("cut")
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    middle = data.draw(st.integers(0, shape[dim]))
    pieces = []
    for part in ((0, middle), (middle, shape[dim])):
        box = tuple(part if d == dim else (0, n) for d, n in enumerate(shape))
        local = array[tuple(slice(*span) for span in box)].reshape(-1)
        cuts = data.draw(st.lists(st.integers(0, local.size), max_size=3))
        if not cuts:
            pieces.append((box, None, local.reshape(mds.extents(box))))
        spans = pairwise(sorted({0, local.size, *cuts})) if cuts else ()
        pieces += [(box, span, local[slice(*span)]) for span in spans]
    partial = commit.stage(root, 0)
    rank_files = [
        write_rank_file(partial, rank, [("w", "weight", *piece)])
        for rank, piece in enumerate(pieces)
    ]

    tensor = open_checkpoint(publish(root, {"w": shape}, rank_files, partial)).tensors["w"]

    assert np.array_equal(tensor.numpy(), array)
    box = tuple(
        tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape
    )
    wanted = array[tuple(slice(*span) for span in box)]
    assert np.array_equal(tensor.read(box), wanted)
    start, stop = sorted(data.draw(st.integers(0, wanted.size)) for _ in range(2))
    assert np.array_equal(tensor.read(box, (start, stop)), wanted.reshape(-1)[start:stop])


def test_types_scalars_and_lazy_arrays_survive(tmp_path: Path) -> None:
    partial = commit.stage(tmp_path, 0)
    scalar = np.array(3.5, dtype="f8")
    half = np.arange(4).astype(ml_dtypes.bfloat16)
    whole = ((0, 4),)
    rank_file = write_rank_file(
        partial,
        0,
        [
            ("half", "weight", whole, None, LazyArray((4,), "BF16", lambda: half)),
            ("half", "master", whole, None, np.arange(4, dtype="f4")),
            ("scalar", "weight", (), None, scalar),
        ],
        extra={"rng/python": np.arange(5, dtype="u1")},
    )

    checkpoint = open_checkpoint(
        publish(tmp_path, {"half": (4,), "scalar": ()}, [rank_file], partial)
    )

    assert rank_file.extra_keys == ("rng/python",)
    assert checkpoint.tensor("half").dtype == "BF16"
    assert checkpoint.tensor("half").numpy().tobytes() == half.tobytes()
    assert checkpoint.tensor("half", "master").dtype == "F32"
    assert checkpoint.tensor("scalar").numpy() == scalar
    assert list(checkpoint.states) == ["weight", "master"]
    assert list(check(checkpoint, True)) == []
    with pytest.raises(RejectedError, match="no state 'exp_avg'"):
        checkpoint.tensor("half", "exp_avg")


def test_ranks_that_do_not_cover_a_parameter_are_an_error(tmp_path: Path) -> None:
    array = np.zeros(4, "f4")
    first = write_rank_file(tmp_path, 0, [("w", "weight", ((0, 4),), (0, 2), array[:2])])
    twice = write_rank_file(tmp_path, 1, [("w", "weight", ((0, 4),), (1, 4), array[1:])])
    other = write_rank_file(
        tmp_path, 2, [("w", "weight", ((0, 4),), (2, 4), array[2:].astype("f2"))]
    )

    with pytest.raises(ValueError, match="'w' is not covered exactly once: pieces cover 2 of 4"):
        merge_rank_files({"w": (4,)}, [first])
    with pytest.raises(ValueError, match="overlap"):
        merge_rank_files({"w": (4,)}, [first, twice])
    with pytest.raises(ValueError, match="written as F16 and F32"):
        merge_rank_files({"w": (4,)}, [first, other])
    with pytest.raises(ValueError, match="has no shape"):
        merge_rank_files({}, [first])
    with pytest.raises(ValueError, match="two ranks wrote rank-00000"):
        merge_rank_files({"w": (4,)}, [first, first])


def test_an_array_of_another_shape_than_its_box_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs an array of shape"):
        write_rank_file(tmp_path, 0, [("w", "weight", ((0, 4),), None, np.zeros(3, "f4"))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = samples.model("llama")
    return samples.save(tmp_path / "ckpt", model, samples.arrays(model), optimizer=True)


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in check(open_checkpoint(folder), True)]


def test_a_flipped_bit_names_the_tensor(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 16
    path.write_bytes(content)

    (found,) = problems(folder)

    assert "rank-00001.safetensors, tensor '" in found
    assert "checksum" in found


@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_bit_of_any_file_is_found(folder: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for _ in range(6):
            bad = bytearray(good)
            bad[random.integers(len(bad))] ^= 1 << random.integers(8)
            path.write_bytes(bad)
            try:
                found = problems(folder)
            except (RejectedError, UnknownFormatError):
                found = ["refused"]
            assert found, path.name
        path.write_bytes(good)
    assert problems(folder) == []


@pytest.mark.parametrize("part", range(0, 64, 9))
def test_a_truncated_file_is_found(folder: Path, part: int) -> None:
    path = folder / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * part // 64])

    assert problems(folder)
    assert list(check(open_checkpoint(folder), False))


def test_swapped_and_missing_files_are_found(folder: Path) -> None:
    a, b = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)
    assert len(problems(folder)) >= 2
    b.unlink()
    assert any("no such file" in problem for problem in problems(folder))


def test_a_file_that_is_a_link_or_a_pipe_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "rank-00001.safetensors"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert "link" in problems(folder)[0]
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in problems(folder)[0]


def test_reading_outside_a_tensor_is_an_error(folder: Path) -> None:
    tensor = open_checkpoint(folder).tensors["decoder.final_layernorm.weight"]

    with pytest.raises(UsageError, match="outside"):
        tensor.read(((0, 99),))
    with pytest.raises(UsageError, match="outside"):
        tensor.read(None, (0, 99))
    with pytest.raises(UsageError, match="outside"):
        tensor.read(((0, 1), (0, 1)))


def test_a_folder_of_checkpoints_opens_its_newest_good_one(folder: Path) -> None:
    model = samples.model("llama")
    newer = samples.save(folder.parent, model, samples.arrays(model), step=2)

    assert open_checkpoint(folder.parent).step == 2
    (newer / "manifest.json").write_text("{}")
    checkpoint = open_checkpoint(folder.parent)

    assert checkpoint.step == 1
    assert "passed over" in checkpoint.notes[0]


def test_a_foreign_folder_is_of_no_known_format(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match="no reader recognises it"):
        open_checkpoint(tmp_path)
    with pytest.raises(RejectedError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
