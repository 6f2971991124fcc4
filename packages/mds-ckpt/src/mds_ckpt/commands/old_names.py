"""The commands of Megatron-DeepSpeed, DeepSpeed and Megatron-LM under their old names and flags.

Each old flag changes what is done, or does nothing and says why, or is an error that says what to
write instead. ``deepspeed_to_megatron.py`` and ``deepspeed_to_megatron`` are the same name as
``deepspeed-to-megatron``, so that a script changes in one word.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.commands.report import say, say_report
from mds_ckpt.errors import RejectedError, UnsupportedError, UsageError
from mds_ckpt.escape import printable

__all__ = ["NAMES", "add_old_commands", "new_spelling"]

Run = Callable[[argparse.Namespace], int]
Add = Callable[[str, str, Run], argparse.ArgumentParser]


def new_spelling(word: str) -> str:
    """``deepspeed_to_megatron.py`` as ``deepspeed-to-megatron``; other words as they are."""
    stem = Path(word).name.removesuffix(".py").replace("_", "-")
    return stem if stem in NAMES else word


def add_old_commands(add: Add) -> None:
    """Add every old command by ``add(name, help, run)``, which returns its parser."""
    for name, (text, run, fill) in _COMMANDS.items():
        fill(add(name, text, run))


def _convert(arguments: argparse.Namespace, source: str, target: str, **options: Any) -> int:
    from mds_ckpt.conversion import convert

    say_report(convert(source, target, **options))
    return 0


def _without_effect(flags: Mapping[str, bool], reason: str) -> None:
    """Say which of the given flags do nothing, and why."""
    given = [flag for flag, is_given in flags.items() if is_given]
    if given:
        verb = "does" if len(given) == 1 else "do"
        say(f"note: {' and '.join(given)} {verb} nothing here: {reason}")


# Megatron-DeepSpeed's tools/convert_checkpoint ---------------------------------------------------


def _fill_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_folder", required=True, metavar="I")
    parser.add_argument("--output_folder", required=True, metavar="O", help="is to appear")
    parser.add_argument("--target_tp", type=int, default=1, metavar="N")
    parser.add_argument("--target_pp", type=int, default=1, metavar="N")


def _fill_release(parser: argparse.ArgumentParser) -> None:
    _fill_folders(parser)
    parser.add_argument("--for_release", action="store_true", help="reset all counts")


def _to_megatron(arguments: argparse.Namespace) -> int:
    return _convert(
        arguments,
        arguments.input_folder,
        arguments.output_folder,
        to="megatron",
        tp=arguments.target_tp,
        pp=arguments.target_pp,
        release=arguments.for_release,
    )


def _to_deepspeed(arguments: argparse.Namespace) -> int:
    return _convert(
        arguments,
        arguments.input_folder,
        arguments.output_folder,
        to="deepspeed",
        tp=arguments.target_tp,
        pp=arguments.target_pp,
    )


def _to_transformers(arguments: argparse.Namespace) -> int:
    degrees = {"--target_tp": arguments.target_tp, "--target_pp": arguments.target_pp}
    for flag, degree in degrees.items():
        if degree != 1:
            raise UsageError(f"a Hugging Face folder holds whole tensors; leave {flag} away")
    _without_effect({"--for_release": arguments.for_release}, "the format holds no counts")
    return _convert(arguments, arguments.input_folder, arguments.output_folder, to="hf")


def _fill_inspect_deepspeed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", required=True, metavar="PATH")
    parser.add_argument("--target_tp", type=int, metavar="N")
    parser.add_argument("--target_pp", type=int, metavar="N")


def _inspect_deepspeed(arguments: argparse.Namespace) -> int:
    from mds_ckpt.commands.inspect import show

    degrees = {"--target_tp": arguments.target_tp, "--target_pp": arguments.target_pp}
    _without_effect(
        {flag: degree is not None for flag, degree in degrees.items()},
        "tensors are shown whole, whatever degrees they have or will have",
    )
    return show(arguments.folder)


def _fill_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE", help="one file that torch.save wrote")


def _inspect(arguments: argparse.Namespace) -> int:
    """One line for each leaf of a torch file, as the old script printed them."""
    from mds_ckpt.pickles.archive import open_torch_file
    from mds_ckpt.pickles.records import Namespace, TensorRef

    def show(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                show(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, TensorRef):
            say(f"[tensor] {printable(name)} = {list(value.shape)}")
        elif isinstance(value, Namespace):
            show(value.fields, name)
        else:
            say(f"[other] {printable(name)} = {printable(str(value), longest=2000)}")

    show(open_torch_file(Path(arguments.path)).value, "")
    return 0


# DeepSpeed's own ---------------------------------------------------------------------------------


def _fill_universal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input_folder", required=True, metavar="I")
    parser.add_argument("--output_folder", required=True, metavar="O", help="is to appear")
    parser.add_argument("--num_extract_workers", type=int, metavar="N")
    parser.add_argument("--num_merge_workers", type=int, metavar="N", help="files at a time")
    parser.add_argument("--keep_temp_folder", action="store_true")
    parser.add_argument("--no_strict", action="store_true")
    parser.add_argument("--inject_missing_state", action="store_true")


def _to_universal(arguments: argparse.Namespace) -> int:
    _without_effect(
        {
            "--num_extract_workers": arguments.num_extract_workers is not None,
            "--keep_temp_folder": arguments.keep_temp_folder,
        },
        "nothing is extracted to files in between",
    )
    _without_effect(
        {
            "--no_strict": arguments.no_strict,
            "--inject_missing_state": arguments.inject_missing_state,
        },
        "how parameters are shared is known from their names, not from stored patterns",
    )
    return _convert(
        arguments,
        arguments.input_folder,
        arguments.output_folder,
        to="universal",
        jobs=arguments.num_merge_workers or 2,
    )


def _fill_fp32(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir", help="is to appear")
    parser.add_argument("--max_shard_size", type=_bytes, default=5 * 10**9, metavar="SIZE")
    parser.add_argument("--safe_serialization", action="store_true")
    parser.add_argument("-t", "--tag", metavar="TAG", help="folder of the step")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", action="store_true", dest="debug", help="as --debug")


def _bytes(word: str) -> int:
    match = re.fullmatch(r"(\d{1,9})(KB|MB|GB|TB|KIB|MIB|GIB|TIB)?", word.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{word!r} is no size; write it as 5GB")
    unit = match[2] or "B"
    base = 1024 if "I" in unit else 1000
    power: int = base ** "BKMGT".index(unit[0])
    return int(match[1]) * power


def _to_fp32(arguments: argparse.Namespace) -> int:
    if arguments.exclude_frozen_parameters:
        raise UsageError(
            "a model without its frozen parameters can't be loaded; leave "
            "--exclude_frozen_parameters away"
        )
    if not arguments.safe_serialization:
        say("note: safetensors are written, as --safe_serialization asks for")
    source = Path(arguments.checkpoint_dir)
    return _convert(
        arguments,
        str(source / arguments.tag if arguments.tag else source),
        arguments.output_dir,
        to="hf",
        dtype="F32",
        max_shard_bytes=arguments.max_shard_size,
    )


# Hugging Face and back ---------------------------------------------------------------------------


def _fill_hf2megads(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rest=[])
    parser.add_argument("--hf-ckpt-dir", metavar="PATH", help="the Hugging Face folder")
    parser.add_argument("--hf-ckpt-num-shards", type=int, metavar="N")
    parser.add_argument("--load-mode", choices=("torchbin", "safetensor", "auto"))
    parser.add_argument("--to-hf-ckpt", action="store_true", help="the other way")
    parser.add_argument("--load", metavar="PATH", help="with --to-hf-ckpt: the checkpoint")
    parser.add_argument("--save", required=True, metavar="PATH", help="is to appear")
    for flag in ("tensor", "pipeline"):
        parser.add_argument(f"--{flag}-model-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--bf16", action="store_const", const="BF16", dest="dtype")
    parser.add_argument("--fp16", action="store_const", const="F16", dest="dtype")


def _hf2megads(arguments: argparse.Namespace) -> int:
    flags = {word.partition("=")[0]: True for word in arguments.rest if word.startswith("--")}
    _without_effect(flags, "the checkpoint itself says what the model is")
    _without_effect(
        {
            "--hf-ckpt-num-shards": arguments.hf_ckpt_num_shards is not None,
            "--load-mode": arguments.load_mode is not None,
        },
        "the folder's own index and files tell",
    )
    degrees = {
        "tp": arguments.tensor_model_parallel_size,
        "pp": arguments.pipeline_model_parallel_size,
    }
    if not arguments.to_hf_ckpt:
        source = _given(arguments.hf_ckpt_dir, "--hf-ckpt-dir", "the Hugging Face folder")
        options = {"to": "deepspeed", "dtype": arguments.dtype, **degrees}
        return _convert(arguments, source, arguments.save, **options)
    source = _given(arguments.load, "--load", "the checkpoint to convert")
    _without_effect(
        {"--hf-ckpt-dir": arguments.hf_ckpt_dir is not None},
        "config.json and tokenizer come from the checkpoint; copy others yourself",
    )
    return _convert(arguments, source, arguments.save, to="hf", dtype=arguments.dtype)


def _given(value: str | None, flag: str, what: str) -> str:
    if value is None:
        raise UsageError(f"{what} is missing; give {flag}")
    return value


# Megatron's checkpoint_util ----------------------------------------------------------------------

_LOADERS = {
    "megatron": None,
    "mcore": None,
    "llama2_hf": "hf",
    "llama_mistral": "hf",
    "mixtral_hf": "hf",
}
_SAVERS = {
    "megatron": "megatron",
    "mcore": "torch_dist",
    **{name: name for name in ("deepspeed", "universal", "hf", "mds")},
}


def _fill_util(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-type", required=True, choices=("GPT", "BERT"))
    parser.add_argument("--loader", default="megatron", choices=tuple(_LOADERS))
    parser.add_argument("--saver", default="megatron", choices=tuple(_SAVERS))
    parser.add_argument("--load-dir", required=True, metavar="PATH")
    parser.add_argument("--save-dir", required=True, metavar="PATH", help="is to appear")
    parser.add_argument("--max-queue-size", type=int, metavar="N")
    parser.add_argument("--no-checking", action="store_true")
    parser.add_argument("--true-vocab-size", type=int, metavar="V")
    parser.add_argument("--vocab-file", metavar="PATH", help="count its words")
    parser.add_argument("--megatron-path", metavar="PATH")
    for flag in ("tensor", "pipeline"):
        text = "as the source has it, if left out"
        parser.add_argument(f"--target-{flag}-parallel-size", type=int, metavar="N", help=text)


def _util(arguments: argparse.Namespace) -> int:
    from mds_ckpt.formats import open_checkpoint

    _without_effect(
        {
            "--max-queue-size": arguments.max_queue_size is not None,
            "--no-checking": arguments.no_checking,
            "--megatron-path": arguments.megatron_path is not None,
        },
        "one process reads and writes, checks always, and needs no Megatron",
    )
    source_format = _LOADERS[arguments.loader]
    checkpoint = open_checkpoint(arguments.load_dir, format=source_format)
    family = {"GPT": "gpt", "BERT": "bert"}[arguments.model_type]
    if checkpoint.model.family != family:
        raise UnsupportedError(
            checkpoint.path,
            f"it is a {checkpoint.model.family} and --model-type says {arguments.model_type}",
            remedy="give the other --model-type",
        )
    degrees = {
        "tp": arguments.target_tensor_parallel_size or checkpoint.parallel.get("tp", 1),
        "pp": arguments.target_pipeline_parallel_size or checkpoint.parallel.get("pp", 1),
    }
    is_whole = arguments.saver in ("hf", "mds", "universal")
    return _convert(
        arguments,
        arguments.load_dir,
        arguments.save_dir,
        to=_SAVERS[arguments.saver],
        source_format=source_format,
        vocab_size=arguments.true_vocab_size or _count_words(arguments.vocab_file),
        **({} if is_whole else degrees),
    )


def _count_words(path: str | None) -> int | None:
    """The words of a vocabulary: members of a JSON object, or lines."""
    if path is None:
        return None
    from mds_ckpt.companions import SIZE_LIMIT
    from mds_ckpt.files import strict_json
    from mds_ckpt.files.regular_file import read_whole

    data = read_whole(Path(path), limit=SIZE_LIMIT)
    if not data.lstrip().startswith(b"{"):
        return len(data.splitlines())
    try:
        members = strict_json.parse(data)
    except strict_json.JsonError as error:
        raise RejectedError(path, str(error), remedy="give --true-vocab-size") from None
    return len(members)


_Fill = Callable[[argparse.ArgumentParser], None]
_COMMANDS: Mapping[str, tuple[str, Run, _Fill]] = {
    "deepspeed-to-megatron": ("as convert --to megatron", _to_megatron, _fill_release),
    "deepspeed-to-transformers": ("as convert --to hf", _to_transformers, _fill_release),
    "deepspeed-to-deepspeed": ("as convert --to deepspeed", _to_deepspeed, _fill_folders),
    "inspect-checkpoint": ("every leaf of one torch file", _inspect, _fill_inspect),
    "inspect-deepspeed-checkpoint": ("as inspect", _inspect_deepspeed, _fill_inspect_deepspeed),
    "ds-to-universal": ("as convert --to universal", _to_universal, _fill_universal),
    "zero-to-fp32": ("as convert --to hf --dtype fp32", _to_fp32, _fill_fp32),
    "hf2megads-weight-converter": ("as convert, both ways", _hf2megads, _fill_hf2megads),
    "checkpoint-util": ("as convert, by loader and saver", _util, _fill_util),
}
NAMES: Sequence[str] = tuple(_COMMANDS)
"""Every old command, as this command line spells it."""
