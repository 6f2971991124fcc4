"""Stands before the application: who may ask, how much may come, and how slowly."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from mds_train.serve.api_error import ApiError

__all__ = ["Guard", "Protection"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = frozenset(("/", "/health"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """What is let through."""

    token: str | None = None
    """What clients must send as a bearer token; None lets everybody in."""
    hosts: frozenset[str] = frozenset(("127.0.0.1", "localhost", "[::1]"))
    """Names by which the server may be called where there is no token. A page of another site that
    makes its own name point here (DNS rebinding) is refused by this."""
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    """Within which a request's body must have come."""


class Guard:
    """An ASGI application around another.

    Args:
        app: What is protected.
        protection: What is let through.
        refuse: Answers a request with an error.
    """

    def __init__(
        self,
        app: App,
        *,
        protection: Protection,
        refuse: Callable[[ApiError, Scope, Receive, Send], Awaitable[None]],
    ) -> None:
        self._app, self._protection, self._refuse = app, protection, refuse
        token = protection.token
        self._digest = None if token is None else hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, with its whole body, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _once(body, receive), send)

    def _check(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._digest is None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._protection.hosts:
                raise ApiError(
                    403, "The server does not go by this name; call it as 127.0.0.1.", code="host"
                )
        elif scope["path"] not in _OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            digest = hashlib.sha256(given.strip()).digest()
            right = hmac.compare_digest(digest, self._digest)  # equally long, whatever came
            if not (right and scheme.lower() == b"bearer"):
                raise ApiError(
                    401,
                    "The token is missing or wrong; send Authorization: Bearer TOKEN.",
                    code="invalid_api_key",
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._protection.body_bytes:
            raise self._too_large()
        if scope["method"] in ("POST", "PUT"):
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json":  # what a page of another site cannot send unasked
                raise ApiError(415, "Send JSON, with Content-Type: application/json.")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client went away."""
        body = b""
        try:
            async with asyncio.timeout(self._protection.body_seconds):
                while scope["method"] in ("POST", "PUT"):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._protection.body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError as error:
            raise ApiError(408, "The body of the request did not come in time.") from error
        return body

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"The body has more than {self._protection.body_bytes} bytes.", code="too_large"
        )


def _once(body: bytes, receive: Receive) -> Receive:
    """What gives the body first, and then what the client does next."""
    given = False

    async def receive_body() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body
