"""Prometheus metrics under vLLM's names, so that existing dashboards and autoscalers work; and the line in the log.

`Metrics` and `StatsLog` are `StatListener`s: `AsyncLLM` tells them of steps, tokens and finished requests. Gauges and
counters of the scheduler are taken from its latest snapshot when somebody asks. All labels have few values: nothing a
client sends becomes one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from quire.frontend.stats import FinishedRequest
from quire.step import SchedulerStats

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

ENGINE = "0"
LABELS = ("model_name", "engine")
# fmt: off
FIRST_TOKEN_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
NEXT_TOKEN_BUCKETS = (
    .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
REQUEST_BUCKETS = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
HTTP_BUCKETS = (.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300)
# fmt: on
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
REJECTIONS = ("queue_full", "shutting_down", "loading")


def one_two_five(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    buckets = []
    scale = 1
    while scale <= most:
        buckets += [factor * scale for factor in (1, 2, 5) if factor * scale <= most]
        scale *= 10
    return tuple(buckets)


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        model_name: value of the label.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._llm: AsyncLLM | None = None
        self._num_scheduled = 0
        self._lengths: _LengthHistograms | None = None
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS
        )
        self._next_token = self._histogram("inter_token_latency_seconds", "Token to token.", NEXT_TOKEN_BUCKETS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", NEXT_TOKEN_BUCKETS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to scheduling.", REQUEST_BUCKETS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Scheduling to last token.", REQUEST_BUCKETS
        )
        self._prefill = self._histogram("request_prefill_time_seconds", "Scheduling to first token.", REQUEST_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed per step.", STEP_TOKEN_BUCKETS)
        self._n = self._histogram("request_params_n", "Completions per request.", N_BUCKETS)
        self._preemptions = self._histogram("request_num_preemptions", "Preemptions per request.", PREEMPTION_BUCKETS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._corrupted = self._counter("corrupted_requests", "Requests that ended with numbers that are not finite.")
        self._success = self._counter_per("request_success", "Requests ended.", "finished_reason", FINISH_REASONS)
        self._rejections = self._counter_per("admission_rejections", "Requests not accepted.", "reason", REJECTIONS)
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
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def attach(self, llm: AsyncLLM) -> None:
        """Take the scheduler's gauges and counters from this engine."""
        self._llm = llm

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, LABELS, registry=self.registry, buckets=tuple(buckets))
        return metric.labels(self._model_name, ENGINE)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, LABELS, registry=self.registry).labels(self._model_name, ENGINE)

    def _counter_per(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        metric = Counter(f"vllm:{name}", text, (*LABELS, label), registry=self.registry)
        return {value: metric.labels(self._model_name, ENGINE, value) for value in values}

    # StatListener

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count the tokens of a step."""
        if num_prompt_tokens:
            self._prompt_tokens.inc(num_prompt_tokens)
        if num_generation_tokens:
            self._generation_tokens.inc(num_generation_tokens)
        scheduled = stats.num_scheduled_tokens - self._num_scheduled
        if scheduled > 0:
            self._step_tokens.observe(scheduled)
            self._num_scheduled = stats.num_scheduled_tokens

    def on_first_token(self, seconds: float) -> None:
        """Note the time to a first token."""
        self._first_token.observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        """Note the time between two tokens."""
        self._next_token.observe(seconds)

    def on_finished(self, request: FinishedRequest) -> None:
        """Note a finished request, also one that was aborted."""
        self._success.get(request.finish_reason, self._success["error"]).inc()
        if request.finish_reason == "error" and not request.refused:
            self._corrupted.inc()
        self._cached_tokens.inc(request.num_cached_tokens)
        self._n.observe(request.n)
        self._preemptions.observe(request.num_preemptions)
        self._length_histograms().observe(request)
        self._e2e.observe(request.e2e_seconds)
        for histogram, seconds in (
            (self._queue, request.queue_seconds),
            (self._inference, request.inference_seconds),
            (self._prefill, request.prefill_seconds),
            (self._decode, request.decode_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if request.decode_seconds is not None and request.num_generation_tokens > request.num_sequences:
            per_sequence = request.num_generation_tokens / request.num_sequences
            self._per_token.observe(request.decode_seconds / (per_sequence - 1))

    def _length_histograms(self) -> _LengthHistograms:
        """Make them with the first finished request: only then the context length, their last bucket, is known."""
        if self._lengths is None:
            most = self._llm.max_model_len if self._llm is not None else 131072
            self._lengths = _LengthHistograms(self._histogram, one_two_five(most))
        return self._lengths

    # The HTTP side

    def on_rejected(self, reason: str) -> None:
        """Count a request that was turned away: one of `REJECTIONS`."""
        self._rejections[reason].inc()

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
        """Yield what is read off the scheduler at the moment of a scrape."""
        if self._llm is None or not self._llm.ready:
            return
        stats = self._llm.stats
        labels = (self._model_name, ENGINE)
        gauges = {
            "num_requests_running": ("Requests in the batch.", stats.num_running),
            "num_requests_waiting": ("Requests waiting to be scheduled.", stats.num_waiting),
            "num_requests_swapped": ("Of those waiting, requests swapped out to the host.", stats.num_swapped),
            "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage),
            "cpu_cache_usage_perc": (
                "Share of the host's blocks that are swapped out, 0 to 1.",
                stats.host_cache_usage,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        blocks = GaugeMetricFamily(
            "quire:kv_blocks",
            "KV blocks: all of the device's and the host's, those stored on disk.",
            labels=(*LABELS, "tier"),
        )
        for tier, count in (
            ("device", stats.num_blocks),
            ("host", stats.num_host_blocks),
            ("disk", stats.num_disk_blocks),
        ):
            blocks.add_metric((*labels, tier), count)
        yield blocks
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Requests waiting, by reason.", labels=(*LABELS, "reason")
        )
        waiting.add_metric((*labels, "capacity"), stats.num_waiting)
        waiting.add_metric((*labels, "deferred"), 0)
        yield waiting
        yield from self._counters(stats)
        yield self._cache_info(self._llm.config, stats)

    def _counters(self, stats: SchedulerStats) -> Iterable[Metric]:
        labels = (self._model_name, ENGINE)
        external_hits = stats.host_cache_hits + stats.disk_cache_hits
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "external_prefix_cache_queries": (
                "Prompt tokens that the device's prefix cache did not have.",
                stats.prefix_cache_queries - stats.prefix_cache_hits + external_hits,
            ),
            "external_prefix_cache_hits": ("Tokens brought back from the host or from disk.", external_hits),
            "num_preemptions": ("Preemptions so far.", stats.num_preemptions),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            counter.add_metric(labels, value)
            yield counter
        by_tier = {"host": stats.host_cache_hits, "disk": stats.disk_cache_hits}
        yield self._counter_by("prefix_cache_hits_by_tier", "Tokens brought back, by tier.", "tier", by_tier)
        by_kind = {
            "recompute": stats.num_preemptions - stats.num_swapped_out,
            "swap": stats.num_swapped_out,
        }
        yield self._counter_by("preemptions", "Preemptions, by what became of the KV.", "kind", by_kind)

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        counter = CounterMetricFamily(f"quire:{name}", text, labels=(*LABELS, label))
        for kind, value in values.items():
            counter.add_metric((self._model_name, ENGINE, kind), value)
        return counter

    def _cache_info(self, config: EngineConfig, stats: SchedulerStats) -> Metric:
        info = {
            "block_size": str(config.cache.block_size),
            "cache_dtype": config.cache.kv_cache_dtype,
            "enable_prefix_caching": str(config.cache.enable_prefix_caching),
            "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
            "num_gpu_blocks": str(stats.num_blocks),
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "KV cache settings.", labels=("engine", *info))
        gauge.add_metric((ENGINE, *info.values()), 1)
        return gauge


class _LengthHistograms:
    """Histograms whose buckets end at the context length."""

    def __init__(self, make: Callable[[str, str, Iterable[float]], Histogram], buckets: tuple[int, ...]) -> None:
        self.prompt = make("request_prompt_tokens", "Prompt tokens per request.", buckets)
        self.generation = make("request_generation_tokens", "Tokens generated per request.", buckets)
        self.max_tokens = make("request_params_max_tokens", "max_tokens of requests.", buckets)
        self.computed = make(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed rather than found in a cache.", buckets
        )

    def observe(self, request: FinishedRequest) -> None:
        self.prompt.observe(request.num_prompt_tokens)
        self.generation.observe(request.num_generation_tokens)
        self.max_tokens.observe(request.max_tokens)
        self.computed.observe(request.num_prompt_tokens - request.num_cached_tokens)


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
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generation / seconds:.1f} tokens/s, "
            f"running {latest.num_running}, waiting {latest.num_waiting}, swapped {latest.num_swapped}, "
            f"KV cache {100 * latest.kv_cache_usage:.1f}%, host KV cache {100 * latest.host_cache_usage:.1f}%, "
            f"prefix cache hits {100 * hits / max(queries, 1):.1f}%"
        )
