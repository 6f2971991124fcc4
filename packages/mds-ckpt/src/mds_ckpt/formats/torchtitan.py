"""torchtitan's checkpoints of Llama, read: torch's distributed checkpoint, names of its own.

The weights and Adam's moments are stored; of the model only what tensors tell. The rest is asked
for. Query and key rows have their rotating pairs side by side, as Meta's originals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor, PiecedTensor, StoredPiece
from mds_ckpt.errors import RejectedError, UsageError
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.read_options import ReadOptions

if TYPE_CHECKING:
    from mds_ckpt.families.rule import Rule
    from mds_ckpt.formats.torch_dist.metadata import Metadata
    from mds_ckpt.manifest import ModelRecord
    from mds_ckpt.stored import Stored

_STEP = re.compile(r"step-(\d{1,15})")
_MOMENT = re.compile(r"optimizer\.state\.(.+)\.(exp_avg|exp_avg_sq)")
_WORDS = "tok_embeddings.weight"
_NEEDED = ("num_attention_heads", "max_position_embeddings", "rope_theta")
_ANSWERS = (*_NEEDED, "norm_epsilon")


def find(path: Path) -> Path | None:
    """The folder with ``.metadata``: ``path``, or its newest ``step-N``."""
    if (path / ".metadata").is_file():
        return path
    if not path.is_dir():
        return None
    steps = {
        int(match[1]): entry
        for entry in path.iterdir()
        if (match := _STEP.fullmatch(entry.name))
        and (entry / ".metadata").is_file()
        and not entry.is_symlink()
    }
    return max(steps.items())[1] if steps else None


def detect(path: Path) -> bool:
    """Whether it is a distributed checkpoint with torchtitan's names."""
    folder = find(path)
    if folder is None or (folder / "metadata.json").exists():
        return False
    from mds_ckpt.formats.torch_dist.metadata import read_metadata

    try:
        return _prefix(read_metadata(folder)) is not None
    except RejectedError:
        return False


def _prefix(metadata: Metadata) -> str | None:
    """What stands before the model's names; None if it is no Llama of torchtitan."""
    for prefix in ("", "model."):
        names = metadata.tensors.keys()
        if {f"{prefix}{_WORDS}", f"{prefix}layers.0.attention.wq.weight"} <= names:
            return prefix
    return None


def open_torchtitan(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a checkpoint of torchtitan, or the newest step of a folder."""
    refuse_read_options(options, "torchtitan")
    from mds_ckpt.formats.torch_dist.metadata import read_metadata

    folder = find(path)
    metadata = None if folder is None else read_metadata(folder)
    prefix = None if metadata is None else _prefix(metadata)
    if folder is None or metadata is None or prefix is None:
        raise RejectedError(
            path, "it holds no Llama of torchtitan", remedy="name the folder with .metadata"
        )
    states, left = _sorted(metadata, prefix)
    notes = [f"{left} stored tensors of optimizer, schedule and data are left out"] if left else []
    model = _model(folder, states["weight"], options, notes)
    if model is None:
        named = {
            state: {name: _whole(name, part) for name, part in found.items()}
            for state, found in states.items()
        }
        model = _unknown(states["weight"])
    else:
        named = _canonical(folder, model, states)
    step = _STEP.fullmatch(folder.name)
    return Checkpoint(
        path=folder,
        format="torchtitan",
        model=model,
        states=named,
        step=int(step[1]) if step else None,
        counters={"iteration": int(step[1])} if step else {},
        notes=tuple(notes),
    )


def _sorted(metadata: Metadata, prefix: str) -> tuple[dict[str, dict[str, Stored]], int]:
    """Tensors by state and name of the parameter, and how many belong to neither."""
    from mds_ckpt.formats.torch_dist.reader import Sources
    from mds_ckpt.stored import Stored

    sources, states, left = Sources(), {}, 0
    found: dict[str, dict[str, Stored]] = {"weight": {}}
    for name, tensor in metadata.tensors.items():
        state, key = "weight", name.removeprefix(prefix)
        if (moment := _MOMENT.fullmatch(name)) is not None:
            state, key = moment[2], moment[1].removeprefix(prefix)
        elif not name.startswith(prefix) or name.startswith(
            ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
        ):
            left += 1
            continue
        pieces = [
            StoredPiece(chunk.box, None, source)
            for chunk, source in zip(tensor.chunks, sources.of(tensor), strict=True)
        ]
        lazy = PiecedTensor(key, tensor.shape, tensor.dtype, pieces=pieces)
        path = tensor.chunks[0].place.path if tensor.chunks else Path(name)
        found.setdefault(state, {})[key] = Stored(path, tensor.dtype, tensor.shape, _Flat(lazy))
    states = {state: tensors for state, tensors in found.items() if tensors}
    return states, left


class _Flat:
    """The elements of a tensor in row-major order."""

    def __init__(self, tensor: LazyTensor) -> None:
        self.tensor = tensor

    def read(self, start: int, stop: int) -> Any:
        return self.tensor.read(None, (start, stop))


def _whole(name: str, part: Stored) -> LazyTensor:
    from mds_ckpt.tensors.box import whole

    piece = StoredPiece(whole(part.shape), None, part.source)
    return PiecedTensor(name, part.shape, part.dtype, pieces=[piece])


def _unknown(weights: Mapping[str, Stored]) -> ModelRecord:
    from mds_ckpt.manifest import ModelRecord

    rows = weights[_WORDS].shape[0]
    tied = "output.weight" not in weights
    return ModelRecord(family="unknown", config={}, vocab_size=rows, tied_embeddings=tied)


def _model(
    folder: Path,
    weights: Mapping[str, Stored],
    options: ReadOptions | None,
    notes: list[str],
) -> ModelRecord | None:
    """The model; None if what is missing was neither said nor is needed now."""
    from mds_ckpt.manifest import ModelRecord

    said = dict(options.model) if options is not None else {}
    _check(said)
    missing = [name for name in _NEEDED if name not in said]
    if missing:
        listed = ",".join(f"{name}=VALUE" for name in missing)
        reason = f"no file of it says {', '.join(missing)}"
        remedy = f"say it with --from torchtitan:{listed}"
        if options is not None:
            raise RejectedError(folder, reason, remedy=remedy)
        notes.append(f"{reason}; {remedy}")
        return None
    if "norm_epsilon" not in said:
        notes.append("norm_epsilon is not stored; 1e-5, torchtitan's default, is taken")
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    vocab, hidden = weights[_WORDS].shape
    tied = "output.weight" not in weights
    config = {
        "num_layers": len(layers),
        "hidden_size": hidden,
        **_heads(folder, weights, int(said["num_attention_heads"])),
        "ffn_hidden_size": weights["layers.0.feed_forward.w1.weight"].shape[0],
        "vocab_size": vocab,
        "max_position_embeddings": said["max_position_embeddings"],
        "position_embedding": "rope",
        "rope_theta": float(said["rope_theta"]),
        "activation": "swiglu",
        "normalization": "rmsnorm",
        "norm_epsilon": float(said.get("norm_epsilon", 1e-5)),
        "add_bias": False,
        "tie_embeddings": tied,
    }
    return ModelRecord(family="gpt", config=config, vocab_size=vocab, tied_embeddings=tied)


def _heads(folder: Path, weights: Mapping[str, Stored], heads: int) -> dict[str, int]:
    """Heads and channels, as the first layer's projections have them."""
    first = "layers.0.attention"
    rows, inner = (weights[f"{first}.{w}.weight"].shape[0] for w in ("wk", "wq"))
    channels, left = divmod(inner, heads)
    groups, rest = divmod(rows, channels) if channels else (0, 1)
    if left or rest or channels % 2 or groups < 1 or heads % groups:
        raise RejectedError(
            folder,
            f"{heads} attention heads do not fit queries of {inner} and keys of {rows} rows",
            remedy="say the right number with --from torchtitan:num_attention_heads=N",
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": channels,
    }


def _check(said: Mapping[str, Any]) -> None:
    for name, value in said.items():
        kinds = (int,) if name in _NEEDED[:2] else (int, float)
        if type(value) not in kinds or not 0 < value < 1 << 40:
            raise UsageError(f"{name}={value} makes no sense; give a number above 0")


def _canonical(
    folder: Path, model: ModelRecord, states: Mapping[str, Mapping[str, Stored]]
) -> dict[str, dict[str, LazyTensor]]:
    from mds_ckpt.stored import canonical_tensors

    rules, found = list(_rules(model)), {}
    for state, stored in states.items():
        found[state], unused = canonical_tensors(
            folder, rules, stored, config_name="what was said of it"
        )
        for name, part in unused.items():
            raise RejectedError(
                part.path, "no Llama has it", remedy="tell us which model this is", tensor=name
            )
    return found


def _rules(model: ModelRecord) -> Iterator[Rule]:
    from mds_ckpt.families.change import Grouped, Paired, Stacked
    from mds_ckpt.families.rule import Rule, Shape, Target, same

    shape = Shape.of(model)
    h, f, d = shape.hidden, shape.width, shape.channels
    words: Sequence[int] = (shape.vocab, h)
    yield same("embedding.word_embeddings.weight", _WORDS, *words)
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}", f"layers.{layer}"
        yield same(f"{ours}.input_layernorm.weight", f"{theirs}.attention_norm.weight", h)
        rows = {"wq": shape.heads * d, "wk": shape.groups * d, "wv": shape.groups * d}
        yield Rule(
            Target(f"{ours}.self_attention.linear_qkv.weight", (shape.qkv_rows, h)),
            tuple(Target(f"{theirs}.attention.{w}.weight", (n, h)) for w, n in rows.items()),
            Paired(Grouped(shape.groups, shape.heads // shape.groups, d)),
        )
        name = f"{ours}.self_attention.linear_proj.weight"
        yield same(name, f"{theirs}.attention.wo.weight", h, shape.heads * d)
        yield same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.ffn_norm.weight", h)
        yield Rule(
            Target(f"{ours}.mlp.linear_fc1.weight", (2 * f, h)),
            tuple(Target(f"{theirs}.feed_forward.{w}.weight", (f, h)) for w in ("w1", "w3")),
            Stacked(),
        )
        yield same(f"{ours}.mlp.linear_fc2.weight", f"{theirs}.feed_forward.w2.weight", h, f)
    yield same("decoder.final_layernorm.weight", "norm.weight", h)
    if not model.tied_embeddings:
        yield same("output_layer.weight", "output.weight", *words)


FORMAT = Format(
    name="torchtitan",
    title="torchtitan checkpoint",
    detect=detect,
    open=open_torchtitan,
    answers=_ANSWERS,
)
