"""Metrics for Prometheus, the line about throughput in the log, and the history that the playground plots.

`ModelMetrics` count for one model, under vLLM's names so that existing dashboards and autoscalers work; `Metrics` are
the server's. `ModelMetrics` is a `StatListener` of the model's `AsyncLLM`. Gauges and counters of the scheduler are
read from its latest snapshot at a scrape. All labels have few values, none from a client.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import FinishedRequest
from quire.server.fronts import Fronts
from quire.server.metric_sums import Snapshot, Sums, Totals, add_up
from quire.step import STATS_COUNTERS, SchedulerStats

REJECTIONS = ("queue_full", "rate_limit", "shutting_down", "loading")
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
STAGES = ("queued", "prefill", "decode")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level
ENGINE = "0"
LABELS = ("model_name", "engine")
LAG_PERIOD = 0.25
HISTORY_SECONDS = 300
PUBLISH_SECONDS = 5.0
PUBLISHED = "metrics/"  # and the row of the front


def _buckets(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


HTTP_BUCKETS = _buckets(".005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 30 60 120 300")
LAG_BUCKETS = _buckets(".001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 10")
FIRST_TOKEN_BUCKETS = _buckets(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
NEXT_TOKEN_BUCKETS = _buckets(".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
REQUEST_BUCKETS = _buckets(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP_TOKEN_BUCKETS = _buckets("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
N_BUCKETS = _buckets("1 2 5 10 20")
PREEMPTION_BUCKETS = _buckets("1 2 3 4 5 10 20")
# Attribute of `ModelMetrics`: name, help and buckets.
HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "first_token": ("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS),
    "next_token": ("inter_token_latency_seconds", "Token to token.", NEXT_TOKEN_BUCKETS),
    "per_token": (
        "request_time_per_output_token_seconds",
        "Mean time per token after the first.",
        NEXT_TOKEN_BUCKETS,
    ),
    "e2e": ("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS),
    "queue": ("request_queue_time_seconds", "Arrival to scheduling.", REQUEST_BUCKETS),
    "inference": ("request_inference_time_seconds", "Scheduling to last token.", REQUEST_BUCKETS),
    "prefill": ("request_prefill_time_seconds", "Scheduling to first token.", REQUEST_BUCKETS),
    "decode": ("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS),
    "step_tokens": ("iteration_tokens_total", "Tokens computed per step.", STEP_TOKEN_BUCKETS),
    "n": ("request_params_n", "Completions per request.", N_BUCKETS),
    "preemptions": ("request_num_preemptions", "Preemptions per request.", PREEMPTION_BUCKETS),
}
# The same for histograms whose last bucket is the context length.
LENGTH_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "prompt": ("request_prompt_tokens", "Prompt tokens per request."),
    "generation": ("request_generation_tokens", "Tokens generated per request."),
    "longest": ("request_max_num_generation_tokens", "Tokens of the longest completion per request."),
    "max_tokens": ("request_params_max_tokens", "max_tokens of requests."),
    "computed": ("request_prefill_kv_computed_tokens", "Prompt tokens computed rather than found in a cache."),
}


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        fronts: this process and the others that serve the same address; by default there are none.
    """

    def __init__(self, fronts: Fronts | None = None) -> None:
        self._fronts = fronts or Fronts()
        self._fronts.handlers |= {"metrics": self._answer, "log": self._log_shares}
        self._key = f"{PUBLISHED}{self._fronts.row}"
        replaced = self._fronts.published.get(self._key)  # of the front whose place this one takes
        self._replaced = Snapshot([], {}) if replaced is None else Snapshot.decode(replaced)
        self.registry = CollectorRegistry()
        self._models: dict[str, ModelMetrics] = {}
        self._rejected = Counter("quire:rejected", "Rejected requests, by reason.", ("reason",), registry=self.registry)
        for reason in REJECTIONS:
            self._rejected.labels(reason)
        self._http_requests = Counter(
            "http_requests", "HTTP requests by route.", ("handler", "method", "status"), registry=self.registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the end of the response.",
            ("handler", "method"),
            registry=self.registry,
            buckets=HTTP_BUCKETS,
        )
        self._http_open = Gauge("quire:http_requests_open", "Requests in progress.", registry=self.registry)
        self._lag = Histogram(
            "quire:event_loop_lag_seconds",
            "Delay of due callbacks in the server's event loop.",
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
            self._models[name] = ModelMetrics(name, REJECTIONS, self._replaced.totals.get(name))
        return self._models[name]

    def on_rejected(self, reason: str, model: str | None = None) -> None:
        """Count a rejected request.

        Args:
            reason: one of a few words, such as those of `REJECTIONS`. model: which one it was for, if it came so far.
        """
        self._rejected.labels(reason).inc()
        if model is None and len(self._models) == 1:
            [model] = self._models
        if model in self._models:
            self._models[model].on_rejected(reason)

    async def watch_loop(self) -> None:
        """Measure the lag of the event loop until cancelled."""
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

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the text for a scrape, in the format that suits the Accept header, and its content type.

        Of a front that does not react it has what that has published last. All that is shown has been published before,
        so that counters do not go back when a front dies.
        """
        await self._fronts.ask_others("metrics")
        snapshots = [self.publish()]
        for key, published in self._fronts.published.items():
            if key.startswith(PUBLISHED) and key != self._key:
                snapshot = Snapshot.decode(published)
                alive = int(key.removeprefix(PUBLISHED)) in self._fronts.rows
                snapshots.append(snapshot if alive else snapshot.counts())
        encoder, content_type = choose_encoder(accept)
        return encoder(Sums(add_up(snapshots))), content_type  # type: ignore[arg-type]

    def publish(self) -> Snapshot:
        """Give all fronts, and the one that may replace this one, the metrics of this front; return them."""
        own = Snapshot.of(self.registry.collect(), {name: model.totals() for name, model in self._models.items()})
        if self._replaced.families:
            own = Snapshot.of(add_up([own, self._replaced.own_counts()]), own.totals)
        self._fronts.publish(self._key, own.encode())
        return own

    async def log_lines(self) -> list[str]:
        """Return the lines about throughput since the last call, one for each model, of all fronts together."""
        others = await self._fronts.ask_others("log")
        lines = []
        for name, model in self._models.items():
            shares = [msgspec.convert(other[name], LogShare) for other in others.values() if name in other]
            stats, _ = max([model.latest(), *((share.stats, share.time) for share in shares)], key=lambda pair: pair[1])
            line = model.log.line(stats, [share.tokens for share in shares])
            if line is not None:
                lines.append(f"{name}: {line}" if len(self._models) > 1 else line)
        return lines

    async def _log_shares(self, value: Any) -> Any:
        """Return what the front that writes the lines needs of this one."""
        shares = {}
        for name, model in self._models.items():
            stats, time_of_stats = model.latest()
            shares[name] = LogShare(model.log.take(stats), stats, time_of_stats)
        return msgspec.to_builtins(shares)

    async def publish_often(self) -> None:
        """Publish every `PUBLISH_SECONDS`, until cancelled: so much is lost at most when this process dies."""
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            self.publish()

    async def _answer(self, value: Any) -> None:
        """Publish, because another front needs it: what is published arrives there before the answer."""
        self.publish()

    def describe(self) -> list[Metric]:
        """Return nothing: the registry learns the names at collection."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of models, each metric once with the samples of all models."""
        counts = self._fronts.published.get("supervisor", {})
        text = "Processes that serve HTTP."
        yield GaugeMetricFamily("quire:fronts_serving", text, counts.get("fronts_serving", 1))
        text = "Processes that served HTTP and were replaced."
        yield CounterMetricFamily("quire:front_restarts", text, counts.get("front_restarts", 0))
        connections = self._fronts.num_connections
        if connections is not None:
            yield GaugeMetricFamily("quire:connections_open", "Open connections, also idle ones.", connections)
        found: dict[str, Metric] = {}
        for model in self._models.values():
            for metric in model.collect():
                if metric.name in found:
                    found[metric.name].samples += metric.samples
                else:
                    found[metric.name] = metric
        yield from found.values()


class ModelMetrics:
    """The metrics of one model.

    Args:
        model_name: value of the label. rejections: reasons of rejections that are there from the beginning, with zero.
        known: what the front whose place this one takes had heard of the model's engines.

    Attributes:
        history: for the playground. log: for the line about throughput.
    """

    def __init__(self, model_name: str, rejections: Iterable[str] = (), known: Totals | None = None) -> None:
        self.model_name = model_name
        self.history = History()
        self.log = StatsLog()
        self._labels = (model_name, ENGINE)
        self._metrics: list[MetricWrapperBase] = []
        self._llm: AsyncLLM | None = None
        # Restarts and quarantined requests of the engines that were attached before.
        self._before = (0 if known is None else known.num_restarts, 0)
        self._total = _Total() if known is None else _Total(known.before, known.latest)
        self._histograms = {key: self._histogram(*item) for key, item in HISTOGRAMS.items()}
        self._lengths: dict[str, Histogram] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._corrupted = self._counter("corrupted_requests", "Requests that ended because of non-finite logits.")
        self._success = self._labelled("vllm:request_success", "Finished requests.", "finished_reason", FINISH_REASONS)
        self._aborted = self._labelled("quire:requests_aborted", "Aborted requests, by stage.", "stage", STAGES)
        self._rejections = self._labelled("vllm:admission_rejections", "Rejected requests.", "reason", rejections)

    def attach(self, llm: AsyncLLM | None) -> None:
        """Take the scheduler's gauges and counters from this engine from now on; from none while there is none."""
        if self._llm is not None and self._llm is not llm:
            restarts, poison = self._before
            self._before = (restarts + self._llm.num_restarts, poison + self._llm.num_poison_requests)
        self._llm = llm

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, LABELS, registry=None, buckets=tuple(buckets))
        self._metrics.append(metric)
        return metric.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"vllm:{name}", text, LABELS, registry=None)
        self._metrics.append(metric)
        return metric.labels(*self._labels)

    def _labelled(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """Return a counter with another label, of which these values are there from the beginning."""
        metric = Counter(name, text, (*LABELS, label), registry=None)
        self._metrics.append(metric)
        for value in values:
            metric.labels(*self._labels, value)
        return metric

    # ---- StatListener ----

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count the tokens of a step."""
        self.history.on_step(stats, num_prompt_tokens, num_generation_tokens)
        self.log.add(num_prompt_tokens, num_generation_tokens)
        if num_prompt_tokens:
            self._prompt_tokens.inc(num_prompt_tokens)
        if num_generation_tokens:
            self._generation_tokens.inc(num_generation_tokens)
        self._total.take(stats)
        if stats.num_new_tokens:
            self._histograms["step_tokens"].observe(stats.num_new_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Count the time to a first token."""
        self.history.on_first_token(seconds)
        self._histograms["first_token"].observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        """Count the time between two tokens."""
        self.history.on_next_token(seconds)
        self._histograms["next_token"].observe(seconds)

    def on_finished(self, request: FinishedRequest) -> None:
        """Count a finished request, also one that was aborted."""
        reason = request.finish_reason if request.finish_reason in FINISH_REASONS else "error"
        self._success.labels(*self._labels, reason).inc()
        if request.finish_reason == "error" and not request.refused:
            self._corrupted.inc()
        if request.finish_reason == "abort":
            self._aborted.labels(*self._labels, request.stage).inc()
        self._cached_tokens.inc(request.num_cached_tokens)
        times = request.metrics
        values: dict[str, float | None] = {
            "n": request.n,
            "preemptions": times.num_preemptions,
            "e2e": times.e2e_seconds,
            "queue": times.queue_seconds,
            "inference": times.inference_seconds,
            "prefill": times.prefill_seconds,
            "decode": times.decode_seconds,
            "per_token": times.mean_token_seconds(request.num_generation_tokens, request.num_sequences),
        }
        for key, value in values.items():
            if value is not None:
                self._histograms[key].observe(value)
        lengths = {
            "prompt": request.num_prompt_tokens,
            "generation": request.num_generation_tokens,
            "longest": request.max_generation_tokens,
            "max_tokens": request.max_tokens,
            "computed": request.num_prompt_tokens - request.num_cached_tokens,
        }
        for key, histogram in self._length_histograms().items():
            histogram.observe(lengths[key])

    def _length_histograms(self) -> dict[str, Histogram]:
        """Make them with the first finished request: only then the context length, their last bucket, is known."""
        if not self._lengths:
            buckets = one_two_five(self._llm.max_model_len if self._llm is not None else 131072)
            self._lengths = {key: self._histogram(*item, buckets) for key, item in LENGTH_HISTOGRAMS.items()}
        return self._lengths

    # ---- counted by the server ----

    def on_rejected(self, reason: str) -> None:
        """Count a rejected request; `reason` is one of a few words, never a client's."""
        self._rejections.labels(*self._labels, reason).inc()

    # ---- a scrape ----

    def latest(self) -> tuple[SchedulerStats, float]:
        """Return the engine's newest numbers, and when they came [monotonic seconds]."""
        return (SchedulerStats(), 0.0) if self._llm is None else (self._llm.stats, self._llm.stats_time)

    def totals(self) -> Totals:
        """Return what is known of the model's engines."""
        restarts = self._before[0] + (0 if self._llm is None else self._llm.num_restarts)
        return Totals(self._total.before, self._total.latest, restarts, self.latest()[1])

    def collect(self) -> Iterable[Metric]:
        """Yield everything, as prometheus_client's collectors do."""
        for metric in list(self._metrics):
            yield from metric.collect()
        llm = self._llm
        yield from self._health(llm)
        if llm is None or not llm.ready:
            yield from self._counters()
            return
        self._total.take(llm.stats)
        yield from self._gauges(llm.stats)
        yield from self._counters()
        yield self._cache_info(llm)

    def _gauge(self, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        """Return a gauge with one value, or one for each value of a label."""
        return self._family(GaugeMetricFamily, name, text, values, label)

    def _count(self, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        """As `_gauge`, a counter."""
        return self._family(CounterMetricFamily, name, text, values, label)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        values: float | Mapping[str, float],
        label: str,
    ) -> Metric:
        family = kind(name, text, labels=(*LABELS, label) if label else LABELS)
        if isinstance(values, Mapping):
            for key, value in values.items():
                family.add_metric((*self._labels, key), value)
        else:
            family.add_metric(self._labels, values)
        return family

    def _info(self, name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
        """Return an info gauge: its labels are its content."""
        gauge = GaugeMetricFamily(name, text, labels=(*LABELS, *labels))
        gauge.add_metric((*self._labels, *labels.values()), value)
        return gauge

    def _health(self, llm: AsyncLLM | None) -> Iterator[Metric]:
        gauge = self._gauge
        up = llm is not None and llm.ready and not llm.recovering
        yield gauge("quire:engine_up", "1 while an engine accepts requests.", up)
        restarts, poison = self._before
        if llm is not None:
            restarts, poison = restarts + llm.num_restarts, poison + llm.num_poison_requests
            text = "1 while a dead engine is being replaced."
            yield gauge("quire:engine_recovering", text, llm.recovering)
            text = "1 once an engine has died and will not be replaced."
            yield gauge("quire:engine_failed", text, llm.errored)
            yield gauge("quire:engine_stalled", "1 while the engine is silent without a reason.", llm.stalled)
            text = "Seconds of unexplained engine silence; 0 while the engine's work explains it."
            yield gauge("quire:engine_heartbeat_age_seconds", text, llm.silent_seconds)
            if llm.last_recovery_seconds is not None:
                text = "How long the last replacement of an engine took."
                yield gauge("quire:engine_last_recovery_seconds", text, llm.last_recovery_seconds)
        yield self._count("quire:engine_restarts", "Number of replaced engines.", restarts)
        yield self._count("quire:requests_condemned", "Requests that killed engines.", poison)

    def _gauges(self, stats: SchedulerStats) -> Iterator[Metric]:
        gauge = self._gauge
        yield gauge("vllm:num_requests_running", "Requests in the batch.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting)
        text = "Of those waiting, requests swapped out to the host."
        yield gauge("vllm:num_requests_swapped", text, stats.num_swapped)
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage)
        text = "Share of the host's blocks that are swapped out, 0 to 1."
        yield gauge("vllm:cpu_cache_usage_perc", text, stats.host_cache_usage)
        tiers = {"device": stats.num_blocks, "host": stats.num_host_blocks, "disk": stats.num_stored_blocks}
        yield gauge(
            "quire:kv_blocks", "KV blocks: all of the device's and the host's, those stored on disk.", tiers, "tier"
        )
        text = "KV blocks that no request holds, including cached ones."
        free = {"device": stats.num_free_blocks, "host": stats.num_free_host_blocks}
        yield gauge("quire:kv_blocks_free", text, free, "tier")
        text = (
            "Of the device's KV blocks those with layers on the host (kv-resident-layers): held by requests, and free."
        )
        thin = {"used": stats.num_used_layerwise_blocks, "free": stats.num_free_layerwise_blocks}
        yield gauge("quire:kv_blocks_thin", text, thin, "state")
        text = "Waiting requests: for capacity, or (deferred) for the compilation of a grammar."
        waiting = {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}
        yield gauge("vllm:num_requests_waiting_by_reason", text, waiting, "reason")
        if self._llm is not None and self._llm.config.lora.enable_lora:
            text = "Adapters of running and waiting requests; the value is the time."
            labels = {
                "max_lora": str(self._llm.config.lora.max_loras),
                "waiting_lora_adapters": ",".join(stats.waiting_adapters),
                "running_lora_adapters": ",".join(stats.running_adapters),
            }
            yield self._info("vllm:lora_requests_info", text, labels, time.time())
        sleep_level = 0 if self._llm is None else self._llm.sleep_level
        states = {state: float(level == sleep_level) for level, state in enumerate(SLEEP_STATES)}
        yield gauge("vllm:engine_sleep_state", "1 for the current state of the engine.", states, "sleep_state")

    def _counters(self) -> Iterator[Metric]:
        count, total = self._count, self._total.values()
        queries, hits = total["prefix_cache_queries"], total["prefix_cache_hits"]
        host, disk = total["host_cache_hits"], total["disk_cache_hits"]
        device = max(hits - host - disk, 0)
        yield count("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries)
        yield count("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits)
        text = "Prompt tokens that the device's prefix cache did not have."
        yield count("vllm:external_prefix_cache_queries", text, queries - hits + host + disk)
        text = "Tokens loaded from the host or from disk."
        yield count("vllm:external_prefix_cache_hits", text, host + disk)
        yield count("vllm:num_preemptions", "Preemptions so far.", total["num_preemptions"])
        text = "Prompt tokens admitted, by where their KV comes from."
        sources = {"local_compute": queries - hits, "local_cache_hit": device, "external_kv_transfer": host + disk}
        yield count("vllm:prompt_tokens_by_source", text, sources, "source")
        text = "Prompt tokens found in the prefix cache at admission, by tier."
        tiers = {"device": device, "host": host, "disk": disk}
        yield count("vllm:prompt_tokens_cached_by_source", text, tiers, "source")
        tiers = {"host": host, "disk": disk}
        yield count("quire:prefix_cache_hits_by_tier", "Tokens loaded from the tier.", tiers, "tier")
        swapped = total["num_swapped_out"]
        kinds = {"recompute": total["num_preemptions"] - swapped, "swap": swapped}
        yield count("quire:preemptions", "Preemptions, by mode.", kinds, "kind")
        yield count("quire:engine_steps", "Steps of the engine.", total["num_steps"])
        text = "Time from step to step while there was work."
        yield count("quire:step_seconds", text, total["step_seconds"])
        text = "Of quire:step_seconds, time in which the device waited for the host."
        yield count("quire:step_host_gap_seconds", text, total["host_gap_seconds"])
        text = "Tokens discarded because their sequence had already ended."
        yield count("quire:discarded_tokens", text, total["num_discarded_tokens"])

    def _cache_info(self, llm: AsyncLLM) -> Metric:
        cache = llm.config.cache
        prefixes = cache.enable_prefix_caching is not False and not llm.model_info.keeps_states
        labels = {
            "block_size": str(cache.block_size),
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": str(prefixes),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(llm.stats.num_blocks),
        }
        return self._info("vllm:cache_config_info", "KV cache settings.", labels, 1)


def one_two_five(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    buckets = []
    scale = 1
    while scale <= most:
        buckets += [factor * scale for factor in (1, 2, 5) if factor * scale <= most]
        scale *= 10
    return tuple(buckets)


class _Total:
    """The counters of all engines that a model has had, one after the other; each began at zero."""

    def __init__(self, before: dict[str, float] | None = None, latest: SchedulerStats | None = None) -> None:
        self.before = dict.fromkeys(STATS_COUNTERS, 0.0) if before is None else before
        self.latest = SchedulerStats() if latest is None else latest

    def take(self, stats: SchedulerStats) -> None:
        """Take over a newer snapshot. One without steps may only mean that none has come so far."""
        if stats is self.latest or stats.num_steps < min(self.latest.num_steps, 1):
            return
        latest, self.latest = self.latest, stats
        if stats.num_steps < latest.num_steps:  # another engine's
            for name in STATS_COUNTERS:
                self.before[name] += getattr(latest, name)

    def values(self) -> dict[str, float]:
        """Return the sums."""
        return {name: before + getattr(self.latest, name) for name, before in self.before.items()}


class LogShare(msgspec.Struct):
    """What one front contributes to a line: tokens as `StatsLog.take` returns them, and the engine's numbers."""

    tokens: tuple[int, int]
    stats: SchedulerStats
    time: float


class StatsLog:
    """Statistics between two lines of the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._before = SchedulerStats()

    def add(self, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Add up a step."""
        self._prompt_tokens += num_prompt_tokens
        self._generation_tokens += num_generation_tokens

    def take(self, latest: SchedulerStats) -> tuple[int, int]:
        """Return the tokens of prompts and those generated since the last call. `latest`: as in `line`."""
        self._since, self._before = self._clock(), latest
        tokens = (self._prompt_tokens, self._generation_tokens)
        self._prompt_tokens = self._generation_tokens = 0
        return tokens

    def line(self, latest: SchedulerStats, others: Iterable[tuple[int, int]] = ()) -> str | None:
        """Return the line for the time since the last call, or None if nothing happened in it.

        Args:
            latest: the scheduler's newest numbers. others: tokens of other fronts, as `take` has returned them there.
        """
        since, before = self._since, self._before
        prompt, generation = map(sum, zip(self.take(latest), *others, strict=True))
        seconds = max(self._since - since, 1e-9)
        if latest.num_steps < before.num_steps:
            before = SchedulerStats()  # of an engine that was replaced
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


class Second(msgspec.Struct, array_like=True):
    """One second.

    `number` counts seconds of the listener's clock. Tokens are those of the prompts that were completed and those
    generated; `first` and `next` the times to first tokens and between tokens (how many, their sum, the longest) [s];
    then the scheduler's state at its end, and the tokens looked up and found in the prefix cache since the engine's
    start.
    """

    number: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_first: int = 0
    sum_first: float = 0.0
    max_first: float = 0.0
    num_next: int = 0
    sum_next: float = 0.0
    max_next: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0


def merged(histories: Sequence[Sequence[Second]]) -> list[Second]:
    """Return what several fronts have seen in each second, in order; of the engine's state they may differ."""
    if len(histories) == 1:
        return list(histories[0])
    found: dict[int, Second] = {}
    for second in [second for history in histories for second in history]:
        known = found.setdefault(second.number, Second(second.number))
        for name in SUMMED_IN_SECOND:
            setattr(known, name, getattr(known, name) + getattr(second, name))
        for name in LARGEST_IN_SECOND:
            setattr(known, name, max(getattr(known, name), getattr(second, name)))
    return [found[number] for number in sorted(found)]


SUMMED_IN_SECOND = ("prompt_tokens", "generated_tokens", "num_first", "sum_first", "num_next", "sum_next")
LARGEST_IN_SECOND = tuple(
    name for name in Second.__struct_fields__ if name not in SUMMED_IN_SECOND and name != "number"
)


class History:
    """What happened in each of the last `HISTORY_SECONDS` seconds of one model, in bounded memory.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[Second] = deque(maxlen=HISTORY_SECONDS)

    def now(self) -> int:
        """Return the number of this second."""
        return int(self._clock())

    def _latest(self) -> Second:
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(Second(number))
        return self._seconds[-1]

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Add up a step."""
        second = self._latest()
        second.prompt_tokens += num_prompt_tokens
        second.generated_tokens += num_generation_tokens
        second.num_running, second.num_waiting = stats.num_running, stats.num_waiting
        second.kv_usage = round(stats.kv_cache_usage, 4)
        second.cache_queries, second.cache_hits = stats.prefix_cache_queries, stats.prefix_cache_hits

    def on_first_token(self, seconds: float) -> None:
        """Note the time to a first token."""
        second = self._latest()
        second.num_first += 1
        second.sum_first += seconds
        second.max_first = max(second.max_first, seconds)

    def on_next_token(self, seconds: float) -> None:
        """Note the time between two tokens."""
        second = self._latest()
        second.num_next += 1
        second.sum_next += seconds
        second.max_next = max(second.max_next, seconds)

    def since(self, number: int) -> list[Second]:
        """Return the seconds from `number` on in which something happened; the last one may not be over."""
        oldest = max(number, self.now() - HISTORY_SECONDS)
        return [second for second in self._seconds if second.number >= oldest]
