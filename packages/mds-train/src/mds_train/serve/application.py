"""The HTTP application: routes, streams, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mds_train.generate.beams import beam_search
from mds_train.generate.request import Request
from mds_train.serve.answers import DONE, Writer, event
from mds_train.serve.api_error import ApiError
from mds_train.serve.guard import Guard, Protection, Receive, Scope, Send
from mds_train.serve.legacy import LegacyAsked, legacy_answer, read_legacy
from mds_train.serve.members import read_object
from mds_train.serve.page import load_page
from mds_train.serve.protocol import Asked, Reader
from mds_train.serve.worker import Busy, Job, Piece, Worker

try:
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from mds_train.serve.metrics import Metrics
except ImportError as error:
    raise ImportError(
        "Serving needs starlette, uvicorn and prometheus-client: pip install 'mds-train[serve]'",
        name=error.name,
    ) from error

__all__ = ["Service", "build_application"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What the routes work with."""

    worker: Worker
    reader: Reader
    model: Any
    """The GPT itself, for beam searches."""
    name: str
    """What the model is called."""
    protection: Protection
    request_seconds: float = 600.0
    """After which a request is ended."""
    grace_seconds: float = 20.0
    """That running requests have when the server ends."""
    started: int = field(default_factory=lambda: int(time.time()))


class _Routes:
    """The answers to each path."""

    def __init__(self, service: Service) -> None:
        self.service = service
        worker = service.worker
        self.metrics = Metrics(active=lambda: worker.active, waiting=lambda: worker.waiting)
        self._page, self._page_headers = load_page()

    async def page(self, _: Any) -> Any:
        return Response(self._page, media_type="text/html", headers=self._page_headers)

    async def health(self, _: Any) -> Any:
        self.check_alive()
        return JSONResponse({"status": "ok"})

    def check_alive(self) -> None:
        """Raise ApiError once the model can answer no more."""
        if (failure := self.service.worker.failure) is not None:
            raise ApiError(503, failure, code="model_failed")

    async def show_metrics(self, _: Any) -> Any:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, _: Any) -> Any:
        entry = {
            "id": self.service.name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "mds-train",
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def completions(self, http: Any) -> Any:
        return await self._answer(http, self.service.reader.completion)

    async def chat(self, http: Any) -> Any:
        return await self._answer(http, self.service.reader.chat)

    async def legacy(self, http: Any) -> Any:
        reader = self.service.reader
        asked = read_legacy(
            read_object(await http.body()),
            reader.tokenizer,
            end_tokens=reader.end_tokens,
            limits=reader.limits,
            max_length=reader.max_length,
        )
        if asked.search is not None:
            return await self._beams(asked)
        started = time.monotonic()
        answer = _Answer(self, http, [(request, asked.stop) for request in asked.requests])
        pieces = await answer.whole()
        self._count(sum(len(r.prompt) for r in asked.requests), pieces, started=started)
        return JSONResponse(legacy_answer(asked, pieces, reader.tokenizer))

    async def _beams(self, asked: LegacyAsked) -> Any:
        """A search holds up the other requests for its time; there is one at a time."""
        self.check_alive()
        (request,), search, tokenizer = asked.requests, asked.search, self.service.reader.tokenizer
        assert search is not None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def tell(found: Any) -> None:
            if not result.done():
                result.set_result(found)

        def done(found: Any) -> None:
            loop.call_soon_threadsafe(tell, found)

        self.service.worker.call(
            lambda: beam_search(
                self.service.model,
                request.prompt,
                max_new_tokens=request.max_new_tokens,
                search=search,
                end_tokens=request.end_tokens,
            ),
            done,
        )
        beams = await result
        if isinstance(beams, Exception):
            raise ApiError(400, str(beams)) from beams
        prompt = list(request.prompt)
        ids = [[*prompt, *beam.tokens] for beam in beams]
        segments = [[tokenizer.decode([each]) for each in row] for row in ids]
        scores = [beam.score for beam in beams]
        texts = [tokenizer.decode(row) for row in ids]
        return JSONResponse({"text": texts, "segments": segments, "scores": scores})

    async def _answer(self, http: Any, read: Callable[[Any], Asked]) -> Any:
        started = time.monotonic()
        asked = read(read_object(await http.body()))
        writer = Writer(asked, self.service.reader.tokenizer, model=self.service.name)
        answer = _Answer(self, http, [(request, asked.stop) for request in asked.requests])
        if asked.stream:
            chunks = self._chunks(asked, writer, answer, started=started)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
        pieces = await answer.whole()
        self._count(asked.prompt_tokens, pieces, started=started)
        return JSONResponse(writer.whole(pieces))

    async def _chunks(
        self, asked: Asked, writer: Writer, answer: _Answer, *, started: float
    ) -> AsyncIterator[str]:
        pieces: list[Piece] = []
        try:
            async for number, piece in answer.pieces():
                pieces.append(piece)
                for chunk in writer.chunks(number, piece):
                    yield event(chunk)
        except ApiError as error:  # the status has been sent long ago
            yield event(error.body())
            return
        if asked.include_usage:
            yield event(writer.last_chunk())
        yield DONE
        self._count(asked.prompt_tokens, [pieces], started=started)

    def _count(
        self, prompt_tokens: int, pieces: Sequence[Sequence[Piece]], *, started: float
    ) -> None:
        self.metrics.prompt_tokens.inc(prompt_tokens)
        self.metrics.new_tokens.inc(sum(len(part.tokens) for each in pieces for part in each))
        self.metrics.duration.observe(time.monotonic() - started)


class _Answer:
    """The pieces of one HTTP request's sequences, until its end, its time, or its client's leave.

    The sequences are queued at once, so that a refusal can still be the answer's status.
    """

    def __init__(
        self, routes: _Routes, http: Any, asked: list[tuple[Request, tuple[str, ...]]]
    ) -> None:
        self._routes, self._http = routes, http
        self._left = len(asked)
        self._count = len(asked)
        self._started = time.monotonic()
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(number: int, piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._queue.put_nowait, (number, piece))

        routes.check_alive()
        self._jobs: list[Job] = routes.service.worker.submit(asked, listen)

    async def whole(self) -> list[list[Piece]]:
        """All pieces of each sequence."""
        found: list[list[Piece]] = [[] for _ in range(self._count)]
        leaving = asyncio.ensure_future(self._disconnected())
        collecting = asyncio.ensure_future(self._collect(found))
        try:
            await asyncio.wait({leaving, collecting}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise ApiError(499, "The client went away.", code="disconnected")
            await collecting
        finally:
            leaving.cancel()
            collecting.cancel()
            self._end()
        return found

    async def _collect(self, found: list[list[Piece]]) -> None:
        async for number, piece in self.pieces():
            found[number].append(piece)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Each piece with the number of its sequence, as they come."""
        service = self._routes.service
        first = True
        try:
            async with asyncio.timeout(service.request_seconds):
                while self._left:
                    number, piece = await self._queue.get()
                    if first and piece.tokens:
                        self._routes.metrics.first_token.observe(time.monotonic() - self._started)
                        first = False
                    self._left -= piece.finish_reason is not None
                    if piece.finish_reason == "error":
                        self._routes.check_alive()
                    if piece.finish_reason == "cancelled":
                        raise ApiError(503, "The server is ending.", code="shutdown")
                    yield number, piece
        except TimeoutError as error:
            message = f"The answer took longer than {service.request_seconds:g} s."
            raise ApiError(504, message, code="timeout") from error
        finally:
            self._end()

    def _end(self) -> None:
        """Cancel what still runs, if anything does."""
        if self._left and self._jobs:
            self._routes.metrics.cancelled.inc()
            self._routes.service.worker.cancel(self._jobs)
        self._jobs = []

    async def _disconnected(self) -> None:
        while (await self._http.receive())["type"] != "http.disconnect":
            pass


def build_application(service: Service) -> Any:
    """The ASGI application; the worker starts and ends with it."""
    routes = _Routes(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop, grace_seconds=service.grace_seconds)

    paths = {
        "/": ("GET", routes.page),
        "/health": ("GET", routes.health),
        "/metrics": ("GET", routes.show_metrics),
        "/v1/models": ("GET", routes.models),
        "/v1/completions": ("POST", routes.completions),
        "/v1/chat/completions": ("POST", routes.chat),
        "/api": ("PUT", routes.legacy),
    }
    app = Starlette(
        routes=[Route(path, answer, methods=[method]) for path, (method, answer) in paths.items()],
        lifespan=lifespan,
        exception_handlers={
            ApiError: _show_error,
            Busy: _show_busy,
            ValueError: _show_value_error,
            404: _show_http_error,
            405: _show_http_error,
            500: _show_fault,
        },
    )

    async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await _response(error)(scope, receive, send)

    guarded = Guard(app, protection=service.protection, refuse=refuse)
    return _counted(guarded, routes.metrics, known=frozenset(paths))


def _counted(app: Any, metrics: Any, *, known: frozenset[str]) -> Any:
    """Count the answers by path and status; paths that are not ours count as one."""

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in known else "other"
                metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await app(scope, receive, sending if scope["type"] == "http" else send)

    return counting


def _response(error: ApiError) -> Any:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 429:
        headers["Retry-After"] = "1"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _show_error(_: Any, error: ApiError) -> Any:
    return _response(error)


async def _show_busy(_: Any, error: Busy) -> Any:
    return _response(ApiError(429, str(error), code="busy"))


async def _show_value_error(_: Any, error: ValueError) -> Any:
    return _response(ApiError(400, str(error)))


async def _show_http_error(http: Any, error: Any) -> Any:
    message = f"{http.method} {http.url.path[:80]} is not served here."
    return _response(ApiError(error.status_code, message, code="not_found"))


async def _show_fault(_: Any, error: Exception) -> Any:
    del error  # its text could hold a prompt
    return _response(ApiError(500, "The server has made a mistake; its log says which."))
