"""A headless Chromium that is told what to do over a pipe (DevTools protocol), without a driver."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page.

    Args:
        commands: Where messages to the browser go, each ended by a zero byte.
        answers: Where its messages come from.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._rest = b""
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self._call("Page.navigate", url=url)
        self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done() : "
            "addEventListener('load', done))"
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it becomes."""
        found = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true after a change of the page."""
        self.evaluate(
            f"new Promise(done => {{ const look = () => {{ if ({condition}) done(); }};"
            "new MutationObserver(look).observe(document, {subtree: true, childList: true, "
            "attributes: true, characterData: true}); look(); })"
        )

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"]))
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browsing(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a new profile."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-pipe"]
    # It reads from 3 and writes to 4; the shell puts the pipes there.
    placing = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", placing, "bash", program, *options, f"--user-data-dir={profile}"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(commands, answers)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
