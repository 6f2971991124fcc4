"""A line of JSON to and from another machine's supervisor, and whether that one is still there.

Both ends say every few seconds that they are alive: a machine whose link is cut closes nothing, it
only falls silent.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from typing import Any

__all__ = ["Line"]

_BEAT_SECONDS = 2.0
_SILENCE_SECONDS = 20.0
_LONGEST_MESSAGE = 4096


class Line:
    """One connection; threads send the beats and take in what comes.

    Args:
        connection: Connected.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(_SILENCE_SECONDS)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self._closed = threading.Event()
        self._sending = threading.Lock()
        for work in (self._receive, self._beat):
            threading.Thread(target=work, daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether the other end was heard of a short while ago."""
        silent = time.monotonic() - self._heard > _SILENCE_SECONDS
        return not silent and not self._closed.is_set()

    def heard_since(self, moment: float) -> bool:
        """Whether the other end was heard of after a moment (of `time.monotonic`)."""
        return self._heard > moment and not self._closed.is_set()

    def send(self, **message: Any) -> None:
        """Send a message; to an end that is gone it is lost."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def received(self, *, wait_seconds: float) -> dict[str, Any]:
        """The next message; an empty one if none comes in time, or the other end is gone."""
        try:
            return self._messages.get(timeout=wait_seconds)
        except queue.Empty:
            return {}

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        # Shutting down wakes the thread that waits for the other end.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as stream:
            while text := stream.readline(_LONGEST_MESSAGE):
                message = json.loads(text)
                if not isinstance(message, dict):
                    break
                self._heard = time.monotonic()
                if message:
                    self._messages.put(message)
        self._closed.set()
        self._messages.put({})  # nobody need wait any longer

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            self.send()
