"""A server in a thread, behind a real socket, and a client of it."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from mds_train.generate.command import LoadedModel
from mds_train.serve.application import build_application
from mds_train.serve.command import add_arguments, service_of
from mds_train.serve.guard import Protection

JSON = {"Content-Type": "application/json"}


class Gate:
    """Lets the model compute one step for each permission."""

    def __init__(self, batch: Any) -> None:
        self.permissions = threading.Semaphore(0)
        self.open = False
        self._step = batch.step
        batch.step = self.step

    def step(self) -> Any:
        if not self.open:
            self.permissions.acquire()
        return self._step()

    def allow(self, steps: int) -> None:
        self.permissions.release(steps)

    def let_all(self) -> None:
        self.open = True
        self.permissions.release(1000)


class Served:
    """A running server, and requests to it."""

    def __init__(self, service: Any, port: int, gate: Gate | None) -> None:
        self.service, self.port, self.gate = service, port, gate
        self.submitted = threading.Semaphore(0)
        submit = service.worker.submit

        def submitting(*arguments: Any) -> Any:
            jobs = submit(*arguments)
            self.submitted.release()
            return jobs

        service.worker.submit = submitting

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict | None = None
    ) -> tuple[int, Any]:
        """Status and content of an answer."""
        connection = self.connect()
        content = body if isinstance(body, bytes | None) else json.dumps(body)
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, body=content, headers={**JSON, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        kind = answer.headers["Content-Type"] or ""
        return answer.status, json.loads(text) if "json" in kind else text

    @contextlib.contextmanager
    def stream(self, path: str, body: dict) -> Iterator[Iterator[dict]]:
        """The events of an answer, as they come; closing it is going away."""
        connection = self.connect()
        connection.request("POST", path, body=json.dumps({**body, "stream": True}), headers=JSON)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        try:
            yield _events(answer)
        finally:
            answer.close()
            connection.close()

    def greedy(self, prompt: str, count: int) -> str:
        status, answer = self.ask(
            "/v1/completions", {"prompt": prompt, "max_tokens": count, "temperature": 0}
        )
        assert status == 200, answer
        return answer["choices"][0]["text"]


def _events(answer: http.client.HTTPResponse) -> Iterator[dict]:
    while line := answer.readline():
        if line.startswith(b"data: "):
            if line == b"data: [DONE]\n":
                return
            yield json.loads(line[6:])
    raise AssertionError("the stream ended without [DONE]")


def options(ready: LoadedModel, *words: str) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(ready.checkpoint.path), *words])


@contextlib.contextmanager
def serving(
    ready: LoadedModel, *words: str, gated: bool = False, protection: Protection | None = None
) -> Iterator[Served]:
    """A server with the command's options, in a thread."""
    service = service_of(ready, options(ready, *words), protection=protection or Protection())
    gate = Gate(service.worker._batch) if gated else None
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(
        build_application(service), log_config=None, timeout_graceful_shutdown=5
    )
    server = Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert started.wait(60)
        try:
            yield Served(service, listener.getsockname()[1], gate)
        finally:
            if gate is not None:
                gate.let_all()
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
