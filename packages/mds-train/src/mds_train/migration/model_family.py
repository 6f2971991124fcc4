"""What the original's entry files say of a model: pretrain_{gpt,bert,t5}.py.

They choose the family and with it the tokenizer, whose file BERT and T5 need where the data are a
Megatron pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from mds_train.config.loading import Setting
from mds_train.config.model import FAMILIES
from mds_train.errors import InputError
from mds_train.migration.shell_words import is_known

__all__ = ["default_tokenizer", "family_of_program", "family_settings", "marks_added"]

_WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")


def family_of_program(script: str, *, name: str) -> str:
    """The family that an entry file trains; a GPT where there is no file.

    Raises:
        InputError: If it does not pretrain a model that is trained here.
    """
    program = PurePath(script).stem
    if not program:
        return "gpt"
    if program.startswith("pretrain_"):
        family = program.removeprefix("pretrain_").split("_")[0]
        if family in FAMILIES:
            return family
        if family.startswith("llama"):
            return "gpt"
        known = ", ".join(FAMILIES)
        raise InputError(
            f"{name}: {PurePath(script).name} trains a model of another kind ({family}); here the "
            f"kinds are {known}."
        )
    raise InputError(
        f"{name}: {PurePath(script).name} does not pretrain a model; only the launch scripts of "
        f"pretrain_gpt.py and its like become a configuration."
    )


def default_tokenizer(family: str) -> str:
    """The --tokenizer-type that an entry file takes where none is given."""
    return "GPT2BPETokenizer" if family == "gpt" else _WORDPIECE[0]


def family_settings(
    family: str, values: Mapping[str, Sequence[str]], *, script: str
) -> dict[str, Setting]:
    """The fields that follow from the family.

    Args:
        family: What is trained.
        values: The script's flags, with dashes, and their values.
        script: The entry file.
    """
    if family == "gpt":
        return {}
    settings = {"model.family": Setting(value=family, origin=PurePath(script).name)}
    for flag in ("--vocab-file", "--tokenizer-model"):
        given = values.get(flag) or ()
        if len(given) == 1 and is_known(given[0]):
            settings["data.tokenizer"] = Setting(value=given[0], origin=flag)
    return settings


def marks_added(kind: str, vocabulary: Path, values: Mapping[str, Sequence[str]]) -> int:
    """Ids that the original's tokenizer has beyond its file: two marks, and T5's sentinels."""
    if kind not in _WORDPIECE:
        return 0
    words = set(vocabulary.read_text(encoding="utf-8", errors="replace").splitlines())
    extra = (values.get("--vocab-extra-ids") or ("0",))[0]
    return len({"[BOS]", "[EOS]"} - words) + (int(extra) if extra.isdecimal() else 0)
