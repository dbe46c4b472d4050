"""`Snapshot`: the metrics of one front at one moment; `add_up`: those of several as the metrics of one server.

Fronts publish their snapshots through the supervisor. The one that replaces a front goes on from the last one of that.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import msgspec
from prometheus_client.core import Metric

from quire.step import SchedulerStats

Labels = dict[str, str]


class Rule(Enum):
    """What becomes of a metric's values in several fronts."""

    SUM = "sum"
    LARGEST = "largest"
    SMALLEST = "smallest"
    NEWEST = "newest"  # the value of the front that has heard from the model's engine last


# What an engine has counted, as far as a front has heard of it; no front counts these.
OF_ENGINES = frozenset(
    {
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:external_prefix_cache_queries",
        "vllm:external_prefix_cache_hits",
        "vllm:num_preemptions",
        "vllm:prompt_tokens_by_source",
        "vllm:prompt_tokens_cached_by_source",
        "quire:prefix_cache_hits_by_tier",
        "quire:preemptions",
        "quire:engine_steps",
        "quire:step_seconds",
        "quire:step_host_gap_seconds",
        "quire:discarded_tokens",
        "quire:engine_restarts",
    }
)
# Of metrics that are not named here, counters and histograms are added up, and of gauges the newest counts.
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(OF_ENGINES, Rule.LARGEST),
    "quire:engine_up": Rule.SMALLEST,
    "quire:engine_recovering": Rule.LARGEST,
    "quire:engine_failed": Rule.LARGEST,
    "quire:engine_stalled": Rule.LARGEST,
    "quire:engine_heartbeat_age_seconds": Rule.LARGEST,
    "quire:engine_last_recovery_seconds": Rule.LARGEST,
    "quire:connections_open": Rule.LARGEST,
    "quire:fronts_serving": Rule.LARGEST,
    "quire:front_restarts": Rule.LARGEST,
    "quire:http_requests_open": Rule.SUM,
    "process_virtual_memory_bytes": Rule.SUM,
    "process_resident_memory_bytes": Rule.SUM,
    "process_open_fds": Rule.SUM,
    "process_max_fds": Rule.SMALLEST,
    "process_start_time_seconds": Rule.SMALLEST,
}


class Totals(msgspec.Struct, array_like=True):
    """What a front has heard of the engines of one model.

    `before`: the counters of those that were replaced, `num_restarts` how many; `latest` the numbers of the present
    one, and `time` when they came [monotonic seconds].
    """

    before: dict[str, float]
    latest: SchedulerStats
    num_restarts: int
    time: float


class Family(msgspec.Struct, array_like=True):
    """One metric; a sample is a name, labels, and a value."""

    name: str
    kind: str
    text: str
    samples: list[tuple[str, Labels, float]]

    @property
    def is_count(self) -> bool:
        """Whether it only ever grows."""
        return self.kind in ("counter", "histogram")

    @property
    def rule(self) -> Rule:
        """What becomes of its values in several fronts."""
        return RULES.get(self.name, Rule.SUM if self.is_count else Rule.NEWEST)


class Snapshot(msgspec.Struct, array_like=True):
    """The metrics of one front; `totals` by the model's name."""

    families: list[Family]
    totals: dict[str, Totals]

    @classmethod
    def of(cls, metrics: Iterable[Metric], totals: dict[str, Totals]) -> Snapshot:
        """Return the snapshot of a front's own metrics."""
        families = [
            Family(
                metric.name,
                metric.type,
                metric.documentation,
                [(sample.name, sample.labels, float(sample.value)) for sample in metric.samples],
            )
            for metric in metrics
        ]
        return cls(families, totals)

    @classmethod
    def decode(cls, text: str) -> Snapshot:
        """Return the snapshot that `encode` returned as a text."""
        return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=cls)

    def encode(self) -> str:
        """Return it as a short text."""
        return base64.b64encode(zlib.compress(msgspec.msgpack.encode(self), 1)).decode()

    def counts(self) -> Snapshot:
        """Return what of it still counts once the front is gone."""
        return Snapshot([family for family in self.families if family.is_count], {})

    def own_counts(self) -> Snapshot:
        """Return what the front itself has counted; another one that takes its place goes on from there."""
        return Snapshot([family for family in self.counts().families if family.name not in OF_ENGINES], {})


def add_up(snapshots: Sequence[Snapshot]) -> list[Metric]:
    """Return the metrics of several fronts together."""
    newest: dict[str, int] = {}
    for number, snapshot in enumerate(snapshots):
        for model, totals in snapshot.totals.items():
            if model not in newest or totals.time > snapshots[newest[model]].totals[model].time:
                newest[model] = number
    merged: dict[str, tuple[Family, dict[tuple[str, frozenset[tuple[str, str]]], tuple[Labels, float]]]] = {}
    for number, snapshot in enumerate(snapshots):
        for family in snapshot.families:
            _, values = merged.setdefault(family.name, (family, {}))
            for name, labels, value in family.samples:
                if family.rule is Rule.NEWEST and newest.get(labels.get("model_name", ""), number) != number:
                    continue
                key = (name, frozenset(labels.items()))
                known = values.get(key)
                values[key] = labels, value if known is None else _combined(_rule_of(family, name), known[1], value)
    metrics = []
    for family, values in merged.values():
        metric = Metric(family.name, family.text, family.kind)
        for (name, _), (labels, value) in values.items():
            metric.add_sample(name, labels, value)
        metrics.append(metric)
    return metrics


def _rule_of(family: Family, sample: str) -> Rule:
    return Rule.SMALLEST if sample.endswith("_created") else family.rule


def _combined(rule: Rule, one: float, other: float) -> float:
    match rule:
        case Rule.SUM:
            return one + other
        case Rule.LARGEST:
            return max(one, other)
        case Rule.SMALLEST:
            return min(one, other)
        case Rule.NEWEST:
            return other


class Sums:
    """What prometheus_client's encoders take for a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics
