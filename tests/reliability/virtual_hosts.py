"""Two hosts on one machine: network namespaces on a bridge, whose links can be cut.

Processes see each other's files but reach each other only over the virtual network. Needs root and
iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Hosts", "virtual_hosts", "why_impossible"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def why_impossible() -> str:
    """Why there can be no virtual hosts here; empty where there can."""
    if shutil.which("ip") is None:
        return "there is no ip command (package iproute2)"
    name = f"mds-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.decode().strip()}"
    ip("netns", "del", name)
    return ""


@dataclass(frozen=True)
class Hosts:
    """Hosts 0 and 1."""

    name: str
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def start(
        self, host: int, words: Sequence[str], *, folder: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start a Python program on a host, in a process group of its own."""
        return subprocess.Popen(
            ["ip", "netns", "exec", f"{self.name}{host}", sys.executable, *words],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
                "GLOO_SOCKET_IFNAME": "veth0",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def cut(self, host: int) -> None:
        """Take the link of a host down, as a pulled cable or a dead switch does."""
        self._bridge("ip", "link", "set", f"port{host}", "down")

    def restore(self, host: int) -> None:
        """Bring the link back."""
        self._bridge("ip", "link", "set", f"port{host}", "up")

    def _bridge(self, *words: str) -> None:
        ip("netns", "exec", f"{self.name}br", *words)

    def build(self) -> None:
        """Make the namespaces, the bridge and the links."""
        ip("netns", "add", f"{self.name}br")
        self._bridge("ip", "link", "add", "br0", "type", "bridge")
        self._bridge("ip", "link", "set", "br0", "up")
        for host, address in enumerate(self.addresses):
            own, port = f"{self.name}{host}", f"port{host}"
            ip("netns", "add", own)
            peer = ("type", "veth", "peer", "name", port, "netns", f"{self.name}br")
            ip("link", "add", "veth0", "netns", own, *peer)
            self._bridge("ip", "link", "set", port, "master", "br0")
            self._bridge("ip", "link", "set", port, "up")
            ip("netns", "exec", own, "ip", "addr", "add", f"{address}/24", "dev", "veth0")
            for device in ("veth0", "lo"):
                ip("netns", "exec", own, "ip", "link", "set", device, "up")

    def end_all(self, host: int | str) -> None:
        """Kill everything that runs on a host."""
        name = f"{self.name}{host}"
        listed = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def tear_down(self) -> None:
        """End what runs on the hosts, and remove them."""
        for place in (0, 1, "br"):
            self.end_all(place)
            subprocess.run(
                ["ip", "netns", "del", f"{self.name}{place}"], capture_output=True, check=False
            )


@contextmanager
def virtual_hosts() -> Iterator[Hosts]:
    """Two hosts that reach each other, and nobody else."""
    hosts = Hosts(f"mds{os.getpid()}-")
    try:
        hosts.build()
        yield hosts
    finally:
        hosts.tear_down()
