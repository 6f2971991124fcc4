"""The command ``mds-train evaluate``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt.commands.key_options import add_key_options
from mds_train.errors import ExitCode, InputError, UsageError
from mds_train.generate.command import add_model_arguments, chosen_device, given_key, loaded

if TYPE_CHECKING:
    from mds_train.evaluate.classifier import Classifier, Encoder, Sample
    from mds_train.evaluate.tuning import Tuning
    from mds_train.generate.command import LoadedModel
    from mds_train.launch import Environment

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
examples:
  mds-train evaluate perplexity runs/first --data wiki.test.tokens --wikitext --stride 32
  mds-train evaluate perplexity hf-folder --data held-out.jsonl --begin --output result.json
  mds-train evaluate lambada runs/first --data lambada_test.jsonl --strict
  mds-train evaluate harness runs/first --tasks lambada_openai,arc_easy --shots 0
  mds-train evaluate bleu --hypotheses answers.jsonl --references newstest.de
  mds-train evaluate glue bert-folder --task MNLI --train-data train.tsv --valid-data dev.tsv
  mds-train evaluate race bert-folder --train-data RACE/train/high --valid-data RACE/dev/high
"""
_TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none")
_GLUE = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE")
_Action = Callable[[argparse.Namespace, "Environment"], Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the measures, each with its options."""
    measures = parser.add_subparsers(title="measures", metavar="MEASURE", required=True)
    for name, text, add, action in (
        ("perplexity", "Perplexity of texts, per token, word and byte.", _texts, _perplexity),
        ("lambada", "LAMBADA: the last word of each passage.", _passages, _lambada),
        ("harness", "Tasks of lm-evaluation-harness.", _tasks, _harness),
        ("bleu", "BLEU and chrF of translations, by sacrebleu.", _translations, _bleu),
        ("glue", "Fine-tune a BERT on a task of GLUE, and judge it.", _glue_arguments, _glue),
        ("race", "Fine-tune a BERT on RACE, and judge it.", _tuning_arguments, _race),
    ):
        measure = measures.add_parser(name, help=text, description=text, allow_abbrev=False)
        add(measure)
        measure.add_argument(
            "--output",
            "--results_path",
            type=Path,
            metavar="F.json",
            help="also write the result there",
        )
        measure.set_defaults(measure=action)


def run(options: argparse.Namespace, environment: Environment) -> int:
    """Measure, print, and write what was found.

    Raises:
        InputError: If a file or checkpoint is rejected.
    """
    if options.output is not None and not options.output.parent.is_dir():
        raise InputError(f"{options.output.parent}: there is no such folder to write into.")
    measure: _Action = options.measure
    found = measure(options, environment)
    if environment.rank == 0:
        text = json.dumps(found, indent=2, ensure_ascii=False)
        if options.output is not None:
            partial = options.output.with_name(f"{options.output.name}.partial")
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(options.output)
        if options.measure is not _harness:
            _show(found)
    return ExitCode.DONE


def _show(found: Mapping[str, Any]) -> None:
    shown_ones = {name: value for name, value in found.items() if not isinstance(value, list)}
    width = max(len(name) for name in shown_ones)
    for name, value in shown_ones.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        sys.stdout.write(f"{name:<{width}}  {shown}\n")


def _data_arguments(parser: argparse.ArgumentParser, *, data: str) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--data", "--valid-data", type=Path, required=True, metavar="F", help=data)
    add(
        "--seq-length",
        type=int,
        metavar="N",
        help="tokens that the model sees at once; all its positions when left out",
    )
    add("--batch-size", type=int, default=8, metavar="N", help="computed together (%(default)s)")


def _texts(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser, data='a text, or .jsonl with {"text": ...}, each by itself')
    add = parser.add_argument
    add(
        "--stride",
        "--overlapping-eval",
        type=int,
        metavar="N",
        help="score N tokens a window, so that each has context; the window when left out",
    )
    add(
        "--begin",
        action="store_true",
        help="begin with the end-of-text token, so that the first token counts (as lm-eval does)",
    )
    add(
        "--wikitext",
        action="store_true",
        help="undo WikiText's tokenization; words and bytes are counted before",
    )


def _passages(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser, data='.jsonl with {"text": ...}, or a text with a passage a line')
    parser.add_argument(
        "--strict",
        "--strict-lambada",
        action="store_true",
        help="the whole last word, not only the last token",
    )


def _tasks(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--tasks", "--task_list", required=True, metavar="A,B", help="names of tasks")
    add("--include", type=Path, metavar="DIR", help="a folder with YAML files of your own tasks")
    add("--shots", "--num_fewshot", type=int, metavar="N", help="examples before each question")
    add("--limit", type=int, metavar="N", help="only N questions of each task")
    add("--batch-size", type=int, default=8, metavar="N", help="computed together (%(default)s)")
    add("--chat", action="store_true", help="write the questions as conversations")
    add("--chat-template", metavar="T", help="a known format or a file, instead of its own")


def _glue_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", required=True, metavar="TASK", help=f"one of {', '.join(_GLUE)}")
    _tuning_arguments(parser)


def _tuning_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, help="a pretrained BERT, in any format that mds-ckpt opens")
    add("--tokenizer", type=Path, metavar="F", help="a tokenizer.json instead of its own")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    for name, text in (("train", "to learn from"), ("valid", "to judge by, after each epoch")):
        add(
            f"--{name}-data",
            type=Path,
            nargs="+",
            required=True,
            metavar="F",
            help=f"the published files {text}",
        )
    add("--epochs", type=int, default=3, metavar="N", help="(%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="(%(default)s)")
    add("--lr", type=float, default=2e-5, metavar="X", help="highest rate (%(default)g)")
    add("--warmup", type=float, default=0.1, metavar="X", help="share of steps (%(default)g)")
    add("--weight-decay", type=float, default=0.01, metavar="X", help="(%(default)g)")
    add("--dropout", type=float, default=0.1, metavar="X", help="(%(default)g)")
    add("--seq-length", type=int, metavar="N", help="tokens; all positions when left out")
    add("--seed", type=int, default=1234, help="(%(default)s)")
    add_key_options(parser, expect=False)


def _translations(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hypotheses",
        type=Path,
        required=True,
        metavar="F",
        help="the translations, one a line; or what `generate` wrote into a .jsonl file",
    )
    add(
        "--references",
        type=Path,
        required=True,
        nargs="+",
        metavar="F",
        help="right translations, one a line; several files for several references",
    )
    add("--tokenize", choices=_TOKENIZERS, default="13a", help="zh for Chinese (%(default)s)")
    add("--lowercase", action="store_true", help="compare without case")


def _perplexity(options: argparse.Namespace, environment: Environment) -> Mapping[str, Any]:
    from mds_train.evaluate.perplexity import measure_perplexity, read_texts
    from mds_train.evaluate.wikitext import detokenize

    data = _existing(options.data)
    with loaded(options, environment) as ready:
        texts = read_texts(data)
        length = _length(options, ready)
        stride = length if options.stride is None else options.stride
        if not 1 <= stride <= length:
            raise UsageError(f"--stride {stride} must lie between 1 and the window, {length}.")
        if options.begin and ready.end_token is None:
            raise InputError("--begin: the tokenizer has no end-of-text token.")
        found = measure_perplexity(
            ready.model,
            texts,
            encode=lambda text: ready.tokenizer.encode(text, add_special_tokens=False).ids,
            length=length,
            stride=stride,
            begin=ready.end_token if options.begin else None,
            clean=detokenize if options.wikitext else None,
            batch_size=options.batch_size,
        )
    return dataclasses.asdict(found) | {"seq_length": length, "stride": stride}


def _lambada(options: argparse.Namespace, environment: Environment) -> Mapping[str, Any]:
    from mds_train.evaluate.lambada import measure_lambada
    from mds_train.evaluate.perplexity import read_texts

    data = _existing(options.data)
    with loaded(options, environment) as ready:
        texts = read_texts(data)
        if data.suffix != ".jsonl":
            texts = [line for line in texts[0].split("\n") if line.strip()]
        found = measure_lambada(
            ready.model,
            texts,
            encode=lambda text: ready.tokenizer.encode(text, add_special_tokens=False).ids,
            strict=options.strict,
            length=_length(options, ready),
            batch_size=options.batch_size,
        )
    return dataclasses.asdict(found) | {"strict": options.strict}


def _harness(options: argparse.Namespace, environment: Environment) -> Mapping[str, Any]:
    from mds_train.evaluate.harness import HarnessModel, run_harness
    from mds_train.generate.chat import find_chat_template

    if environment.world_size > 1:
        raise UsageError("lm-eval asks one process; start `evaluate harness` without torchrun.")
    if options.include is not None and not options.include.is_dir():
        raise InputError(f"{options.include}: there is no such folder of tasks.")
    with loaded(options, environment) as ready:
        asked = options.chat or options.chat_template is not None
        model = HarnessModel(
            ready.model,
            ready.tokenizer,
            end_tokens=ready.end_tokens,
            batch_size=options.batch_size,
            template=find_chat_template(ready.checkpoint, named=options.chat_template)
            if asked
            else None,
            name=str(ready.checkpoint.path),
        )
        return run_harness(
            model,
            [name.strip() for name in options.tasks.split(",") if name.strip()],
            include=options.include,
            shots=options.shots,
            limit=options.limit,
            chat=asked,
            show=lambda table: sys.stdout.write(table + "\n"),
        )


def _bleu(options: argparse.Namespace, environment: Environment) -> Mapping[str, Any]:
    del environment
    from mds_train.evaluate.bleu import measure_bleu, read_lines

    found = measure_bleu(
        read_lines(_existing(options.hypotheses)),
        [read_lines(_existing(path)) for path in options.references],
        tokenize=options.tokenize,
        lowercase=options.lowercase,
    )
    return dataclasses.asdict(found)


def _glue(options: argparse.Namespace, environment: Environment) -> Mapping[str, Any]:
    from mds_train.evaluate.classifier import Sample
    from mds_train.evaluate.glue import TASKS, read_glue

    task = TASKS.get(options.task)
    if task is None:
        raise UsageError(f"--task {options.task}: take one of {', '.join(_GLUE)}.")

    def samples(paths: Sequence[Path], encoder: Encoder) -> list[Sample]:
        return [
            Sample((encoder.row(each.first, each.second),), each.label)
            for path in paths
            for each in read_glue(_existing(path), task)
        ]

    found = _tuned(
        options,
        environment,
        samples=samples,
        outputs=len(task.labels) or 1,
        metrics=task.metrics,
        cut="longest_first",
    )
    return {"task": options.task, **found}


def _race(options: argparse.Namespace, environment: Environment) -> Mapping[str, Any]:
    from mds_train.evaluate.classifier import Sample
    from mds_train.evaluate.race import read_race

    def samples(paths: Sequence[Path], encoder: Encoder) -> list[Sample]:
        return [
            Sample(tuple(encoder.row(each.article, text) for text in each.statements), each.right)
            for each in read_race(paths)
        ]

    found = _tuned(
        options,
        environment,
        samples=samples,
        outputs=1,
        metrics=("accuracy",),
        cut="only_first",
    )
    return {"task": "RACE", **found}


def _tuned(
    options: argparse.Namespace,
    environment: Environment,
    *,
    samples: Callable[[Sequence[Path], Encoder], list[Sample]],
    outputs: int,
    metrics: Sequence[str],
    cut: str,
) -> dict[str, Any]:
    from mds_train.evaluate.glue import judge
    from mds_train.evaluate.tuning import guesses, tune

    if environment.world_size > 1:
        raise UsageError("GLUE and RACE are tuned in one process; start without torchrun.")
    settings = _tuning(options)
    model, encoder = _classifier(options, outputs=outputs, cut=cut)
    training, validation = (
        samples(each, encoder) for each in (options.train_data, options.valid_data)
    )

    def judged() -> dict[str, float]:
        found = guesses(model, validation, batch_size=options.batch_size)
        return judge(metrics, found, [sample.label for sample in validation])

    history = tune(model, training, settings, judged=judged)
    return {
        "train_samples": len(training),
        "valid_samples": len(validation),
        **(judged() if not history else {name: history[-1][name] for name in metrics}),
        "epochs": history,
    }


def _tuning(options: argparse.Namespace) -> Tuning:
    from mds_train.evaluate.tuning import Tuning

    if not 0 <= options.dropout < 1:
        raise UsageError(f"--dropout {options.dropout} must lie between 0 and 1.")
    names = ("epochs", "batch_size", "lr", "warmup", "weight_decay", "seed")
    return Tuning(**{name: getattr(options, name) for name in names})


def _classifier(
    options: argparse.Namespace, *, outputs: int, cut: str
) -> tuple[Classifier, Encoder]:
    """The model to be tuned, and what makes rows of texts for it."""
    from mds_train.evaluate.classifier import Encoder, load_classifier
    from mds_train.generate.model import load_tokenizer
    from mds_train.model_source import open_model

    checkpoint = open_model(options.checkpoint, key=given_key(options))
    model = load_classifier(
        checkpoint,
        outputs=outputs,
        dropout=options.dropout,
        seed=options.seed,
        device=chosen_device(options.device),
    )
    positions = model.trunk.config.max_position_embeddings
    length = options.seq_length or positions
    if not 8 <= length <= positions:
        raise InputError(f"--seq-length {length}: it lies between 8 and the {positions} positions.")
    tokenizer = load_tokenizer(checkpoint, tokenizer=options.tokenizer)
    return model, Encoder(tokenizer, length=length, cut=cut)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; check the path.")
    return path


def _length(options: argparse.Namespace, ready: LoadedModel) -> int:
    positions = ready.model.config.max_position_embeddings
    length: int = positions if options.seq_length is None else options.seq_length
    learned = ready.model.config.position_embedding == "learned"
    if length < 1 or (learned and length > positions):
        raise InputError(f"--seq-length {length}: the model has {positions} positions.")
    if options.batch_size < 1:
        raise UsageError("--batch-size must be 1 or more.")
    return length
