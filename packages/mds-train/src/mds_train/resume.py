"""Starts a run: from nothing, from its own newest checkpoint, or from another one, on any layout.

Each rank reads only the bytes of its own fragments. Weights are rebuilt from the masters, so after
loading every state is bitwise the saved one, whatever the layout was that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mds_ckpt import Checkpoint, LazyTensor, commit, open_checkpoint
from mds_ckpt.read_options import ReadOptions
from mds_core.sharding import ParameterShard, flat_pieces
from mds_train.assembly import Parts
from mds_train.changed_settings import changed_settings
from mds_train.config import CheckpointConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.config.schema import continues_itself
from mds_train.data.building import training_samples
from mds_train.data.families import kind_of_samples
from mds_train.engines.interface import Fragment
from mds_train.exchange import attempt_on_all
from mds_train.model_source import open_model
from mds_train.provenance import described_parent
from mds_train.saving.backup import backed_up_steps, bring_back, is_url
from mds_train.saving.sealing import key_for
from mds_train.state import TrainState

__all__ = ["Origin", "start_state"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a run begins."""

    state: TrainState
    checkpoint: Path | None = None
    """What was loaded."""

    own_checkpoint: Path | None = None
    """The same, if it is one of this run's and lies in its first place."""

    parent: Mapping[str, Any] | None = None
    """Path, uuid and datasets of what was loaded, for manifests."""

    messages: tuple[str, ...] = ()
    """Sentences for people: what was resumed, what was passed over and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    folder: Path
    own: bool
    messages: tuple[str, ...]
    copy: bool = False
    """It lies in the run's second place."""


def start_state(parts: Parts, *, resume: bool) -> Origin:
    """Fill the engine and say where the run stands. Collective.

    Raises:
        FileNotFoundError: If there is no whole checkpoint where one was asked for.
        ValueError: If the checkpoint does not belong to this model, data or schedule.
    """
    resume = resume or continues_itself(parts.config)
    source = attempt_on_all(lambda: _find(parts, resume=resume))[0]
    if source is None:
        return Origin(state=TrainState())
    origin = _load(parts, source)
    _lengthen_data(parts, origin.state)
    return origin


def _lengthen_data(parts: Parts, state: TrainState) -> None:
    """Have samples for the steps that are left, where the batches before were larger ones."""
    config = parts.config
    steps = max(config.train.train_steps - state.iteration, 0)
    sizes = BatchSizes.from_config(config.train)
    needed = sizes.consumed_after(steps, since=state.consumed_samples)
    # Megatron's order would be another one.
    if needed > len(parts.reader) and config.data.order != "megatron":
        parts.reader.lengthen(training_samples(config, parts.stores, at_least=needed))


def _find(parts: Parts, *, resume: bool) -> _Source | None:
    """The checkpoint to load. Rank 0 looks, so that all ranks take the same one."""
    if parts.groups.rank != 0:
        return None
    wanted = parts.config.checkpoint
    if resume:
        source, skipped = _newest_own(parts)
        if source is not None:
            return source
        if wanted.load is None or continues_itself(parts.config):
            _refuse_unless_wanted(parts.checkpoints, skipped, wanted)
            return None
    else:
        _refuse_another_run(parts.checkpoints)
        if wanted.backup is not None and is_url(wanted.backup):
            _refuse_anothers_backups(wanted.backup)
        elif wanted.backup is not None:
            _refuse_another_run(Path(wanted.backup) / "checkpoints")
    return None if wanted.load is None else _find_other(Path(wanted.load), wanted)


def _newest_own(parts: Parts) -> tuple[_Source | None, tuple[str, ...]]:
    """The newest whole checkpoint of the run, from its second place only where that has a newer."""
    found, skipped = _newest(parts.checkpoints)
    backup = parts.config.checkpoint.backup
    if backup is not None and is_url(backup):
        steps = backed_up_steps(backup)
        if steps and (found is None or steps[-1] > _step_of(found)):
            return _brought_back(parts, backup, steps[-1], skipped), skipped
    elif backup is not None:
        copy, skipped_copies = _newest(Path(backup) / "checkpoints")
        skipped += skipped_copies
        if copy is not None and (found is None or _step_of(copy) > _step_of(found)):
            note = f"Took the copy {copy}: {parts.checkpoints} has no whole checkpoint as new."
            return _Source(folder=copy, own=True, messages=(*skipped, note), copy=True), skipped
    if found is None:
        return None, skipped
    return _Source(folder=found, own=True, messages=skipped), skipped


def _brought_back(parts: Parts, url: str, step: int, skipped: tuple[str, ...]) -> _Source:
    """The checkpoint of a backup, restored beside the run's own."""
    folder = parts.checkpoints.parent / "restored"
    identity = parts.config.checkpoint.backup_identity
    copy = bring_back(url, step, folder, identity=identity)
    note = f"Brought {copy} back from {url}: {parts.checkpoints} has no whole checkpoint as new."
    return _Source(folder=copy, own=True, messages=(*skipped, note), copy=True)


def _refuse_anothers_backups(url: str) -> None:
    steps = backed_up_steps(url)
    if steps:
        raise ValueError(
            f"{url}: there are backups of another run already (the newest is step-{steps[-1]}); "
            f"resume that run, or choose another checkpoint.backup."
        )


def _newest(root: Path) -> tuple[Path | None, tuple[str, ...]]:
    latest = commit.find_latest(root)
    step = -1 if latest.folder is None else _step_of(latest.folder)
    unfinished = [
        f"Passed over {folder}: its save was not finished."
        for folder in commit.unfinished(root)
        if _step_of(folder) > step
    ]
    damaged = [f"Passed over {folder}: {why}" for folder, why in latest.skipped]
    return latest.folder, (*unfinished, *damaged)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").partition(".")[0])


def _refuse_another_run(checkpoints: Path) -> None:
    if checkpoints.is_dir() and (found := commit.step_folders(checkpoints)):
        raise ValueError(
            f"{checkpoints}: there are checkpoints of another run already (the newest is "
            f"{found[0].name}); resume that run, or choose another train.run_dir."
        )


def _find_other(path: Path, wanted: CheckpointConfig) -> _Source | None:
    """What checkpoint.load names: a checkpoint, a folder of them, or the folder of a run."""
    inner = path / "checkpoints"
    root = inner if inner.is_dir() else path
    if not root.is_dir() or not commit.step_folders(root):
        if root.exists():
            return _Source(folder=root, own=False, messages=())
        _refuse_unless_wanted(root, (), wanted)
        return None
    folder, skipped = _newest(root)
    if folder is None:
        _refuse_unless_wanted(root, skipped, wanted)
        return None
    return _Source(folder=folder, own=False, messages=skipped)


def _refuse_unless_wanted(root: Path, skipped: Sequence[str], wanted: CheckpointConfig) -> None:
    if wanted.from_scratch_if_missing:
        return
    reasons = f" {' '.join(skipped)}" if skipped else ""
    raise FileNotFoundError(
        f"{root}: there is no whole checkpoint to start from.{reasons} To start from random "
        f"weights instead, set checkpoint.from_scratch_if_missing (--from-scratch-if-missing)."
    )


def _load(parts: Parts, source: _Source) -> Origin:
    opened: list[Checkpoint] = []
    attempt_on_all(lambda: opened.append(_open(parts, source)))
    checkpoint = opened[0]
    if parts.config.lora.rank and not source.own:
        return _beside(checkpoint)
    _check_parameters(parts, checkpoint)
    weights_only = parts.config.checkpoint.load_weights_only and not source.own
    notes = () if weights_only else _check_continuation(parts, checkpoint, own=source.own)
    state = TrainState() if weights_only else TrainState.from_counters(dict(checkpoint.counters))
    step = 0 if weights_only else int(checkpoint.training["optimizer"]["step"])
    scaler = None if weights_only else checkpoint.training["optimizer"].get("loss_scaler")
    with parts.engine.restoring(
        optimizer_step=step, iterations=state.iteration, loss_scaler=scaler
    ) as fragments:
        attempt_on_all(lambda: fill(fragments, checkpoint, parts.shards))
    what = "the weights of" if weights_only else "all of"
    message = f"Loaded {what} {source.folder} (step {checkpoint.step})."
    manifest = checkpoint.manifest
    saved = checkpoint.training.get("config") or {}
    changed = changed_settings(saved, parts.config.as_dict()) if source.own else ""
    return Origin(
        state=state,
        checkpoint=source.folder,
        own_checkpoint=source.folder if source.own and not source.copy else None,
        parent=None
        if manifest is None
        else described_parent(source.folder, manifest.uuid, manifest.provenance),
        messages=(*source.messages, *checkpoint.notes, message, *notes, *filter(None, (changed,))),
    )


def _beside(checkpoint: Checkpoint) -> Origin:
    """The model has the weights already (`mds_train.frozen`); what is trained begins anew."""
    manifest = checkpoint.manifest
    return Origin(
        state=TrainState(),
        checkpoint=checkpoint.path,
        parent=None
        if manifest is None
        else described_parent(checkpoint.path, manifest.uuid, manifest.provenance),
        messages=(f"The weights of {checkpoint.path} stay as they are; adapters are trained.",),
    )


def _open(parts: Parts, source: _Source) -> Checkpoint:
    """Open a checkpoint of any format; with its padded rows, where these are trained here too."""
    key = key_for(source.folder, parts.config.checkpoint)
    # A run with adapters goes on with these alone; any other takes the whole that they are part of.
    checkpoint = (open_checkpoint if source.own else open_model)(source.folder, key=key)
    model = parts.config.model
    if not model.legacy_vocab_softmax or checkpoint.format == "mds":
        return checkpoint
    rows = model.padded_vocab_size(parts.groups.tp_size)
    return open_checkpoint(source.folder, options=ReadOptions(vocab_size=rows))


def _check_parameters(parts: Parts, checkpoint: Checkpoint) -> None:
    """The checkpoint must hold exactly the model's parameters."""
    stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    wanted = dict(parts.shapes)
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            _check_padding(parts, checkpoint, rows=stored.get(name, (0,))[0], name=name)
            raise ValueError(
                f"{checkpoint.path}: {name} has the shape {stored.get(name, 'missing')} there and "
                f"{wanted.get(name, 'none')} in this model; make the [model] table that of the "
                f"checkpoint (`mds-ckpt inspect` shows it)."
            )


def _check_padding(parts: Parts, checkpoint: Checkpoint, *, rows: int, name: str) -> None:
    """Say it where only the padding of the vocabulary is another one."""
    model, tp_size = parts.config.model, parts.groups.tp_size
    if "word_embeddings" not in name and "output_layer" not in name:
        return
    if checkpoint.model.padded_vocab_size == rows and not model.legacy_vocab_softmax:
        raise ValueError(
            f"{checkpoint.path}: its {rows} rows of the vocabulary were trained with the padded "
            f"ones; set model.legacy_vocab_softmax to go on so."
        )
    if model.legacy_vocab_softmax:
        raise ValueError(
            f"{checkpoint.path}: the padded vocabulary has {rows} rows there and "
            f"{model.padded_vocab_size(tp_size)} in this run; set "
            f"model.make_vocab_size_divisible_by so that they agree (it is multiplied by "
            f"parallel.tp_size {tp_size})."
        )


def _check_continuation(parts: Parts, checkpoint: Checkpoint, *, own: bool) -> tuple[str, ...]:
    """Everything that makes the next steps those of the interrupted run must be as it was."""
    training = checkpoint.training
    if not training.get("optimizer") or "consumed_samples" not in checkpoint.counters:
        raise ValueError(
            f"{checkpoint.path}: it holds no optimizer state to go on with; set "
            f"checkpoint.load_weights_only to take the weights alone."
        )
    _check_optimizer(parts, checkpoint)
    keeps_moments = parts.config.optimizer.name != "sgd"  # whose momentum may be off
    if training["optimizer"].get("step") and keeps_moments and "exp_avg" not in checkpoint.states:
        raise ValueError(
            f"{checkpoint.path}: it counts {training['optimizer']['step']} updates but holds no "
            f"moments of the optimizer; set checkpoint.load_weights_only to take the weights alone."
        )
    _check_schedule(parts, checkpoint)
    if not training.get("data"):
        place = checkpoint.counters["consumed_samples"]
        note = "the run goes on at this sample of its own data, by its own schedule"
        return (f"It does not say what it was trained on: {note} ({place}).",)
    differences = _data_differences(parts, training.get("data") or {})
    if differences and own:
        raise ValueError(
            f"{checkpoint.path}: the order of the data would change ({'; '.join(differences)}), so "
            f"this would not be the same run; keep these settings, or start a new run with "
            f"checkpoint.load = {str(checkpoint.path)!r}."
        )
    return tuple(f"The data differ from the checkpoint's: {text}." for text in differences)


def _check_optimizer(parts: Parts, checkpoint: Checkpoint) -> None:
    """Another optimizer has other moments."""
    saved = str(checkpoint.training["optimizer"].get("name") or "").replace("adamw", "adam")
    now = parts.config.optimizer.name
    if saved and saved != now.replace("adamw", "adam"):
        raise ValueError(
            f"{checkpoint.path}: it holds the state of {saved}, but optimizer.name is {now}; take "
            f"that optimizer, or start a new run with checkpoint.load_weights_only."
        )


def _check_schedule(parts: Parts, checkpoint: Checkpoint) -> None:
    saved = checkpoint.training.get("schedule") or {}
    differences = parts.schedule.differences(saved)
    if differences and not parts.config.schedule.override:
        raise ValueError(
            f"{checkpoint.path}: the schedule differs from the checkpoint's "
            f"({'; '.join(differences)}); set schedule.override to use the new one at the "
            f"checkpoint's progress, or keep the old values (decay_steps follows train.train_steps "
            f"unless schedule.decay_steps is set)."
        )


def _data_differences(parts: Parts, saved: Mapping[str, Any]) -> list[str]:
    config, sampler = parts.config, saved.get("sampler") or {}
    now: dict[str, tuple[Any, Any]] = {
        "train.seed": (sampler.get("seed"), config.train.seed),
        "data.seq_length": (sampler.get("seq_length"), config.data.seq_length),
        "data.split": (sampler.get("split"), config.data.split),
        "data.order": (sampler.get("order"), config.data.order),
    }
    if "weights" in sampler:  # one store has none, and neither has a checkpoint of an older version
        now["data.weights"] = (list(sampler["weights"]), list(config.data.weights))
    for name, value in kind_of_samples(config).items():
        key = f"data.{name}"
        now[key] = (sampler.get(name), value)
    stores = [store.get("uuid") for store in saved.get("stores") or ()]
    here = [store.manifest.uuid for store in parts.stores.training]
    if len(stores) != len(here) or any(
        a and b and a != b for a, b in zip(stores, here, strict=True)
    ):
        now["data.stores"] = (stores, here)
    found = [f"{key} {old} -> {new}" for key, (old, new) in now.items() if old != new]
    return found or _other_samples(parts, sampler.get("fingerprints") or ())


def _other_samples(parts: Parts, saved: Sequence[int]) -> list[str]:
    """What no setting tells: the samples themselves, of which the first stand for all."""
    pairs = zip(saved, parts.reader.fingerprints(), strict=False)
    if all(old == new for old, new in pairs):
        return []
    why = "the stores hold other tokens"
    if parts.config.data.order == "megatron":
        why = (
            'data.order "megatron" shuffles the samples of all steps together, so '
            "train.train_steps and train.global_batch_size must be as they were"
        )
    return [f"the first samples are others: {why}"]


def fill(
    fragments: Sequence[Fragment], checkpoint: Checkpoint, shards: Mapping[str, ParameterShard]
) -> None:
    """Read masters and moments of these fragments; padding keeps what it has."""
    for fragment in fragments:
        shard = shards[fragment.name]
        masters = checkpoint.states.get("master", {})
        kept = masters[fragment.name] if fragment.name in masters else checkpoint.tensor(shard.name)
        _read(kept, shard, fragment.start, into=fragment.master)
        for state, moment in fragment.moments.items():
            if shard.name not in checkpoint.states.get(state, {}):
                raise ValueError(
                    f"{checkpoint.path}: it holds no {state} of {shard.name}, which the optimizer "
                    f"of this run needs; set the [optimizer] table to that of the checkpoint, or "
                    f"take its weights alone (checkpoint.load_weights_only)."
                )
            _read(checkpoint.tensor(shard.name, state), shard, fragment.start, into=moment)


@torch.no_grad()
def _read(stored: LazyTensor, shard: ParameterShard, start: int, *, into: Tensor) -> None:
    for piece in flat_pieces(shard, start, start + into.numel()):
        array = np.asarray(stored.read(piece.box, piece.flat), dtype=np.float32).reshape(-1)
        # A copy: what comes from a mapped file is read-only, which torch warns of.
        values = torch.from_numpy(array.copy())
        into.narrow(0, piece.offset, values.numel()).copy_(values)
