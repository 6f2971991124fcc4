"""A process that has trained three steps and saved, and five, and then forks children that save.

Started by test_killed_saves, which writes one JSON object a line to its standard input and reads
one back. A child dies, fails or waits at a chosen operation on the disk; the parent stays as it is.

    python save_server.py FOLDER
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mds_ckpt.commit import FileOperations
from mds_train.assembly import Parts, assemble
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    TrainConfig,
    WatchConfig,
)
from mds_train.launch import distributed, read_environment
from mds_train.saving.saver import Saver
from mds_train.state import TrainState
from mds_train.step import train_step

OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "replace",
    "remove",
    "remove_folder",
)
FAILED = 4


def config_in(folder: Path) -> TrainConfig:
    """One layer, saved every three steps."""
    return TrainConfig(
        model=ModelConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            vocab_size=64,
            max_position_embeddings=16,
        ),
        data=DataConfig(store=str(folder / "store"), seq_length=16, split="100,0,0"),
        train=LoopConfig(run_dir=str(folder / "run"), train_steps=6, global_batch_size=2),
        checkpoint=CheckpointConfig(),
        watch=WatchConfig(),
    )


def silent(event: str, message: str, **details: object) -> None:
    """Tells nobody."""


def save(parts: Parts, state: TrainState, **settings: Any) -> None:
    """Save once, wait for all of it."""
    checkpoint = replace(parts.config.checkpoint, **settings)
    parts = replace(parts, config=replace(parts.config, checkpoint=checkpoint))
    saver = Saver(parts, parent=None, newest=None, notify=silent)
    try:
        saver.save(state)
        saver.finish()
    finally:
        saver.close()


def interfere(at: int, *, action: Callable[[str], None]) -> Callable[[], int]:
    """Do something at the operation with this number, half way through a write.

    Returns:
        A function that says how many operations there were.
    """
    count = 0

    def wrapped(name: str) -> Callable[..., Any]:
        plain = getattr(FileOperations, name)

        def operation(self: FileOperations, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                if name == "write":
                    file, data = args
                    plain(self, file, data[: len(data) // 2])
                action(name)
            return plain(self, *args, **kwargs)

        return operation

    for name in OPERATIONS:
        setattr(FileOperations, name, wrapped(name))
    return lambda: count


def die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def find_the_disk_full(_: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def find_the_disk_broken(_: str) -> None:
    raise OSError(errno.EIO, "Input/output error")


def child(parts: Parts, state: TrainState, order: dict[str, Any]) -> int:
    """Save as ordered; the exit code tells how it went."""
    at, settings = order.get("at", 0), order.get("settings", {})
    actions = {"kill": die, "full": find_the_disk_full, "broken": find_the_disk_broken}
    counted = interfere(at, action=actions.get(order["how"], lambda _: None))
    if order["how"] == "wait":  # for whoever traces this process
        signal.sigwait([signal.SIGUSR1])
    try:
        save(parts, state, **settings)
    except OSError as error:
        refused = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS}
        return FAILED if error.errno in refused else 1
    except ValueError as error:
        Path(order["said"]).write_text(str(error))
        return 3
    if "count" in order:
        Path(order["count"]).write_text(str(counted()))
    return 0


def serve(parts: Parts, state: TrainState) -> None:
    """Fork a child for each line; answer with how it ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # a child waits for it
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(parts, state, order)
            finally:
                os._exit(code)
        answer: dict[str, Any] = {"pid": pid}
        if order["how"] != "wait":
            _, status = os.waitpid(pid, 0)
            answer["status"] = os.waitstatus_to_exitcode(status)
        else:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            _, status = os.waitpid(pid, 0)
            answer["status"] = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    folder = Path(sys.argv[1])
    config = config_in(folder)
    with distributed(read_environment(), device="cpu", timeout_seconds=60):
        parts = assemble(config)
        state = TrainState()
        for step in range(1, 6):
            batch = parts.reader.read(state.consumed_samples)
            train_step(parts.engine, batch, groups=parts.groups, lr=1e-2, weight_decay=0.1)
            state = state.after_step(samples=2, tokens=32, applied=True)
            if step == 3:
                save(parts, state)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        serve(parts, state)


if __name__ == "__main__":
    main()
