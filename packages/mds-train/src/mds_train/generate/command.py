"""The command ``mds-train generate``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mds_ckpt.commands.key_options import add_key_options, key_of
from mds_train.errors import ExitCode, InputError, UsageError
from mds_train.generate.prompts import read_prompts

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from mds_ckpt import Checkpoint, KeySource
    from mds_core.models import GPT
    from mds_train.generate.decoding import Completion
    from mds_train.generate.sampling import Sampling
    from mds_train.launch import Environment

__all__ = [
    "EXAMPLES",
    "LoadedModel",
    "add_arguments",
    "add_model_arguments",
    "chosen_device",
    "given_key",
    "loaded",
    "run",
]

EXAMPLES = """\
examples:
  mds-train generate runs/first --prompt "The function returns"
  mds-train generate runs/first --prompt "def " --samples 3 --temperature 0.8 --top-p 0.9
  mds-train generate hf-folder --prompts questions.jsonl --output answers.jsonl --greedy
  mds-train generate hf-folder --prompt "Once" --beams 4 --stop "\\n" --json
  torchrun --nproc-per-node 2 -m mds_train generate runs/first --prompt "The "    (tensor parallel)

An empty prompt begins with the end-of-text token. A seed draws what transformers draws for the
prompt alone: sample j of prompt i has the seed SEED + i * samples + j.
"""
_DTYPES = ("stored", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; the original's names work too."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="repeat it for a batch")
    add(
        "--prompts",
        "--sample-input-file",
        type=Path,
        metavar="F",
        help='a text with a prompt a line, or .jsonl with {"prompt": ...}',
    )
    add(
        "--output",
        "--sample-output-file",
        "--genfile",
        type=Path,
        metavar="F",
        help="write the answers there; .jsonl means --json",
    )
    add("--json", action="store_true", help="one JSON object an answer")
    add(
        "--max-new-tokens",
        "--out-seq-length",
        type=int,
        default=64,
        metavar="N",
        help="(%(default)s)",
    )
    add("--samples", "--num-samples", type=int, default=1, metavar="N", help="answers a prompt (1)")
    add("--batch-size", type=int, default=8, metavar="N", help="sequences at a time (%(default)s)")
    add("--seed", type=int, default=1234, help="(%(default)s)")
    add(
        "--stop", action="append", default=[], metavar="TEXT", help="end before it; can be repeated"
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: each token's log-probability and the N likeliest",
    )
    _add_choice(parser.add_argument_group("how tokens are chosen"))


def _add_choice(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (%(default)s)")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--top-k", "--top_k", type=int, default=0, metavar="K", help="of the K likeliest (0: all)")
    add(
        "--top-p",
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="of those that together have probability P (1: all; the original's 0 too)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="of those at least P times as likely as the likeliest (0: all)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1 makes what was said less likely (%(default)s)",
    )
    add("--beams", type=int, default=1, metavar="K", help="search with K beams; nothing is drawn")
    add(
        "--length-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="of a beam search: above 0 favours long answers (%(default)s)",
    )
    add("--early-stopping", action="store_true", help="stop at K finished beams")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which model is meant and where it computes."""
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint, a folder of them, or the folder of a run")
    text = "add a LoRA adapter (a folder in the peft library's format) to the weights"
    add("--adapter", type=Path, metavar="DIR", help=text)
    add("--tokenizer", type=Path, metavar="F", help="a tokenizer.json instead of its own")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"])
    add("--dtype", default="stored", choices=_DTYPES, help="compute in it (%(default)s)")
    add_key_options(parser, expect=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model that is ready, with what belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    checkpoint: Checkpoint
    """What was opened."""
    is_first: bool
    """Whether this rank speaks for all."""

    @property
    def end_token(self) -> int | None:
        """The token between documents."""
        return min(self.end_tokens, default=None)


@contextlib.contextmanager
def loaded(options: argparse.Namespace, environment: Environment) -> Iterator[LoadedModel]:
    """Load what `add_model_arguments` names; under torchrun the ranks share it (tensor parallel).

    Raises:
        InputError: If there is no such checkpoint or tokenizer, or the ranks do not divide it.
    """
    from mds_core import Layout, ProcessGroups
    from mds_train.generate.model import end_tokens, load_model, load_tokenizer
    from mds_train.launch import distributed
    from mds_train.model_source import open_model

    checkpoint = open_model(options.checkpoint, adapter=options.adapter, key=given_key(options))
    tokenizer = load_tokenizer(checkpoint, tokenizer=options.tokenizer)
    with contextlib.ExitStack() as stack:
        groups, device = None, chosen_device(options.device)
        if environment.world_size > 1:
            started = distributed(environment, device=options.device, timeout_seconds=600)
            device = stack.enter_context(started)
            groups = ProcessGroups.build(Layout(tp_size=environment.world_size))
        model = load_model(checkpoint, device=device, dtype=_dtype(options.dtype), groups=groups)
        yield LoadedModel(
            model=model,
            tokenizer=tokenizer,
            end_tokens=end_tokens(checkpoint, tokenizer),
            checkpoint=checkpoint,
            is_first=environment.rank == 0,
        )


def given_key(options: argparse.Namespace) -> KeySource | None:
    """What opens an encrypted checkpoint, if it was named.

    Raises:
        MachineError: If what decrypts is not installed.
    """
    key = key_of(options)
    if key is not None:
        from mds_train.saving.sealing import require_library

        require_library()
    return key


def chosen_device(name: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here.

    Raises:
        InputError: If there is none.
    """
    import torch

    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise InputError("--device cuda: torch sees no CUDA device; take auto or cpu.")
    return torch.device("cuda" if present and name != "cpu" else "cpu")


def _dtype(name: str) -> torch.dtype | None:
    import torch

    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return known.get(name)


def run(options: argparse.Namespace, environment: Environment) -> int:
    """Answer the prompts.

    Raises:
        UsageError: If there is no prompt, or two options exclude each other.
        InputError: If a file or checkpoint is rejected.
    """
    _check(options)
    with loaded(options, environment) as ready:
        texts, again = _prompts(options), _prompts(options)
        prompts = (_encode(text, ready) for text in texts)
        answers = _answers(options, ready, prompts)
        if not ready.is_first:
            for _ in answers:
                pass
            return ExitCode.DONE
        with _destination(options.output) as output:
            for prompt, completions in zip(again, answers, strict=True):
                for completion in completions:
                    output.write(_line(options, prompt, completion, ready.tokenizer) + "\n")
                output.flush()
    return ExitCode.DONE


def _check(options: argparse.Namespace) -> None:
    if options.prompt is None and options.prompts is None:
        raise UsageError(
            'There is nothing to continue: give --prompt TEXT (perhaps --prompt "") or --prompts '
            "FILE. See --help."
        )
    if options.logprobs is not None and not _as_json(options):
        raise UsageError("--logprobs shows in JSON only; add --json.")
    if min(options.samples, options.batch_size, options.beams) < 1:
        raise UsageError("--samples, --batch-size and --beams must be 1 or more.")
    if options.max_new_tokens < 0 or (options.logprobs or 0) < 0:
        raise UsageError("--max-new-tokens and --logprobs must not be negative.")
    if options.beams == 1:
        return
    if options.samples > options.beams:
        raise UsageError(f"{options.beams} beams give at most {options.beams} samples.")
    if options.stop or options.logprobs is not None:
        raise UsageError("A beam search knows no --stop and no --logprobs; leave out --beams.")


def _prompts(options: argparse.Namespace) -> Iterator[str]:
    yield from options.prompt or ()
    if options.prompts is not None:
        yield from read_prompts(options.prompts)


def _encode(text: str, ready: LoadedModel) -> list[int]:
    tokens = list(ready.tokenizer.encode(text).ids)
    if tokens:
        return tokens
    if ready.end_token is None:
        raise InputError("A prompt is empty and the tokenizer has no end-of-text token to begin.")
    return [ready.end_token]


def _answers(
    options: argparse.Namespace, ready: LoadedModel, prompts: Iterable[Sequence[int]]
) -> Iterator[list[Completion]]:
    from mds_train.generate.beams import BeamSearch
    from mds_train.generate.decoding import complete, search_beams
    from mds_train.generate.request import Request

    if options.beams > 1:
        search = BeamSearch(
            beams=options.beams,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            repetition_penalty=options.repetition_penalty,
        )
        return search_beams(
            ready.model,
            ready.tokenizer,
            prompts,
            search=search,
            max_new_tokens=options.max_new_tokens,
            end_tokens=ready.end_tokens,
            samples=options.samples,
        )
    request = Request(
        prompt=(),
        max_new_tokens=options.max_new_tokens,
        sampling=_sampling(options),
        seed=options.seed,
        end_tokens=ready.end_tokens,
        logprobs=options.logprobs,
    )
    return complete(
        ready.model,
        ready.tokenizer,
        prompts,
        request=request,
        samples=options.samples,
        stop=options.stop,
        slots=options.batch_size,
        max_length=ready.model.config.max_position_embeddings,
    )


def _sampling(options: argparse.Namespace) -> Sampling:
    from mds_train.generate.sampling import Sampling

    return Sampling(
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p or 1.0,  # the original's 0 keeps all tokens
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )


@contextlib.contextmanager
def _destination(path: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears when it is whole."""
    if path is None:
        yield sys.stdout
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _as_json(options: argparse.Namespace) -> bool:
    return options.json or (options.output is not None and options.output.suffix == ".jsonl")


def _line(
    options: argparse.Namespace, prompt: str, completion: Completion, tokenizer: Tokenizer
) -> str:
    if not _as_json(options):
        return prompt + completion.text
    members: dict[str, object] = {
        "prompt": prompt,
        "text": completion.text,
        "tokens": [token.id for token in completion.tokens],
        "finish_reason": completion.finish_reason,
    }
    if completion.score is not None:
        members["score"] = completion.score
    if options.logprobs is not None:
        members["logprobs"] = [token.logprob for token in completion.tokens]
        members["top_logprobs"] = [
            [[tokenizer.id_to_token(each), value] for each, value in token.top]
            for token in completion.tokens
        ]
    return json.dumps(members, ensure_ascii=False)
