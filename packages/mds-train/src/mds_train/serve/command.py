"""The command ``mds-train serve``."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_train.errors import ExitCode, InputError, MachineError, UsageError
from mds_train.generate.command import LoadedModel, add_model_arguments, loaded

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.launch import Environment
    from mds_train.serve.guard import Protection

__all__ = ["EXAMPLES", "add_arguments", "run", "service_of"]

EXAMPLES = """\
examples:
  mds-train serve runs/first                              then open http://127.0.0.1:8000
  mds-train serve hf-folder --port 9000 --slots 16 --chat-template chatml
  mds-train serve hf-folder --host 0.0.0.0 --token-file token.txt

  curl 127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "The "}'

It speaks OpenAI's /v1/completions, /v1/chat/completions and /v1/models, Megatron's PUT /api, and
has /health and /metrics. Prompts and answers are not logged. The token comes from --token-file or
from the variable MDS_SERVE_TOKEN; without one the server answers this machine only.
"""
logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    add("--name", metavar="N", help="what the model is called; the folder's name when left out")
    add("--token-file", type=Path, metavar="F", help="holds the token that clients must send")
    add("--chat-template", metavar="T", help="a known format or a file, instead of its own")
    limits = parser.add_argument_group("limits")
    add = limits.add_argument
    add("--slots", type=int, default=8, metavar="N", help="sequences at a time (%(default)s)")
    add("--max-waiting", type=int, default=256, metavar="N", help="that wait (%(default)s)")
    add("--max-length", type=int, metavar="N", help="tokens of a sequence; the model's positions")
    add("--max-new-tokens", type=int, metavar="N", help="of an answer; as many as fit")
    add("--max-body", type=int, default=1 << 20, metavar="BYTES", help="(%(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of a request (%(default)g)")
    add(
        "--grace",
        type=float,
        default=20.0,
        metavar="S",
        help="that running requests have after SIGTERM (%(default)g)",
    )


def run(options: argparse.Namespace, environment: Environment, console: Console) -> int:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UsageError: If an option is wrong.
        InputError: If the checkpoint, the token or the chat template is rejected.
        MachineError: If the address cannot be listened at.
    """
    if environment.world_size > 1:
        raise UsageError("serve runs in one process; start it without torchrun.")
    _check(options)
    protection = _protection(options, token=_token(options, environment))
    try:
        import uvicorn

        from mds_train.serve.application import build_application
    except ImportError as error:
        raise ImportError(
            "Serving needs more packages: pip install 'mds-train[serve]'", name=error.name
        ) from error
    with _listening(options) as listener, loaded(options, environment) as ready:
        service = service_of(ready, options, protection=protection)
        server = uvicorn.Server(
            uvicorn.Config(
                build_application(service),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(options.grace) + 1,
                limit_concurrency=options.max_waiting + options.slots + 64,
            )
        )
        greeting = _greeting(service.name, listener, token=protection.token)
        console.print(greeting, markup=False, soft_wrap=True)
        with _quiet_end():
            server.run(sockets=[listener])
    console.print("The server has ended.")
    return ExitCode.DONE


def service_of(ready: LoadedModel, options: argparse.Namespace, *, protection: Protection) -> Any:
    """What the application needs, as the options say.

    Raises:
        InputError: If the chat template is rejected.
    """
    from mds_train.generate.batch import ContinuousBatch
    from mds_train.generate.chat import find_chat_template
    from mds_train.serve.application import Service
    from mds_train.serve.protocol import Limits, Reader
    from mds_train.serve.worker import Worker

    config = ready.model.config
    max_length = options.max_length or config.max_position_embeddings
    if config.position_embedding == "learned" and max_length > config.max_position_embeddings:
        raise InputError(
            f"--max-length {max_length}: the model has {config.max_position_embeddings} positions."
        )
    batch = ContinuousBatch(ready.model, slots=options.slots, max_length=max_length)
    name = options.name or options.checkpoint.resolve().name
    return Service(
        worker=Worker(batch, ready.tokenizer, most_waiting=options.max_waiting),
        reader=Reader(
            ready.tokenizer,
            end_tokens=ready.end_tokens,
            template=find_chat_template(ready.checkpoint, named=options.chat_template),
            max_length=max_length,
            vocab_size=config.vocab_size,
            names=frozenset({name}),
            limits=Limits(new_tokens=options.max_new_tokens),
        ),
        model=ready.model,
        name=name,
        protection=protection,
        request_seconds=options.timeout,
        grace_seconds=options.grace,
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("slots", "max_waiting", "max_body", "timeout", "max_length", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {value}.")
    if options.grace < 0:
        raise UsageError(f"--grace must not be negative, not {options.grace}.")
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port {options.port} must lie between 0 and 65535.")


def _token(options: argparse.Namespace, environment: Environment) -> str | None:
    if options.token_file is None:
        return environment.settings.get("MDS_SERVE_TOKEN") or None
    token = options.token_file.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InputError(f"{options.token_file}: a token must be one line of ASCII characters.")
    return str(token)


def _protection(options: argparse.Namespace, *, token: str | None) -> Protection:
    from mds_train.serve.guard import Protection

    if token is None and not _is_loopback(options.host):
        raise InputError(
            f"--host {options.host} lets other machines in, so clients must prove who they are: "
            "write a token into a file and name it with --token-file."
        )
    return Protection(token=token, body_bytes=options.max_body)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def _listening(options: argparse.Namespace) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=256)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(
            f"Cannot listen at {options.host}:{options.port}: {reason}; choose another --port."
        ) from error
    with listener:
        yield listener


def _greeting(name: str, listener: socket.socket, *, token: str | None) -> str:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    guard = "a token is asked for" if token else "this machine only, no token"
    return f"Serving {name} at http://{host}:{port} ({guard}). SIGTERM or Ctrl-C ends it."


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """Let SIGTERM end the server and not the process: uvicorn raises the signal again later."""
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {each: signal.signal(each, lambda *_: None) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
