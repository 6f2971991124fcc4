"""The command line: doctor, verify, build and bench. The only place that writes output."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version

import torch

from mds_kernels.bench import Figure, Workload, bench
from mds_kernels.build.compiler import Build, BuildError, build
from mds_kernels.build.recipe import DEFAULT_ARCHITECTURES, DEVICES, cache_folder, recipe_for
from mds_kernels.build.resources import KernelUsage, beyond_limits
from mds_kernels.check import Check, Measurement, measure
from mds_kernels.check_cases import CASES
from mds_kernels.dispatch import usable_backends, why
from mds_kernels.doctor import Diagnosis, diagnose
from mds_kernels.preference import BackendError
from mds_kernels.registry import BACKENDS, OPS

__all__ = ["build_parser", "main"]

_FOUND_A_DIFFERENCE = 1
_ENVIRONMENT = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except BrokenPipeError:  # Whoever read our output has gone; that is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (BackendError, BuildError, OSError) as error:
        if arguments.debug:
            raise
        sys.stderr.write(f"mds-kernels: {error}\n")
        return _ENVIRONMENT
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="mds-kernels", description="Which kernels run on this machine, and are they right?"
    )
    parser.add_argument(
        "--version", action="version", version=f"mds-kernels {version('mds-kernels')}"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_doctor(commands)
    _add_verify(commands)
    _add_build(commands)
    _add_bench(commands)
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser("doctor", help="versions, the choice for every op and why, locks")
    doctor.add_argument(
        "--clear-stale-locks", action="store_true", help="remove build locks that nobody holds"
    )
    _add_common(doctor)
    doctor.set_defaults(run=_doctor)


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verify = commands.add_parser("verify", help="compare every op with float64 on this machine")
    verify.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    verify.add_argument("--op", choices=list(OPS), help="only this op")
    verify.add_argument(
        "--backend", choices=list(BACKENDS), help="only this backend (default: all usable)"
    )
    _add_common(verify)
    verify.set_defaults(run=_verify)


def _add_build(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser("build", help="compile the C++ kernels for this machine")
    command.add_argument("--device", choices=DEVICES, default="cuda", help="(default: cuda)")
    command.add_argument(
        "--arch",
        type=_architectures,
        default=DEFAULT_ARCHITECTURES,
        metavar="80,90",
        help="GPU architectures (default: 80,90,100; the newest also as PTX for later ones)",
    )
    command.add_argument("--force", action="store_true", help="compile even if it is there")
    _add_common(command)
    command.set_defaults(run=_build)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    small = Workload()
    command = commands.add_parser("bench", help="linear_cross_entropy beside its alternatives")
    command.add_argument("--tokens", type=_positive, default=small.tokens)
    command.add_argument("--hidden-size", type=_positive, default=small.hidden_size)
    command.add_argument("--vocab-size", type=_positive, default=small.vocab_size)
    command.add_argument("--dtype", choices=["float32", "bfloat16"], default=small.dtype)
    command.add_argument("--device", choices=["cpu", "cuda"], default=small.device)
    command.add_argument("--threads", type=_positive, default=small.threads)
    command.add_argument("--repeats", type=_positive, default=5)
    _add_common(command)
    command.set_defaults(run=_bench)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _architectures(text: str) -> tuple[str, ...]:
    numbers = tuple(sorted(set(text.split(",")), key=lambda one: one.zfill(4)))
    wrong = [one for one in numbers if not one.isdecimal() or int(one) < 80]
    if wrong:
        raise argparse.ArgumentTypeError(
            f"{wrong[0]!r} is no architecture from 80 (A100) on; write 80,90,100"
        )
    return numbers


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _doctor(arguments: argparse.Namespace) -> int:
    diagnosis = diagnose(os.environ, clear_locks=arguments.clear_stale_locks)
    _write(
        json.dumps(diagnosis.to_json(), indent=2) if arguments.json else _diagnosis_text(diagnosis)
    )
    return _FOUND_A_DIFFERENCE if diagnosis.problems else 0


def _verify(arguments: argparse.Namespace) -> int:
    _require_device(arguments.device)
    start = time.perf_counter()
    kind = arguments.device.partition(":")[0]
    rows = [
        _measured(check, dtype=dtype, device=arguments.device, backend=backend)
        for check in CASES
        if arguments.op in (None, check.op)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for backend in usable_backends(check.op, device=kind, dtype=dtype)
        if arguments.backend in (None, backend)
    ]
    if not rows:
        _refuse_nothing(arguments, kind)
    failed = [row for row in rows if not row.passed]
    if arguments.json:
        _write(json.dumps([{**asdict(row), "passed": row.passed} for row in rows], indent=2))
    else:
        seconds = time.perf_counter() - start
        _write(_verify_text(rows))
        _write(f"{len(rows) - len(failed)} of {len(rows)} checks passed in {seconds:.0f} s")
    return _FOUND_A_DIFFERENCE if failed else 0


def _measured(check: Check, *, dtype: torch.dtype, device: str, backend: str) -> Measurement:
    """A row of the table, also for an op that raises: to find that is what the command is for."""
    try:
        return measure(check, dtype=dtype, device=device, backend=backend)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table shows it and goes on
        return Measurement(
            op=check.op,
            case=check.case,
            dtype=str(dtype).removeprefix("torch."),
            backend=backend,
            tensor=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}",
            error=math.inf,
            allowed=0.0,
        )


def _build(arguments: argparse.Namespace) -> int:
    recipe = recipe_for(arguments.device, architectures=arguments.arch)
    folder = cache_folder(os.environ)
    built = build(recipe, folder=folder, environment=os.environ, force=arguments.force)
    beyond = beyond_limits(built.usage)
    if arguments.json:
        _write(
            json.dumps({**asdict(built), "beyond_limits": [asdict(x) for x in beyond]}, indent=2)
        )
    else:
        _write(_build_text(built))
        for row in beyond:
            _write(f"PROBLEM: {row.kernel} on {row.architecture} spills or uses too many registers")
    return _FOUND_A_DIFFERENCE if beyond else 0


def _bench(arguments: argparse.Namespace) -> int:
    _require_device(arguments.device)
    workload = Workload(
        tokens=arguments.tokens,
        hidden_size=arguments.hidden_size,
        vocab_size=arguments.vocab_size,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
    )
    figures = bench(workload, repeats=arguments.repeats)
    if arguments.json:
        plain = {"workload": asdict(workload), "figures": [asdict(figure) for figure in figures]}
        _write(json.dumps(plain, indent=2))
    else:
        _write(_bench_text(figures))
    return 0


def _refuse_nothing(arguments: argparse.Namespace, device: str) -> None:
    """Raise with the reason why no check could run; a table of nothing would look like success."""
    for op in [arguments.op] if arguments.op else OPS:
        if any(one.backend == arguments.backend for one in OPS[op]):
            why(op, device=device, backend=arguments.backend)  # raises
    raise BackendError(f"{arguments.op} has no backend {arguments.backend}; see doctor.")


def _require_device(device: str) -> None:
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            f"--device {device}: this torch ({torch.__version__}) sees no CUDA device; leave the "
            f"option out to run on the CPU."
        )


def _diagnosis_text(diagnosis: Diagnosis) -> str:
    lines = _table([[name, value] for name, value in diagnosis.versions.items()])
    lines += ["", f"apex: {diagnosis.apex.state}: {diagnosis.apex.reason}", ""]
    lines += [str(choice) for choice in diagnosis.choices]
    for lock in diagnosis.locks:
        who = f"held by process {', '.join(map(str, lock.holders))}" if lock.holders else "unheld"
        lines.append(f"build lock {lock.path}: {who}, {lock.age_seconds:.0f} s old")
    lines += [f"removed the stale build lock {lock.path}" for lock in diagnosis.cleared]
    lines += ["", *(f"PROBLEM: {problem}" for problem in diagnosis.problems)]
    return "\n".join(lines).rstrip()


def _build_text(built: Build) -> str:
    lines = [
        built.library,
        f"for {', '.join(built.architectures)} by {built.compiler}, in {built.seconds:.0f} s",
    ]
    names = list(dict.fromkeys(row.kernel for row in built.usage))
    architectures = list(dict.fromkeys(row.architecture for row in built.usage))
    told = {(row.kernel, row.architecture): _registers(row) for row in built.usage}
    table = [[name, *(told.get((name, one), "-") for one in architectures)] for name in names]
    if table:
        lines += ["", *_table([["registers a thread", *architectures], *table])]
    return "\n".join(lines)


def _registers(row: KernelUsage) -> str:
    return f"{row.registers} + {row.stack} bytes" if row.stack else str(row.registers)


def _verify_text(rows: Sequence[Measurement]) -> str:
    header = ["op", "case", "dtype", "backend", "worst", "error", "allowed", ""]
    body = [
        [
            row.op,
            row.case,
            row.dtype,
            row.backend,
            row.tensor,
            f"{row.error:.1e}",
            f"{row.allowed:.1e}",
            "ok" if row.passed else "WRONG",
        ]
        for row in rows
    ]
    return "\n".join(_table([header, *body]))


def _bench_text(figures: Sequence[Figure]) -> str:
    ours = figures[0]
    header = ["contestant", "ms", "time / ours", "peak MiB", "peak / ours", "error of the loss"]
    body = [
        [
            figure.contestant,
            f"{figure.seconds * 1000:.1f}",
            f"{figure.seconds / ours.seconds:.2f}",
            _number(figure.peak_mebibytes),
            _number(_ratio(figure.peak_mebibytes, ours.peak_mebibytes)),
            f"{figure.loss_error:.1e}",
        ]
        for figure in figures
    ]
    return "\n".join(_table([header, *body]))


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
