"""Hugging Face folders, written: sharded safetensors with index, configuration, companions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt import companions
from mds_ckpt.checkpoint import BLOCK_BYTES, Checkpoint, LazyTensor
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.families import choose
from mds_ckpt.families.change import Transposed
from mds_ckpt.families.rule import Rule
from mds_ckpt.files.file_operations import FileOperations, write_file
from mds_ckpt.files.safetensors_header import TensorSpec
from mds_ckpt.files.safetensors_places import PlacedSafetensors
from mds_ckpt.formats.huggingface import INDEX_NAME
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.megatron.target_ranks import merged_losses
from mds_ckpt.plan import Loss, Options, Plan, cast, refuse_layout, target_dtype
from mds_ckpt.tensors.box import Box, row_blocks, size, whole
from mds_ckpt.tensors.dtype import ITEM_SIZES
from mds_ckpt.writers.beside import Task, side_by_side

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

SHARD_BYTES = 5_000_000_000
_HELD_BYTES = 64 << 20
"""Bytes that may be in work at a time; twice the largest tensor where that is more."""
_STRETCH_BYTES = 8 << 20
"""Bytes of a tensor that one thread copies without asking for more."""
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_TOKEN_IDS = ("bos_token_id", "eos_token_id")
_VOCABULARY = frozenset(
    {"embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"}
)


@dataclass(frozen=True, slots=True)
class Output:
    """One rule and the tensors that it writes."""

    rule: Rule
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all that it writes."""
        return sum(spec.nbytes for spec in self.specs)


def plan(checkpoint: Checkpoint, options: Options) -> Plan:
    """What writing ``checkpoint`` as a Hugging Face folder takes. Reads no tensor data.

    Args:
        checkpoint: Any opened checkpoint of a family that transformers has.
        options: Type and vocabulary; the weights are all that the format holds.

    Raises:
        RejectedError: If the tensors are not those of the model that the configuration describes.
        UnsupportedError: If no family of transformers is like the model.
    """
    refuse_layout(options, "hf")
    model = _true_vocabulary(checkpoint, options.vocab_size)
    origin = checkpoint.origin.get("huggingface") or {}
    try:
        family = choose(model, prefer=origin.get("model_type"))
    except ValueError as error:
        remedy = "convert to another format, or change the model"
        raise UnsupportedError(checkpoint.path, str(error), remedy=remedy) from None
    rules = family.rules(model)
    outputs = outputs_of(checkpoint, rules, options.dtype)
    shards = shards_of(outputs, options.shard_bytes or SHARD_BYTES)
    dtype = _main_dtype(outputs)
    config = _config(family.to_hf_config(model), origin, dtype)
    texts = _companions(checkpoint, config)

    return Plan(
        used=[("weight", rule.canonical.name) for rule in rules],
        dropped={
            (state, name): "the format holds weights only"
            for state, tensors in checkpoint.states.items()
            if state != "weight"
            for name in tensors
        },
        num_targets=sum(len(output.specs) for output in outputs),
        nbytes=sum(output.nbytes for output in outputs) + sum(map(len, texts.values())),
        write=partial(write_shards, checkpoint, shards, texts, options.jobs),
        notes=[f"written as {family.name}, {_TORCH_NAMES.get(dtype, dtype)}", *family.notes(model)],
    )


def write_shards(
    checkpoint: Checkpoint,
    shards: Sequence[Sequence[Output]],
    texts: Mapping[str, bytes],
    jobs: int,
    folder: Path,
    operations: FileOperations,
) -> list[Loss]:
    """Fill the folder; returns what casts lost."""
    losses: list[Loss] = []
    names = _shard_names(len(shards))
    # Files beside one another, or work beside work in one file; not both, for memory's sake.
    inner = max(1, jobs // len(shards))
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        running = [
            pool.submit(_write_shard, checkpoint, shard, folder / name, losses, operations, inner)
            for name, shard in zip(names, shards, strict=True)
        ]
        for job in running:
            job.result()
    for name, text in {**texts, **_index(names, shards)}.items():
        write_file(folder / name, text, operations=operations)
    return merged_losses(losses)


def _true_vocabulary(checkpoint: Checkpoint, vocab_size: int | None) -> ModelRecord:
    model = checkpoint.model
    rows = model.padded_vocab_size or model.vocab_size
    if vocab_size is not None and not 1 <= vocab_size <= rows:
        raise RejectedError(
            checkpoint.path,
            f"the vocabulary was given as {vocab_size} and the embedding has {rows} rows",
            remedy=f"give --vocab-size from 1 to {rows}",
        )
    vocab = vocab_size or model.vocab_size
    config = {**model.config, "vocab_size": vocab}
    return replace(model, vocab_size=vocab, padded_vocab_size=None, config=config)


def outputs_of(
    checkpoint: Checkpoint, rules: Sequence[Rule], dtype: str | None
) -> Sequence[Output]:
    """What is written of each rule; RejectedError where the tensors are not those of the rules."""
    tensors = dict(checkpoint.tensors)
    outputs = []
    for rule in rules:
        name, shape = rule.canonical.name, rule.canonical.shape
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise RejectedError(
                checkpoint.path,
                "its model needs it and the checkpoint lacks it",
                remedy="check the model's configuration in the checkpoint",
                tensor=name,
            )
        cut = name in _VOCABULARY and tensor.shape[1:] == shape[1:] and tensor.shape >= shape
        if tensor.shape != shape and not cut:
            raise RejectedError(
                checkpoint.path,
                f"it has shape {list(tensor.shape)} and its model gives it {list(shape)}",
                remedy="check the model's configuration in the checkpoint",
                tensor=name,
            )
        written = target_dtype(tensor.dtype, dtype)
        specs = tuple(TensorSpec(target.name, written, target.shape) for target in rule.hf)
        outputs.append(Output(rule, specs))
    for name in tensors:
        raise RejectedError(
            checkpoint.path,
            "the model that it belongs to has no such parameter",
            remedy="check the model's configuration in the checkpoint",
            tensor=name,
        )
    # Wide types first, so that every tensor of a file is aligned to its element size.
    return sorted(outputs, key=lambda output: -ITEM_SIZES[output.specs[0].dtype])


def shards_of(outputs: Sequence[Output], shard_bytes: int) -> list[list[Output]]:
    """The outputs of each file, none of more than ``shard_bytes`` but for a larger tensor alone."""
    shards: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if shards[-1] and filled + output.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _write_shard(
    checkpoint: Checkpoint,
    outputs: Sequence[Output],
    path: Path,
    losses: list[Loss],
    operations: FileOperations,
    jobs: int,
) -> None:
    specs = [spec for output in outputs for spec in output.specs]
    most = max(_HELD_BYTES, 2 * max((output.nbytes for output in outputs), default=0))
    with PlacedSafetensors(path, specs, metadata={"format": "pt"}, operations=operations) as file:
        tasks = (task for output in outputs for task in _tasks(checkpoint, output, file, losses))
        side_by_side(tasks, jobs=jobs, most=most)


def _tasks(
    checkpoint: Checkpoint, output: Output, file: PlacedSafetensors, losses: list[Loss]
) -> Iterator[Task]:
    """What writes the tensors of ``output``: in parts where these can be read by themselves."""
    tensor, change = checkpoint.tensor(output.rule.canonical.name), output.rule.change
    everything = whole(output.rule.canonical.shape)
    if output.rule.is_same and tensor.is_sliceable:
        start = 0
        for box in row_blocks(everything, _STRETCH_BYTES // ITEM_SIZES[tensor.dtype]):
            work = partial(_copy, tensor, box, output.specs[0], start, file, losses)
            yield Task(4 * BLOCK_BYTES, work)
            start += size(box)
    elif change == Transposed():
        for box in tensor.column_boxes():
            work = partial(_transpose, tensor, box, output.specs[0], file, losses)
            yield Task(2 * output.nbytes, work)
    else:
        yield Task(2 * output.nbytes, partial(_changed, tensor, everything, output, file, losses))


def _copy(
    tensor: LazyTensor,
    box: Box,
    spec: TensorSpec,
    start: int,
    file: PlacedSafetensors,
    losses: list[Loss],
) -> None:
    blocks = (cast(b, spec.dtype, name=spec.name, losses=losses) for b in tensor.blocks(box))
    file.write(spec.name, blocks, start=start)


def _transpose(
    tensor: LazyTensor, box: Box, spec: TensorSpec, file: PlacedSafetensors, losses: list[Loss]
) -> None:
    """Columns of the matrix as rows of the target."""
    blocks = Transposed().blocks(tensor.read(box))
    parts = (cast(block, spec.dtype, name=spec.name, losses=losses) for block in blocks)
    file.write(spec.name, parts, start=box[1][0] * tensor.shape[0])


def _changed(
    tensor: LazyTensor, box: Box, output: Output, file: PlacedSafetensors, losses: list[Loss]
) -> None:
    """Read the tensor, and write what it is there. A matrix is transposed as it is written."""
    array, change = tensor.read(box), output.rule.change
    if isinstance(change, Transposed):
        written: Iterable[Iterable[Array]] = [change.blocks(array)]
    else:
        written = [[part] for part in change.to_hf(array)]
    for spec, arrays in zip(output.specs, written, strict=True):
        parts = (cast(part, spec.dtype, name=spec.name, losses=losses) for part in arrays)
        file.write(spec.name, parts)


def _index(names: Sequence[str], shards: Sequence[Sequence[Output]]) -> dict[str, bytes]:
    if len(shards) == 1:
        return {}
    weight_map = {
        spec.name: name
        for name, shard in zip(names, shards, strict=True)
        for output in shard
        for spec in output.specs
    }
    total = sum(output.nbytes for shard in shards for output in shard)
    members = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {INDEX_NAME: companions.as_json(members)}


def _main_dtype(outputs: Sequence[Output]) -> str:
    """The type of most of the bytes."""
    counts: Counter[str] = Counter()
    for output in outputs:
        counts[output.specs[0].dtype] += output.nbytes
    return counts.most_common(1)[0][0]


def _config(members: dict[str, Any], origin: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config.json``: what we know, and what the folder that it came from said besides."""
    named = _TORCH_NAMES.get(dtype, "float32")
    # transformers up to 4 reads the second.
    members = {**members, "dtype": named, "torch_dtype": named}
    if origin.get("model_type") == members["model_type"]:
        return {**origin, **members}
    return members


def _companions(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, bytes]:
    """The folder's texts: configuration, tokenizer, generation settings."""
    beside = companions.beside(checkpoint.companions, checkpoint.sealed)
    found = {name: path for name, path in beside.items() if name in companions.NAMES}
    texts = {name: companions.read(path) for name, path in found.items()}
    end = companions.end_token(found)
    # Null, not absent: transformers' defaults are ids of somebody else's vocabulary.
    ends = dict.fromkeys(_TOKEN_IDS, None if end is None else end[1])
    config = {**ends, "pad_token_id": None, **config}
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        longest = checkpoint.config["max_position_embeddings"]
        texts["tokenizer_config.json"] = companions.tokenizer_config(end, longest=longest)
    if "generation_config.json" not in found and checkpoint.model.family == "gpt":
        settings: dict[str, Any] = {"_from_model_config": True}
        settings |= {name: config[name] for name in _TOKEN_IDS if config[name] is not None}
        texts["generation_config.json"] = companions.as_json(settings)
    texts["config.json"] = companions.as_json(config)
    return texts
