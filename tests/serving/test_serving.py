"""How the server behaves: who joins, who waits, who leaves, who may ask, and how it ends."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

from served_model import JSON, Served, serving

from mds_train.generate.command import LoadedModel
from mds_train.serve.guard import Protection

LONG = {"prompt": "The quick brown", "max_tokens": 60, "temperature": 0, "logit_bias": {"0": -100}}
SHORT = {"prompt": "A model reads", "max_tokens": 3, "temperature": 0, "logit_bias": {"0": -100}}


def test_who_joins_later_gets_tokens_before_the_others_end(ready: LoadedModel) -> None:
    with (
        serving(ready, gated=True) as server,
        server.stream("/v1/completions", LONG) as long,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        server.submitted.acquire()
        server.gate.allow(5)
        begun = list(itertools.islice(long, 5))
        joining = elsewhere.submit(server.ask, "/v1/completions", SHORT)
        server.submitted.acquire()
        server.gate.allow(5)  # the one that it may be in, and a few

        status, short = joining.result(60)

        still_running = server.service.worker.active
        server.gate.let_all()
        rest = list(long)
    assert status == 200
    assert short["usage"]["completion_tokens"] == 3
    assert still_running == 1
    assert len(begun) + len(rest) == 60
    assert all(each["choices"][0]["finish_reason"] is None for each in begun)


def test_a_client_that_goes_away_frees_its_slot(ready: LoadedModel) -> None:
    with serving(ready, gated=True) as server:
        ended = threading.Event()
        cancel = server.service.worker.cancel
        server.service.worker.cancel = lambda jobs: (cancel(jobs), ended.set())
        with server.stream("/v1/completions", LONG) as events:
            server.gate.allow(2)
            list(itertools.islice(events, 2))
        # What it is still sent tells the server that nobody is there.
        server.gate.allow(20)

        assert ended.wait(60)
        server.gate.let_all()
        assert server.ask("/v1/completions", SHORT)[0] == 200
        assert server.service.worker.active == 0


def test_a_client_that_goes_away_unanswered_frees_its_slot(ready: LoadedModel) -> None:
    with serving(ready, gated=True) as server:
        ended = threading.Event()
        cancel = server.service.worker.cancel
        server.service.worker.cancel = lambda jobs: (cancel(jobs), ended.set())
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(LONG), JSON)
        server.submitted.acquire()

        connection.close()

        assert ended.wait(60)


def test_a_request_has_its_time(ready: LoadedModel) -> None:
    with serving(ready, "--timeout", "0.2", gated=True) as server:
        status, answer = server.ask("/v1/completions", LONG)
        with server.stream("/v1/completions", LONG) as events:
            streamed = next(events)

    assert status == 504
    assert "longer than 0.2 s" in answer["error"]["message"]
    assert streamed["error"]["code"] == "timeout"


def test_more_than_may_wait_are_sent_away(ready: LoadedModel) -> None:
    with (
        serving(ready, "--slots", "1", "--max-waiting", "2", gated=True) as server,
        ThreadPoolExecutor(1) as elsewhere,
    ):
        never, _ = server.ask("/v1/completions", {**SHORT, "n": 4})
        first = elsewhere.submit(server.ask, "/v1/completions", {**SHORT, "n": 2})
        server.submitted.acquire()
        status, answer = server.ask("/v1/completions", {**SHORT, "n": 2})
        server.gate.let_all()
        fine, _ = first.result(60)
        later, _ = server.ask("/v1/completions", {**SHORT, "n": 3})

    assert (never, status, fine, later) == (400, 429, 200, 200)
    assert answer["error"]["type"] == "rate_limit_error"


def test_a_model_that_fails_answers_nobody_and_says_so(ready: LoadedModel) -> None:
    def fail() -> None:
        raise RuntimeError("no memory for 'Canary'")

    with serving(ready) as server:
        server.service.worker._batch.step = fail
        failed, answer = server.ask("/v1/completions", SHORT)
        later, _ = server.ask("/v1/completions", SHORT)
        searched, _ = server.ask("/api", {"prompts": ["a"], "beam_width": 2}, method="PUT")
        health, _ = server.ask("/health")

    assert (failed, later, searched, health) == (503, 503, 503, 503)
    assert answer["error"]["type"] == "server_error"
    assert "Canary" not in answer["error"]["message"]


def test_only_who_has_the_token_is_answered(ready: LoadedModel) -> None:
    def bearing(token: str) -> dict[str, str]:
        return {"Authorization": token, "Host": "model.example"}

    with serving(ready, protection=Protection(token="secret")) as server:
        refused = [
            server.ask("/v1/completions", SHORT, headers=bearing(token))[0]
            for token in ("", "secret", "Basic secret", "Bearer", "Bearer secre", "Bearer secrets")
        ]
        hidden = [server.ask(path)[0] for path in ("/v1/models", "/metrics", "/elsewhere")]
        answered, _ = server.ask("/v1/completions", SHORT, headers=bearing("Bearer secret"))
        public = [server.ask(path)[0] for path in ("/", "/health")]

    assert refused == [401] * 6
    assert hidden == [401] * 3
    assert answered == 200
    assert public == [200, 200]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example"}, SHORT, 403),  # a name of another site that points here
        ({"Host": "127.0.0.1.evil.example:80"}, SHORT, 403),
        ({"Host": "localhost:1"}, SHORT, 200),
        ({"Content-Type": "text/plain"}, SHORT, 415),  # what a page of another site can send
        ({"Content-Type": "application/json; charset=utf-8"}, SHORT, 200),
        ({}, b'{"prompt": "' + b"x" * (1 << 20) + b'"}', 413),
    ],
)
def test_what_pages_of_other_sites_could_send_is_refused(
    server: Served, headers: dict[str, str], body: object, status: int
) -> None:
    code, answer = server.ask("/v1/completions", body, headers=headers)

    assert code == status
    assert status == 200 or set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_does_not_come_is_not_waited_for(ready: LoadedModel) -> None:
    with serving(ready, protection=Protection(body_seconds=0.2)) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders()
        connection.send(b"{")

        answer = connection.getresponse()

        assert answer.status == 408
        connection.close()


def test_a_body_without_a_length_is_limited_too(ready: LoadedModel) -> None:
    with serving(ready, protection=Protection(body_bytes=1000)) as server:
        connection = server.connect()
        pieces = (b"x" * 100 for _ in range(20))

        connection.request("POST", "/v1/completions", pieces, JSON, encode_chunked=True)

        assert connection.getresponse().status == 413
        connection.close()


def test_the_original_interface(server: Served) -> None:
    body = {"prompts": ["The quick brown", "A model"], "tokens_to_generate": 6, "logprobs": True}

    status, answer = server.ask("/api", body, method="PUT")

    assert status == 200, answer
    wanted = [prompt + server.greedy(prompt, 6) for prompt in body["prompts"]]
    assert answer["text"] == wanted
    assert ["".join(each) for each in answer["segments"]] == wanted
    for tokens, logprobs in zip(answer["segments"], answer["logprobs"], strict=True):
        assert len(logprobs) == len(tokens) - 1


def test_the_original_interface_searches_with_beams(server: Served) -> None:
    body = {"prompts": ["The quick brown"], "tokens_to_generate": 6, "beam_width": 3}

    status, answer = server.ask("/api", body, method="PUT")

    assert status == 200, answer
    assert len(answer["text"]) == len(answer["scores"]) == 3
    assert answer["scores"] == sorted(answer["scores"], reverse=True)
    assert all(text.startswith("The quick brown") for text in answer["text"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompts": "a"}, "prompts must be a list"),
        ({"prompts": ["a"] * 129}, "up to 128"),
        ({"prompts": ["a"], "tokens_to_generate": 0}, "with logprobs only"),
        ({"prompts": ["a"], "top_k": 5, "top_p": 0.5}, "cannot both be set"),
        ({"prompts": ["a"], "top_p_decay": 0.5}, "needs a top_p"),
        ({"prompts": ["a", "b"], "beam_width": 2}, "takes one prompt"),
        ({"prompts": ["a"], "tokens_to_generate": 400}, "reads 256 at most"),
        ({"prompts": ["a"], "max_len": 4}, "Unknown member 'max_len'"),
    ],
)
def test_the_original_interface_refuses_what_is_wrong(
    server: Served, body: dict, words: str
) -> None:
    status, answer = server.ask("/api", body, method="PUT")

    assert status == 400
    assert words in answer["error"]["message"]


def test_the_page_may_run_its_own_script_only(server: Served) -> None:
    connection = server.connect()
    connection.request("GET", "/")
    answer = connection.getresponse()
    page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    connection.close()

    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|//[a-z]|innerHTML|\son\w+=", page)


@pytest.fixture
def process(folder: Path) -> Iterator[subprocess.Popen]:
    """The command itself; what it says comes from its standard error."""
    command = [sys.executable, "-m", "mds_train", "serve", str(folder), "--port", "0"]
    started = subprocess.Popen(
        [*command, "--device", "cpu", "--grace", "30"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def test_sigterm_lets_running_requests_end(process: subprocess.Popen) -> None:
    greeting = process.stderr.readline()
    server = object.__new__(Served)
    server.port = int(re.search(r"http://127\.0\.0\.1:(\d+)", greeting)[1])
    body = {**LONG, "prompt": "Canary in the prompt", "max_tokens": 200}

    with server.stream("/v1/completions", body) as events:
        first = next(events)
        process.send_signal(signal.SIGTERM)
        rest = list(events)
    said = greeting + process.stderr.read()

    assert process.wait(60) == 0
    assert len([first, *rest]) == 200
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert "Canary" not in said
    assert "The server has ended" in said
