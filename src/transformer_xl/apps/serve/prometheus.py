"""What Prometheus is told."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


class Metrics:
    """The numbers of one server.

    Args:
        gauges: What is asked for when Prometheus asks, by name: what it is, and the number.
    """

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "txl_requests", "Requests.", ["method", "path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "txl_request_seconds",
            "Seconds from a request to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "txl_first_token_seconds",
            "Seconds from a request to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.prompt_tokens = Counter("txl_prompt_tokens", "Tokens read.", registry=registry)
        self.completion_tokens = Counter("txl_drawn_tokens", "Tokens drawn.", registry=registry)
        self.batch = Histogram(
            "txl_batch_texts",
            "Texts written side by side in a step.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self.save_seconds = Histogram(
            "txl_session_save_seconds",
            "Seconds to save a session.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.engine_seconds = Gauge(
            "txl_engine_seconds", "Processor time of the engine's thread.", registry=registry
        )
        for name, (about, value) in gauges.items():
            Gauge(name, about, registry=registry).set_function(value)

    def stepped(self, batch: int) -> None:
        """Count a step of so many texts, in the thread that makes it."""
        self.batch.observe(batch)
        self.engine_seconds.set(time.thread_time())

    def page(self) -> bytes:
        """Return all numbers in the text format."""
        return generate_latest(self._registry)
