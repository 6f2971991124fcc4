"""Who saves and loads in the crash table, each as its users do.

A contestant writes a state into a folder, and reads what a user would go on with. `by_hand` gives
everything else that somebody could still read there when that fails.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

State = dict[str, Any]
"""Arrays by name."""

OLD, NEW, OTHER = 0, 1, 2
"""What is there before; what is saved; what a second writer saves."""


class Contestant(Protocol):
    """Somebody who saves."""

    title: ClassVar[str]

    def state(self, number: int) -> State:
        """The state with this number."""

    def right(self) -> list[State]:
        """What may be found after any accident."""

    def save(self, folder: Path, number: int) -> None:
        """Save a state, as users do."""

    def load(self, folder: Path) -> State:
        """What a user goes on with, or an error."""

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        """Every place that may hold a whole state."""


class Weights:
    """Six arrays of 100 KB together."""

    SHAPES: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "embedding": (192, 64),
        "mlp_in": (64, 128),
        "mlp_out": (128, 32),
        "norm": (64,),
        "bias": (128,),
        "head": (16, 32),
    }

    def state(self, number: int) -> State:
        chance = np.random.default_rng(number)
        return {n: chance.normal(size=s).astype(np.float32) for n, s in self.SHAPES.items()}

    def right(self) -> list[State]:
        return [self.state(number) for number in (OLD, NEW, OTHER)]


class Ours(Weights):
    """What `mds-train` does when it saves the next step."""

    title = "mds-ckpt, a new step"
    steps: tuple[int, int] = (3, 5)

    def __init__(self) -> None:
        self._commit = importlib.import_module("mds_ckpt.commit")
        self._mds = importlib.import_module("mds_ckpt.formats.mds")
        self._manifest = importlib.import_module("mds_ckpt.manifest")
        self._open = importlib.import_module("mds_ckpt").open_checkpoint

    def save(self, folder: Path, number: int) -> None:
        state, step = self.state(number), self.steps[number > OLD]
        with self._commit.lock(folder):
            partial = self._commit.stage(folder, step)
            whole = {name: tuple((0, n) for n in array.shape) for name, array in state.items()}
            pieces = [(name, "weight", whole[name], None, array) for name, array in state.items()]
            rank_file = self._mds.write_rank_file(partial, 0, pieces)
            shapes = {name: array.shape for name, array in state.items()}
            parameters, files = self._mds.merge_rank_files(shapes, [rank_file])
            model = self._manifest.ModelRecord(
                family="gpt", config={}, vocab_size=5, tied_embeddings=True
            )
            manifest = self._manifest.CheckpointManifest(
                producer={"name": "mds-train", "version": "0"},
                step=step,
                counters={"iteration": step},
                model=model,
                parameters=parameters,
                files=files,
            )
            self._commit.publish(partial, manifest, root=folder, existing="replace")

    def load(self, folder: Path) -> State:
        newest = self._commit.find_latest(folder).folder
        if newest is None:
            raise FileNotFoundError("there is no whole checkpoint")
        return self._read(newest)

    def _read(self, folder: Path) -> State:
        return {name: tensor.numpy() for name, tensor in self._open(folder).tensors.items()}

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        for step in folder.glob("step-*"):
            yield lambda step=step: self._read(step)


class OursAgain(Ours):
    """A step that is there is saved again, after a resume from an earlier one."""

    title = "mds-ckpt, a step again"

    def save(self, folder: Path, number: int) -> None:
        if number == OLD:  # the earlier one, and the future that is to be replaced
            self.steps = (1, 1)
            super().save(folder, OLD)
        self.steps = (5, 5)
        super().save(folder, number)


class TorchInPlace(Weights):
    """`torch.save` over the old file."""

    title = "torch.save, in place"

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")

    def _tensors(self, number: int) -> State:
        return {n: self._torch.from_numpy(array) for n, array in self.state(number).items()}

    def save(self, folder: Path, number: int) -> None:
        self._torch.save(self._tensors(number), folder / "model.pt")

    def load(self, folder: Path) -> State:
        return self._read(folder / "model.pt")

    def _read(self, path: Path) -> State:
        found = self._torch.load(path, weights_only=True)
        return {name: tensor.numpy() for name, tensor in found.items()}

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        for path in folder.iterdir():
            yield lambda path=path: self._read(path)


class TorchRenamed(TorchInPlace):
    """`torch.save` to another name, which then becomes the old one's, as many do."""

    title = "torch.save, then rename"

    def save(self, folder: Path, number: int) -> None:
        temporary = folder / "model.pt.tmp"
        self._torch.save(self._tensors(number), temporary)
        temporary.replace(folder / "model.pt")


class DeepSpeedSteps(TorchInPlace):
    """DeepSpeed's own engine for files in a folder for each step, then `latest`, in the order and
    by the calls of its `save_checkpoint`; `latest` says what is loaded."""

    title = "DeepSpeed, checkpoint engine and `latest`"
    FILE = "mp_rank_00_model_states.pt"

    def __init__(self) -> None:
        super().__init__()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        engine = importlib.import_module(
            "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"
        ).TorchCheckpointEngine()
        # What its configuration's default sets; without a configuration it takes the older format.
        engine.zipfile_serialization = True
        self._engine = engine

    def save(self, folder: Path, number: int) -> None:
        tag = f"global_step{3 if number == OLD else 5}"
        (folder / tag).mkdir(parents=True, exist_ok=True)
        self._engine.save({"module": self._tensors(number)}, str(folder / tag / self.FILE))
        with (folder / "latest").open("w") as file:
            file.write(tag)

    def load(self, folder: Path) -> State:
        return self._read(folder / (folder / "latest").read_text().strip() / self.FILE)

    def _read(self, path: Path) -> State:
        found = self._engine.load(str(path), map_location="cpu")["module"]
        return {name: tensor.numpy() for name, tensor in found.items()}

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        for path in folder.glob(f"global_step*/{self.FILE}"):
            yield lambda path=path: self._read(path)


class Distributed(TorchInPlace):
    """`torch.distributed.checkpoint.save` into the same folder."""

    title = "torch DCP, same folder"

    def __init__(self) -> None:
        super().__init__()
        self._dcp = importlib.import_module("torch.distributed.checkpoint")

    def place(self, folder: Path, number: int) -> Path:
        del number
        return folder / "checkpoint"

    def save(self, folder: Path, number: int) -> None:
        self._dcp.save(
            self._tensors(number), checkpoint_id=self.place(folder, number), no_dist=True
        )

    def load(self, folder: Path) -> State:
        return self._read(folder / "checkpoint")

    def _read(self, path: Path) -> State:
        found = {name: self._torch.zeros(shape) for name, shape in self.SHAPES.items()}
        self._dcp.load(found, checkpoint_id=path, no_dist=True)
        return {name: tensor.numpy() for name, tensor in found.items()}


class DistributedSteps(Distributed):
    """The same into a folder for each step; the newest one with a `.metadata` is taken."""

    title = "torch DCP, a folder a step"

    def place(self, folder: Path, number: int) -> Path:
        return folder / f"step-{3 if number == OLD else 5}"

    def load(self, folder: Path) -> State:
        return self._read(max(path.parent for path in folder.glob("step-*/.metadata")))


class SafetensorsFile(Weights):
    """`save_file` over the old file."""

    title = "safetensors, in place"

    def __init__(self) -> None:
        self._numpy = importlib.import_module("safetensors.numpy")

    def save(self, folder: Path, number: int) -> None:
        self._numpy.save_file(self.state(number), folder / "model.safetensors")

    def load(self, folder: Path) -> State:
        found: State = self._numpy.load_file(folder / "model.safetensors")
        return found

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        for path in folder.iterdir():
            yield lambda path=path: dict(self._numpy.load_file(path))


class Zarr(Weights):
    """The arrays of a group are written over, in chunks."""

    title = "zarr, in place"

    def __init__(self) -> None:
        self._zarr = importlib.import_module("zarr")
        # One thread writes, so that the same call is the same in every run.
        self._zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1})

    def save(self, folder: Path, number: int) -> None:
        group = self._zarr.open_group(folder / "arrays", mode="a")
        for name, array in self.state(number).items():
            if number == OLD:
                group.create_array(name, data=array, chunks=tuple(min(64, n) for n in array.shape))
            else:
                group[name][...] = array

    def load(self, folder: Path) -> State:
        group = self._zarr.open_group(folder / "arrays", mode="r")
        return {name: group[name][...] for name in self.SHAPES}

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        del folder
        yield from ()


class Tokens:
    """A long array that grows."""

    DOCUMENT, BEFORE, ADDED = 1000, 30, 20

    def added(self, number: int) -> Any:
        count = self.BEFORE if number == OLD else self.ADDED
        chance = np.random.default_rng(number)
        return chance.integers(1, 50_000, (count, self.DOCUMENT)).astype(np.uint16)

    def state(self, number: int) -> State:
        parts = [self.added(OLD), *([self.added(number)] if number != OLD else [])]
        return {"tokens": np.concatenate(parts).reshape(-1)}

    def right(self) -> list[State]:
        both = [
            np.concatenate([self.added(number) for number in order]).reshape(-1)
            for order in ((OLD, NEW, OTHER), (OLD, OTHER, NEW))
        ]
        single = [self.state(number) for number in (OLD, NEW, OTHER)]
        return [*single, *({"tokens": tokens} for tokens in both)]

    def by_hand(self, folder: Path) -> Iterator[Callable[[], State]]:
        del folder
        yield from ()


class OurStore(Tokens):
    """Documents are appended to a store."""

    title = "mds-data, append"

    def __init__(self) -> None:
        self._data = importlib.import_module("mds_data")
        self._append = importlib.import_module("mds_data.store.append").append_documents

    def save(self, folder: Path, number: int) -> None:
        path, documents = folder / "store", self.added(number)
        if number == OLD:
            settings = {"chunk_tokens": 4096, "chunks_per_shard": 4}
            with self._data.StoreWriter(path, vocab_size=50_000, **settings) as writer:
                for document in documents:
                    writer.add(document)
                writer.commit()
        else:
            self._append(path, list(documents))

    def load(self, folder: Path) -> State:
        store = self._data.open_store(folder / "store")
        return {"tokens": np.concatenate([store[number] for number in range(len(store))])}


class ZarrAppend(Tokens):
    """`Array.append`."""

    title = "zarr, append"

    def __init__(self) -> None:
        self._zarr = importlib.import_module("zarr")
        self._zarr.config.set({"threading.max_workers": 1, "async.concurrency": 1})

    def save(self, folder: Path, number: int) -> None:
        tokens = self.added(number).reshape(-1)
        if number == OLD:
            self._zarr.create_array(folder / "tokens", data=tokens, chunks=(4096,))
        else:
            self._zarr.open_array(folder / "tokens", mode="a").append(tokens)

    def load(self, folder: Path) -> State:
        return {"tokens": self._zarr.open_array(folder / "tokens", mode="r")[...]}


CONTESTANTS: Mapping[str, type[Any]] = {
    "ours": Ours,
    "again": OursAgain,
    "store": OurStore,
    "torch": TorchInPlace,
    "renamed": TorchRenamed,
    "deepspeed": DeepSpeedSteps,
    "dcp": Distributed,
    "dcp-steps": DistributedSteps,
    "safetensors": SafetensorsFile,
    "zarr": Zarr,
    "zarr-append": ZarrAppend,
}
OWN = ("ours", "again", "store")
"""Of whom nothing may be lost."""
