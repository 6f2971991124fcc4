"""What the server counts, as Prometheus reads it. No prompt and no answer is among it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Metrics:
    """The counters of one server, which share nothing with others in the process.

    Args:
        active: Tells how many sequences get tokens now.
        waiting: Tells how many wait for a slot.
    """

    def __init__(self, *, active: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        own = {"registry": self._registry}
        self.requests = Counter(
            "mds_requests_total", "HTTP requests that were answered.", ["path", "status"], **own
        )
        self.prompt_tokens = Counter("mds_prompt_tokens_total", "Tokens of prompts read.", **own)
        self.new_tokens = Counter("mds_new_tokens_total", "Tokens generated.", **own)
        self.cancelled = Counter(
            "mds_cancelled_total", "Requests whose client went away or whose time was up.", **own
        )
        self.first_token = Histogram(
            "mds_first_token_seconds",
            "From the request to its first token.",
            buckets=_SECONDS,
            **own,
        )
        self.duration = Histogram(
            "mds_request_seconds", "From the request to its end.", buckets=_SECONDS, **own
        )
        Gauge("mds_active_sequences", "Sequences that get tokens now.", **own).set_function(active)
        Gauge("mds_waiting_sequences", "Sequences that wait.", **own).set_function(waiting)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return bytes(generate_latest(self._registry))
