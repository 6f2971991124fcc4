"""Turns a launch script, or its argument list, and its DeepSpeed JSON into a configuration of ours.

Nothing is swallowed: what does nothing here and what could not be carried is listed with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from mds_train.config.fields import as_declared, field_table, type_name
from mds_train.config.loading import Setting, Settings, build, given_settings
from mds_train.config.megatron_flags import OldSettings, Outcome, read_flags, resolve_old_flags
from mds_train.config.schema import TrainConfig
from mds_train.errors import InputError, UsageError
from mds_train.migration.deepspeed_json import (
    parse_json,
    read_deepspeed_json,
    read_settings_text,
)
from mds_train.migration.megatron_defaults import missing_defaults
from mds_train.migration.model_family import (
    default_tokenizer,
    family_of_program,
    family_settings,
    marks_added,
)
from mds_train.migration.shell_reader import Launch, read_script
from mds_train.migration.shell_syntax import ScriptError
from mds_train.migration.shell_words import is_known, unknown_parts, without_unknown

__all__ = ["Imported", "import_arguments", "import_script", "toml_text"]

_GPT2_VOCABULARY = 50257


@dataclass(kw_only=True, slots=True)
class Imported:
    """A configuration and what was said on the way.

    Attributes:
        source: What it was made of.
        settings: Ours, each with its origin.
        left_out: What could not be carried, and what to write instead.
        missing: What must still be written.
        remarks: What to know: choices that were made.
        idle: What does nothing here, and why.
        unknown: What only a running script knows and a value depends on, as the script has it.
        start: The command that starts the run on as many processes, if the script says how many.
    """

    source: str
    settings: dict[str, Setting] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    start: str = ""


def import_script(
    path: Path,
    *,
    deepspeed_config: Path | None = None,
    given: Mapping[str, str] | None = None,
) -> Imported:
    """Read a bash script that starts a training, or a JSON file that holds its argument list.

    Args:
        path: The script, or a JSON list of arguments (or an object with such a list in "argv").
        deepspeed_config: DeepSpeed's JSON; the one that the script names or writes if left out.
        given: Variables that the script expects from outside.

    Raises:
        InputError: If there is no training in it, or it is not understood.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such script; check the path.")
    if path.suffix == ".json":
        return import_arguments(_argument_list(path), name=str(path), json_file=deepspeed_config)
    try:
        reading = read_script(path, given=given)
    except ScriptError as error:
        raise InputError(f"{error}.") from error
    if not reading.launches:
        raise InputError(
            f"{path}: no command with --num-layers or --micro-batch-size was found; give the "
            f"variables that it expects with --set NAME=VALUE, or the arguments as a JSON list."
        )
    launch = reading.launches[0]
    text = None
    if deepspeed_config is None:
        text = _written_json(launch, reading.files, folder=path.parent)
    imported = import_arguments(
        launch.words, name=str(path), json_file=deepspeed_config, json_text=text
    )
    imported.remarks += reading.remarks
    if names := [*reading.placeholders, *reading.variables.behind(imported.unknown)]:
        imported.missing.append(
            f"What the script leaves open can be given with --set NAME=VALUE: "
            f"{', '.join(dict.fromkeys(names))}."
        )
    if len(reading.launches) > 1:
        lines = ", ".join(str(item.line) for item in reading.launches[1:])
        imported.remarks.append(f"It starts more than one training; lines {lines} were left out.")
    return imported


def import_arguments(
    words: Iterable[str],
    *,
    name: str,
    json_file: Path | None = None,
    json_text: str | None = None,
) -> Imported:
    """Turn a command's words into a configuration.

    Args:
        words: From the launcher or the Python file on.
        name: What the words are from, for origins.
        json_file: DeepSpeed's JSON.
        json_text: Its content, where a script would write it.

    Raises:
        InputError: If it does not pretrain a model that is trained here.
    """
    launch = Launch(line=0, words=tuple(words))
    family = family_of_program(launch.script, name=name)
    imported = Imported(source=name, start=_start_command(launch.launcher))
    outcomes = list(read_flags(launch.arguments))
    values = {outcome.typed.replace("_", "-"): outcome.values for outcome in outcomes}
    flags = set(values)
    routed = {"--topk": ("1",)} if "--num-experts" in flags else {}
    with_values = [" ".join([flag, *words]) for flag, words in (routed | values).items() if words]
    settings: dict[str, Setting] = {
        key: Setting(value=value, origin=origin)
        for key, (value, origin) in missing_defaults([*flags, *with_values]).items()
    }
    settings |= family_settings(family, values, script=launch.script)
    settings |= _of_flags(outcomes, imported)
    if "--deepspeed" in flags:
        settings |= _of_json(
            settings, imported, outcomes=outcomes, json_file=json_file, json_text=json_text
        )
    deferred = tuple(item for outcome in outcomes for item in outcome.deferred)
    try:
        settings = dict(
            resolve_old_flags(OldSettings(settings={}, deferred=deferred), settings=settings)
        )
    except UsageError as error:
        imported.missing.append(str(error))
    imported.settings = {
        key: Setting(value=item.value, origin=item.origin.removeprefix("command line "))
        for key, item in settings.items()
    }
    _complete(imported, values, family=family)
    return imported


def _of_flags(outcomes: Sequence[Outcome], imported: Imported) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    after_unknown = False
    for outcome in outcomes:
        if not outcome.is_idle and any(not is_known(value) for value in outcome.values):
            parts = [part for value in outcome.values for part in unknown_parts(value)]
            imported.unknown += parts
            imported.left_out.append(
                f"{outcome.typed}: its value depends on {', '.join(parts)}, which only a running "
                f"script knows."
            )
        elif outcome.typed.replace("_", "-") == "--deepspeed-config":
            pass  # its content becomes settings
        elif outcome.error is not None:
            imported.left_out.append(str(outcome.error))
        elif outcome.unknown:
            is_flag = outcome.typed.startswith("-")
            if is_flag or not after_unknown:  # words that follow an unknown flag are its values
                imported.left_out.append(f"{outcome.typed}: no such flag is known here.")
            after_unknown = True
            continue
        else:
            settings |= {
                key: Setting(value=item.value, origin=outcome.typed)
                for key, item in outcome.settings.items()
            }
            if outcome.remark:
                (imported.idle if outcome.is_idle else imported.remarks).append(outcome.remark)
        after_unknown = False
    return settings


def _of_json(
    settings: Settings,
    imported: Imported,
    *,
    outcomes: Sequence[Outcome],
    json_file: Path | None,
    json_text: str | None,
) -> dict[str, Setting]:
    named = next(
        (o.values[0] for o in outcomes if o.typed.replace("_", "-") == "--deepspeed-config"), ""
    )
    if json_file is not None:
        named, json_text = str(json_file), read_settings_text(json_file)
    if json_text is None:
        imported.missing.append(
            f"DeepSpeed's JSON ({named or 'none is named'}) is not there; give it with "
            f"--deepspeed-config FILE. Its gradient_clipping and ZeRO stage would count."
        )
        return {}
    json_text = without_unknown(json_text, replacement="null")
    try:
        findings = read_deepspeed_json(parse_json(json_text, name=named or "the JSON"))
    except InputError as error:
        if json_file is not None:
            raise
        imported.missing.append(f"DeepSpeed's settings: {error}")
        return {}
    imported.idle += findings.idle
    imported.left_out += findings.left_out
    taken = {
        key: item
        for key, value in findings.settings.items()
        if (item := _declared(key, value, findings.places[key], imported)) is not None
    }
    for key, item in taken.items():
        silent = key == "train.gradient_clipping" and "gradient_clipping" not in json_text
        if said := _overruled(key, item, settings.get(key), silent=silent):
            imported.remarks.append(said)
    return taken


def _declared(key: str, value: object, place: str, imported: Imported) -> Setting | None:
    """What the JSON says as the field's type; None where it is of another."""
    annotation = field_table(TrainConfig)[key].annotation
    try:
        return Setting(value=as_declared(annotation, value), origin=f"DeepSpeed's {place}")
    except TypeError:
        imported.left_out.append(f"DeepSpeed's {place}: {value!r} is not {type_name(annotation)}.")
        return None


def _overruled(key: str, taken: Setting, earlier: Setting | None, *, silent: bool) -> str:
    """What to say where the JSON has another value than a flag; empty for nothing."""
    if silent:
        return (
            f"{key}: DeepSpeed's JSON has none, so the original clips nothing, whatever "
            f"--clip-grad says; 0 was taken."
        )
    if earlier is None or earlier.value == taken.value or not earlier.origin.startswith("--"):
        return ""
    return (
        f"{key}: {earlier.origin} says {earlier.value}, {taken.origin} {taken.value}; "
        f"DeepSpeed goes by its JSON, so that was taken."
    )


def _complete(imported: Imported, values: Mapping[str, Sequence[str]], *, family: str) -> None:
    """Add what the original works out itself, and list what must still be written."""
    settings = imported.settings
    _complete_model(settings, values, family=family)
    if "--eval-iters" not in values and "train.global_batch_size" in settings:
        count = 100 * int(settings["train.global_batch_size"].value)
        settings["watch.eval_samples"] = Setting(
            value=count, origin="Megatron's default of --eval-iters"
        )
    load, save = settings.get("checkpoint.load"), settings.get("train.run_dir")
    if load is not None and save is not None and load.value == save.value:
        settings["checkpoint.from_scratch_if_missing"] = Setting(
            value=True, origin="--save and --load name one folder"
        )
    for key, spec in field_table(TrainConfig).items():
        if spec.required and key not in settings:
            advice = _ADVICE.get(key) or spec.doc or "the script does not say it."
            imported.missing.append(f"{key}: {advice}")
    if "data.store" not in settings and "data.stores" not in settings:
        imported.missing.append(f"data.store: {field_table(TrainConfig)['data.store'].doc}")
    if not imported.missing:
        try:
            build(settings)
        except ValueError as error:
            imported.left_out.append(f"As it stands, a run would refuse it: {error}")


_ADVICE = {
    "model.vocab_size": (
        "the original asks the tokenizer; write the number of its tokens (of GPT-2's: "
        f"{_GPT2_VOCABULARY})."
    ),
    "train.run_dir": "the script has no --save that is known; name the folder of the run.",
    "train.global_batch_size": (
        "the original takes --micro-batch-size times the data-parallel ranks; write that number."
    ),
}


def _complete_model(
    settings: dict[str, Setting], values: Mapping[str, Sequence[str]], *, family: str
) -> None:
    hidden = settings.get("model.hidden_size")
    if "--swiglu" in values and "model.ffn_hidden_size" not in settings and hidden is not None:
        # Two thirds of 4 h, down to a multiple of 64, as the original has it.
        width = int((4 * int(hidden.value) * 2 / 3) / 64) * 64
        settings["model.ffn_hidden_size"] = Setting(
            value=width, origin="Megatron's default for --swiglu"
        )
    if "model.vocab_size" in settings:
        return
    kind = (values.get("--tokenizer-type") or (default_tokenizer(family),))[0]
    files = values.get("--vocab-file") or ("",)
    count = _count_tokens(Path(files[0])) if files[0] and is_known(files[0]) else None
    if count is not None:
        count += marks_added(kind, Path(files[0]), values)
        settings["model.vocab_size"] = Setting(value=count, origin=f"counted in {files[0]}")
    elif kind == "GPT2BPETokenizer" and PurePath(files[0]).name == "gpt2-vocab.json":
        settings["model.vocab_size"] = Setting(
            value=_GPT2_VOCABULARY, origin="GPT-2's own vocabulary"
        )


def _count_tokens(path: Path) -> int | None:
    """Tokens of a vocabulary file: JSON, or one a line."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".json":
        try:
            document = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            return None
        return len(document) if isinstance(document, dict) else None
    return len(text.splitlines()) or None


def _written_json(launch: Launch, files: Mapping[str, str], *, folder: Path) -> str | None:
    """The JSON that the command names: what the script writes, or a file beside it."""
    for outcome in read_flags(launch.arguments):
        if outcome.typed.replace("_", "-") == "--deepspeed-config" and outcome.values:
            name = outcome.values[0]
            if name in files:
                return files[name]
            for path in (Path(name), folder / name):
                if is_known(name) and path.is_file():
                    return read_settings_text(path)
    return None


def _argument_list(path: Path) -> list[str]:
    try:
        document = json.loads(read_settings_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path}: no valid JSON ({error}).") from error
    words = document.get("argv") if isinstance(document, dict) else document
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(
            f'{path}: it must hold a list of words, or an object with such a list in "argv".'
        )
    return words


def _start_command(launcher: Sequence[str]) -> str:
    """How to start as many processes with torchrun."""
    numbers = {"nproc": "1", "nodes": "1"}
    for index, word in enumerate(launcher):
        flag, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        value = value if equals else (launcher[index + 1] if index + 1 < len(launcher) else "")
        if flag in ("nproc_per_node", "num_gpus") and value:
            numbers["nproc"] = value
        if flag in ("nnodes", "num_nodes") and value:
            numbers["nodes"] = value
    if not all(number.isdigit() for number in numbers.values()) or numbers == _ONE:
        return ""
    nodes = "" if numbers["nodes"] == "1" else f" --nnodes {numbers['nodes']}"
    return f"torchrun{nodes} --nproc-per-node {numbers['nproc']} -m mds_train run"


_ONE = {"nproc": "1", "nodes": "1"}


def toml_text(imported: Imported) -> str:
    """The configuration as TOML, with what was said on the way in comments."""
    lines = [f"# From {imported.source}"]
    for title, sentences in (
        ("To be written", imported.missing),
        ("Not carried", imported.left_out),
        ("To know", imported.remarks),
    ):
        lines += [f"# {title}: {sentence}" for sentence in sentences]
    return "\n".join([*lines, "", given_settings(imported.settings)])
