"""New tokens per second of the server at 1 and 8 clients, beside transformers' pipeline.

    python packages/mds-train/benchmarks/serve.py [--sizes small medium large] [--requests 16]

The server runs in this process behind a real socket. Each client sends one request after the other
and waits for the answer. transformers' text-generation pipeline answers the same prompts in the
same way: one at a time for 1 client, and for 8 in the batches of 8 that eight patient clients would
make. Greedy, the same weights, in turn; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import resource
import socket
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
import uvicorn
from generate import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mds_train.generate.command import LoadedModel
from mds_train.generate.model import load_model, load_tokenizer
from mds_train.model_source import open_model
from mds_train.serve.application import build_application
from mds_train.serve.command import add_arguments, service_of
from mds_train.serve.guard import Protection

NEW, LETTERS = 32, 64
JSON = {"Content-Type": "application/json"}


def write_model(folder: Path, size: str) -> None:
    layers, hidden, heads, vocabulary = SIZES[size]
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=256,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


class Server:
    """The server on a free port, in a thread."""

    def __init__(self, folder: Path) -> None:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        checkpoint = open_model(folder)
        ready = LoadedModel(
            model=load_model(checkpoint),
            tokenizer=load_tokenizer(checkpoint),
            end_tokens=frozenset(),
            checkpoint=checkpoint,
            is_first=True,
        )
        service = service_of(ready, parser.parse_args([str(folder)]), protection=Protection())
        self._server = uvicorn.Server(uvicorn.Config(build_application(service), log_config=None))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True
        )
        self._thread.start()

    def answer(self, prompt: str) -> int:
        """Tokens of one answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = json.dumps({"prompt": prompt, "max_tokens": NEW, "temperature": 0})
        connection.request("POST", "/v1/completions", body, JSON)
        answer = json.load(connection.getresponse())
        connection.close()
        return answer["usage"]["completion_tokens"]

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def compare(size: str, *, requests: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), size)
        server = Server(Path(name))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{name}/tokenizer.json")
        tokenizer.pad_token, tokenizer.padding_side = "!", "left"
        pipeline = transformers.pipeline("text-generation", model=name, tokenizer=tokenizer)
    prompts = [f"Request {number:03} ".ljust(LETTERS, "x") for number in range(requests)]
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}

    def ours(clients: int) -> None:
        with ThreadPoolExecutor(clients) as pool:
            counts = list(pool.map(server.answer, prompts))
        assert counts == [NEW] * requests

    def theirs(clients: int) -> None:
        pipeline(prompts, batch_size=clients, **options)

    for clients in (1, 8):
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(rounds + 1):
            for way, action in (("ours", ours), ("theirs", theirs)):
                start = time.perf_counter()
                action(clients)
                if turn:  # the first warms up
                    times[way].append(time.perf_counter() - start)
        medians = {way: statistics.median(spent) for way, spent in times.items()}
        line = {
            "size": size,
            "clients": clients,
            "ours_tokens_per_second": round(requests * NEW / medians["ours"], 1),
            "pipeline_tokens_per_second": round(requests * NEW / medians["theirs"], 1),
            "speedup": round(medians["theirs"] / medians["ours"], 2),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        print(json.dumps(line), flush=True)
    server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads, machine = torch.get_num_threads(), platform.machine()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}, "
        f"{threads} threads, {LETTERS} tokens read and {NEW} written a request"
    )
    for size in options.sizes:
        compare(size, requests=options.requests, rounds=options.rounds)


if __name__ == "__main__":
    main()
