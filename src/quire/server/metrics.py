"""`Metrics`: what a server counts, for Prometheus, and the line about throughput in its log.

Of each model there are `ModelMetrics` (`model_metrics.py`); here stands what belongs to none, and what makes one answer
to a scrape of everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from quire.frontend.stats import FinishedRequest
from quire.server.model_metrics import ModelMetrics
from quire.step import SchedulerStats

# fmt: off
HTTP_BUCKETS = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LAG_BUCKETS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10)
# fmt: on
LAG_PERIOD = 0.25
REJECTIONS = ("queue_full", "rate_limit", "shutting_down", "loading")


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        self._rejected = Counter(
            "quire:rejected", "Requests turned away, by reason.", ("reason",), registry=self.registry
        )
        for reason in REJECTIONS:
            self._rejected.labels(reason)
        self._http_requests = Counter(
            "http_requests", "HTTP requests by route.", ("handler", "method", "status"), registry=self.registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the end of the answer.",
            ("handler", "method"),
            registry=self.registry,
            buckets=HTTP_BUCKETS,
        )
        self._http_open = Gauge("quire:http_requests_open", "Requests being worked on.", registry=self.registry)
        self._lag = Histogram(
            "quire:event_loop_lag_seconds",
            "How late the server's event loop comes to what is due.",
            registry=self.registry,
            buckets=LAG_BUCKETS,
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def model(self, name: str) -> ModelMetrics:
        """Return the metrics of a model, always the same ones for the same name, which is never a client's word.

        They are a listener for the model's `AsyncLLM`, and must be attached to it.
        """
        if name not in self._models:
            self._models[name] = ModelMetrics(name, REJECTIONS)
        return self._models[name]

    def on_rejected(self, reason: str, model: str | None = None) -> None:
        """Count a request that was turned away.

        Args:
            reason: one of a few words, such as those of `REJECTIONS`. model: which one it was for, if it came so far.
        """
        self._rejected.labels(reason).inc()
        if model is None and len(self._models) == 1:
            [model] = self._models
        if model in self._models:
            self._models[model].on_rejected(reason)

    async def watch_loop(self) -> None:
        """Measure how late the event loop is, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            self._lag.observe(max(loop.time() - due, 0.0))

    def on_open(self, count: int) -> None:
        """Note how many requests are being worked on, streams included."""
        self._http_open.set(count)

    def on_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request. `handler` is a route's template, never a path a client made up."""
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text for a scrape, in the format that suits the Accept header, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def describe(self) -> list[Metric]:
        """Tell the registry that names are only known at collection."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield what is known of the models, each metric once with the samples of all."""
        found: dict[str, Metric] = {}
        for model in self._models.values():
            for metric in model.collect():
                if metric.name in found:
                    found[metric.name].samples += metric.samples
                else:
                    found[metric.name] = metric
        return found.values()


class StatsLog:
    """Sums up what happened between two lines of the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._before = SchedulerStats()

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Add up a step."""
        self._prompt_tokens += num_prompt_tokens
        self._generation_tokens += num_generation_tokens

    def on_first_token(self, seconds: float) -> None:
        """Nothing to add up."""

    def on_next_token(self, seconds: float) -> None:
        """Nothing to add up."""

    def on_finished(self, request: FinishedRequest) -> None:
        """Nothing to add up."""

    def line(self, latest: SchedulerStats) -> str | None:
        """Return the line for the time since the last call, or None if nothing happened in it.

        Args:
            latest: the scheduler's newest numbers.
        """
        now = self._clock()
        seconds, self._since = max(now - self._since, 1e-9), now
        prompt, self._prompt_tokens = self._prompt_tokens, 0
        generation, self._generation_tokens = self._generation_tokens, 0
        before, self._before = self._before, latest
        if not prompt and not generation and not latest.num_running and not latest.num_waiting:
            return None
        queries = latest.prefix_cache_queries - before.prefix_cache_queries
        hits = latest.prefix_cache_hits - before.prefix_cache_hits
        step_seconds = latest.step_seconds - before.step_seconds
        gap = latest.host_gap_seconds - before.host_gap_seconds
        waits = f", host gap {100 * gap / step_seconds:.1f}%" if step_seconds > 0.0 else ""
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generation / seconds:.1f} tokens/s, "
            f"running {latest.num_running}, waiting {latest.num_waiting}, swapped {latest.num_swapped}, "
            f"KV cache {100 * latest.kv_cache_usage:.1f}%, host KV cache {100 * latest.host_cache_usage:.1f}%, "
            f"prefix cache hits {100 * hits / max(queries, 1):.1f}%{waits}"
        )
