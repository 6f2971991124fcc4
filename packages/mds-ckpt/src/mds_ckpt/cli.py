"""The command line. Parses, calls one function of the package, prints, and picks the exit code.

Exit codes: 0 done, 1 a check found a difference, 2 wrong usage, 3 input rejected, 4 environment.
Commands import what they need when they run, so that ``--help`` takes no time.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mds_ckpt.commands.backup import add_backup_commands, verify_backups
from mds_ckpt.commands.key_options import add_key_options, key_of
from mds_ckpt.commands.old_names import add_old_commands, new_spelling
from mds_ckpt.commands.parser import Parser
from mds_ckpt.commands.protection import add_protection_commands
from mds_ckpt.commands.report import say, say_report
from mds_ckpt.commands.signature import (
    add_signature_options,
    add_signing_command,
    signature_differs,
)
from mds_ckpt.errors import CheckpointError, UnknownFormatError, UsageError
from mds_ckpt.escape import printable

_DTYPES = {
    "fp32": "F32",
    "float32": "F32",
    "bf16": "BF16",
    "bfloat16": "BF16",
    "fp16": "F16",
    "float16": "F16",
}
_BUGS: tuple[type[Exception], ...] = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(NameError, RuntimeError, TypeError, ValueError),
)
"""What a fault of our own raises."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser().parse_args([*map(new_spelling, words[:1]), *words[1:]])
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except CheckpointError as error:
        return _fail(arguments, error, error.exit_code, str(error))
    except ImportError as error:
        return _fail(arguments, error, 4, str(error))
    except FileNotFoundError as error:
        return _fail(arguments, error, 3, f"{error.filename}: there is no such file or folder")
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        what = f"{error.filename}: {error.strerror or error}; name what the command asks for"
        return _fail(arguments, error, 3, what)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError) as error:
        # A chain of links without an end is something that one was given, not a disk's fault.
        code = 3 if getattr(error, "errno", None) == errno.ELOOP else 4
        return _fail(arguments, error, code, _environment(error))
    except KeyboardInterrupt as error:
        return _fail(arguments, error, 4, "interrupted; nothing half-written was left behind")
    except _BUGS as error:
        what = f"{type(error).__name__}: {error}"
        return _fail(arguments, error, 4, f"a fault of mds-ckpt itself, please report it: {what}")


def _fail(arguments: argparse.Namespace, error: BaseException, code: int, message: str) -> int:
    if arguments.debug:
        raise error
    sys.stderr.write(f"mds-ckpt: {printable(message, longest=4000)}\n")
    return code


def _environment(error: BaseException) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        full = error.errno in {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
        denied = error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}
        remedy = "free some space" if full else "look at that place"
        remedy = "change its permissions or name another place" if denied else remedy
        return f"{where}{error.strerror or error}; {remedy}, then run it again"
    return "memory ran out; convert with --jobs 1, or on a larger machine"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and flags."""
    parser = Parser(
        prog="mds-ckpt",
        description="Open, check and convert checkpoints of large models. Nothing in them is "
        "executed, and torch is not needed.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show a traceback on errors")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog=parser.prog)
    for add in (_add_inspect, _add_verify, _add_convert, _add_diff, _add_scan):
        add(commands, common)
    add_protection_commands(lambda *about: _add_command(commands, common, *about))
    add_signing_command(lambda *about: _add_command(commands, common, *about))
    add_backup_commands(lambda *about: _add_command(commands, common, *about))
    add_old_commands(lambda *about: _add_command(commands, common, *about))
    return parser


class _Version(argparse.Action):
    """Asks for the version only when it is wanted: that takes longer than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"mds-ckpt {version('mds-ckpt')}\n")
        parser.exit()


def _add_command(
    commands: argparse._SubParsersAction[Parser],
    common: Parser,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, parents=[common])
    parser.set_defaults(command=run)
    return parser


def _add_from(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="source_format", metavar="FORMAT", help="format, if it is not detected"
    )


def _add_inspect(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    text = "show what a checkpoint is; reads headers only"
    parser = _add_command(commands, common, "inspect", text, _inspect)
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print JSON of a stable schema")
    parser.add_argument("--tensor", metavar="GLOB", help="only tensors of matching names")
    parser.add_argument("--stats", action="store_true", help="read the tensors: norm, range, NaN")
    text = "list the datasets that it has seen, with sources and licences; needs no dataset"
    parser.add_argument("--sources", action="store_true", help=text)
    _add_from(parser)
    add_key_options(parser)


def _inspect(arguments: argparse.Namespace) -> int:
    from mds_ckpt.commands.inspect import show, show_sources

    if arguments.sources:
        return show_sources(
            arguments.path,
            source_format=arguments.source_format,
            as_json=arguments.json,
            key=key_of(arguments),
            expect=arguments.expect,
        )
    return show(
        arguments.path,
        source_format=arguments.source_format,
        pattern=arguments.tensor,
        stats=arguments.stats,
        as_json=arguments.json,
        key=key_of(arguments),
        expect=arguments.expect,
    )


def _add_verify(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    text = "read every byte and compare digests; exit code 1 names what is wrong"
    parser = _add_command(commands, common, "verify", text, _verify)
    parser.add_argument("path", metavar="PATH", nargs="?")
    text = "check all backups at this folder or URL, in place of PATH"
    parser.add_argument("--to", metavar="PLACE", help=text)
    _add_from(parser)
    add_key_options(parser)
    add_signature_options(parser)


def _verify(arguments: argparse.Namespace) -> int:
    if (arguments.path is None) == (arguments.to is None):
        raise UsageError("verify takes a PATH, or backups with --to PLACE")
    if arguments.to is not None:
        return verify_backups(arguments)
    if signature_differs(arguments):
        return 1
    try:
        return _verify_contents(arguments)
    except UnknownFormatError:
        if arguments.public_key is None:
            raise
        say("it is no checkpoint, so nothing besides the signature was checked")
        return 0


def _verify_contents(arguments: argparse.Namespace) -> int:
    from mds_ckpt.verification import verify

    key = key_of(arguments)
    if key is None and arguments.expect is None and arguments.source_format in (None, "mds"):
        from mds_ckpt.files.sealed_folder import is_sealed

        if is_sealed(Path(arguments.path)):
            return _verify_sealed(Path(arguments.path))
    verdict = verify(
        arguments.path,
        format=arguments.source_format,
        key=key,
        expect=arguments.expect,
    )
    for problem in verdict.problems:
        say(str(problem))
    checked = f"{verdict.num_tensors} tensors, {verdict.nbytes:,} bytes"
    where = printable(str(verdict.checkpoint.path))
    if verdict.problems:
        say(f"{where}: {len(verdict.problems)} problems in {checked}")
        return 1
    say(f"{where}: {checked}, all as written")
    return 0


def _verify_sealed(path: Path) -> int:
    """Without a key: whether the sealed bytes are those that were written."""
    from mds_ckpt.formats.mds import check_envelope

    problems = list(check_envelope(path, data=True))
    for problem in problems:
        say(str(problem))
    where = printable(str(path))
    if problems:
        say(f"{where}: {len(problems)} problems in the sealed bytes")
        return 1
    say(f"{where}: the sealed bytes are as written; give the key to check what is in them")
    return 0


def _add_convert(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    text = "write a checkpoint in another format; the source is never touched"
    parser = _add_command(commands, common, "convert", text, _convert)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", help="the folder that is to appear")
    text = "mds, hf, deepspeed, universal, megatron or mcore"
    parser.add_argument("--to", required=True, metavar="FORMAT", help=text)
    _add_from(parser)
    parser.add_argument("--dtype", type=_dtype, metavar="D", help="fp32, bf16 or fp16")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="the true vocabulary")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    _add_ranks(parser)
    layouts = ("auto", "grouped", "thirds", "v0", "v1")
    text = "row order of fused query, key and value weights in SRC"
    parser.add_argument("--qkv-layout", choices=layouts, default="auto", help=text)
    text = "copies of one parameter must be equal, or the first or their mean is taken"
    copies = ("assert", "first", "average")
    parser.add_argument("--replicated", choices=copies, default="assert", help=text)
    text = "folder of a LoRA adapter (peft's format) to add to the weights"
    parser.add_argument("--adapter", metavar="DIR", help=text)
    parser.add_argument("--weights-only", action="store_true", help="leave optimizer state behind")
    text = "weights to train from anew: no optimizer state, all counts 0, Megatron's folder release"
    parser.add_argument("--release", action="store_true", help=text)
    text = "set back to the beginning: counters, schedule, rng, or several of them with commas"
    parser.add_argument("--reset", type=_words, default=(), metavar="WHAT", help=text)
    parser.add_argument("--allow-loss", action="store_true", help="let --dtype lose values")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST")
    parser.add_argument("--dry-run", action="store_true", help="check all, write nothing")
    text = "files written at a time; as many as there are processors, at most 4, if left out"
    parser.add_argument("--jobs", type=int, metavar="N", help=text)
    text = "start a new safetensors file before one has more bytes than this"
    parser.add_argument("--max-shard-bytes", type=int, metavar="N", help=text)
    add_key_options(parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    text = "data-parallel ranks that share out DeepSpeed's optimizer state"
    parser.add_argument("--dp", type=int, default=1, metavar="N", help=text)
    text = "data-parallel ranks that share out experts"
    parser.add_argument("--ep", type=int, default=1, metavar="N", help=text)
    text = "model chunks of each of Megatron's pipeline stages (virtual pipeline)"
    parser.add_argument("--vp", type=int, default=1, metavar="N", help=text)
    text = "layers of each pipeline stage, such as 3,4,4,3; divided evenly if left out"
    parser.add_argument("--layers-per-stage", type=_numbers, metavar="N,N", help=text)
    text = "how DeepSpeed shares out optimizer state; 1 if left out"
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), help=text)
    text = (
        "DeepSpeed's files as a pipeline's or as one module's; a pipeline's where there can be one"
    )
    parser.add_argument("--pipeline", action=argparse.BooleanOptionalAction, help=text)
    text = "pad the vocabulary to a multiple of N times --tp; the model's own number if left out"
    parser.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", help=text)
    text = "Megatron's optimizer state in distrib_optim.pt, for --dp ranks"
    parser.add_argument("--use-distributed-optimizer", action="store_true", help=text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 3,4,4,3")
    return tuple(map(int, words))


def _dtype(word: str) -> str:
    if word.lower() not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[word.lower()]


def _convert(arguments: argparse.Namespace) -> int:
    from mds_ckpt.conversion import convert

    report = convert(
        arguments.source,
        arguments.target,
        to=arguments.to,
        source_format=arguments.source_format,
        key=key_of(arguments),
        expect=arguments.expect,
        dtype=arguments.dtype,
        vocab_size=arguments.vocab_size,
        weights_only=arguments.weights_only,
        allow_loss=arguments.allow_loss,
        overwrite=arguments.overwrite,
        dry_run=arguments.dry_run,
        jobs=arguments.jobs or min(4, os.cpu_count() or 1),
        max_shard_bytes=arguments.max_shard_bytes,
        tp=arguments.tp,
        pp=arguments.pp,
        dp=arguments.dp,
        ep=arguments.ep,
        vp=arguments.vp,
        zero_stage=arguments.zero_stage,
        pipeline=arguments.pipeline,
        layers_per_stage=arguments.layers_per_stage,
        make_vocab_size_divisible_by=arguments.make_vocab_size_divisible_by,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
        release=arguments.release,
        reset=arguments.reset,
        qkv_layout=None if arguments.qkv_layout == "auto" else arguments.qkv_layout,
        replicated=arguments.replicated,
        adapter=arguments.adapter,
    )
    say_report(report)
    return 0


def _add_diff(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    text = "compare two checkpoints of any formats by canonical name; exit code 1 if they differ"
    parser = _add_command(commands, common, "diff", text, _diff)
    parser.add_argument("first", metavar="A")
    parser.add_argument("second", metavar="B")
    parser.add_argument("--atol", type=_tolerance, default=0.0, metavar="X", help="absolute")
    parser.add_argument("--rtol", type=_tolerance, default=0.0, metavar="X", help="relative to B")
    add_key_options(parser, expect=False)


def _tolerance(word: str) -> float:
    value = float(word)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not a tolerance; give a number from 0 on")
    return value


def _diff(arguments: argparse.Namespace) -> int:
    from mds_ckpt.diff import compare
    from mds_ckpt.formats import open_checkpoint

    key = key_of(arguments)
    sides = [open_checkpoint(path, key=key) for path in (arguments.first, arguments.second)]
    found = compare(*sides, atol=arguments.atol, rtol=arguments.rtol)
    for note in found.notes:
        say(f"note: {note}")
    for difference in found.differences:
        say(str(difference))
    say(f"{found.num_compared} tensors compared, {len(found.differences)} differences")
    return 1 if found.differences else 0


def _add_scan(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    text = "list every global that pickles would import, with a verdict; runs nothing"
    parser = _add_command(commands, common, "scan", text, _scan)
    parser.add_argument("path", metavar="PATH")


def _scan(arguments: argparse.Namespace) -> int:
    from mds_ckpt.scan import scan_path

    findings = scan_path(arguments.path)
    for finding in findings:
        member = f" ({printable(finding.member)})" if finding.member else ""
        name = f" {printable(finding.name)}" if finding.name else ""
        place = f"{printable(finding.file)}{member}"
        say(f"{finding.verdict:9} {place}:{name} {printable(finding.reason)}".rstrip())
    bad = [finding for finding in findings if finding.verdict in {"dangerous", "broken"}]
    say(f"{len(findings)} findings, {len(bad)} of them dangerous or broken; nothing was run")
    return 1 if bad else 0
