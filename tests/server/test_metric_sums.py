"""Metrics of several fronts as those of one server, and of a front that takes another's place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.fronts import Fronts
from quire.server.metric_sums import OF_ENGINES, Snapshot
from quire.server.metrics import Metrics, Second, merged
from quire.step import SchedulerStats
from tests.server.test_limits import finished_request


class SharedFronts(Fronts):
    """Fronts in one process; `silent` ones do not answer."""

    def __init__(self, row: int, published: dict[str, Any], rows: list[int], fronts: dict[int, SharedFronts]) -> None:
        super().__init__(row)
        self.published, self.rows = published, rows
        self.silent = False
        self._all = fronts
        fronts[row] = self

    async def ask(self, row: int, method: str, value: Any = None, *, seconds: float | None = None) -> Any:
        other = self._all[row]
        if other.silent:
            return await super().ask(row, method, value)
        return await other.handlers[method](value)


class World:
    """Fronts with metrics of their own."""

    def __init__(self, count: int) -> None:
        self.published: dict[str, Any] = {}
        self.rows = list(range(count))
        self._all: dict[int, SharedFronts] = {}
        self.metrics = [self.start(row) for row in self.rows]

    def start(self, row: int) -> Metrics:
        """Return the metrics of a new front."""
        return Metrics(SharedFronts(row, self.published, self.rows, self._all))

    def silence(self, row: int) -> None:
        """Let a front not answer any more."""
        self._all[row].silent = True


def values(metrics: Metrics) -> dict[str, float]:
    """Return the sums of a scrape's samples by name."""
    text = asyncio.run(metrics.render(""))[0].decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_counts_of_fronts_are_added_up_and_those_of_engines_are_not() -> None:
    world = World(2)
    one, two = world.metrics
    one.model("m").on_step(SchedulerStats(num_steps=5, num_preemptions=2, num_new_tokens=9), 4, 1)
    two.model("m").on_step(SchedulerStats(num_steps=7, num_preemptions=3, num_new_tokens=0), 0, 2)
    one.model("m").on_finished(finished_request())
    one.on_open(2)
    two.on_open(3)
    found = values(one)
    assert found == pytest.approx(values(two) | {name: found[name] for name in found if name.startswith("process_")})
    assert (found["vllm:prompt_tokens_total"], found["vllm:generation_tokens_total"]) == (4, 3)
    assert (found["quire:engine_steps_total"], found["vllm:num_preemptions_total"]) == (7, 3)
    assert (found["vllm:iteration_tokens_total_count"], found["vllm:iteration_tokens_total_sum"]) == (1, 9)
    assert found["quire:http_requests_open"] == 5
    assert found["vllm:request_success_total"] == 1


def test_a_front_that_is_silent_or_gone_still_counts() -> None:
    world = World(2)
    one, two = world.metrics
    two.model("m").on_step(SchedulerStats(num_steps=3), 5, 7)
    two.on_open(4)
    values(one)
    world.silence(1)
    two.model("m").on_step(SchedulerStats(num_steps=4), 0, 1)  # nobody learns of it
    assert values(one)["vllm:generation_tokens_total"] == 7
    assert values(one)["quire:http_requests_open"] == 4
    world.rows.remove(1)
    gone = values(one)
    assert (gone["vllm:generation_tokens_total"], gone["quire:http_requests_open"]) == (7, 0)
    world.rows.append(1)
    three = world.start(1)
    three.model("m").on_step(SchedulerStats(num_steps=5), 0, 1)
    assert values(one)["vllm:generation_tokens_total"] == values(three)["vllm:generation_tokens_total"] == 8
    assert values(one)["quire:engine_steps_total"] == 5


def test_what_was_known_of_earlier_engines_outlives_a_front() -> None:
    world = World(1)
    [one] = world.metrics
    one.model("m").on_step(SchedulerStats(num_steps=100, num_preemptions=8), 0, 1)
    one.model("m").on_step(SchedulerStats(num_steps=1, num_preemptions=0), 0, 1)  # another engine
    one.publish()
    two = world.start(0)
    two.model("m")
    assert values(two)["quire:engine_steps_total"] == 101
    two.model("m").on_step(SchedulerStats(num_steps=2, num_preemptions=1), 0, 1)
    two.publish()
    three = world.start(0)
    three.model("m")
    found = values(three)
    assert (found["quire:engine_steps_total"], found["vllm:num_preemptions_total"]) == (102, 9)
    assert found["vllm:generation_tokens_total"] == 3


def test_all_that_is_taken_from_engines_is_known_as_that() -> None:
    metrics = Metrics()
    model = metrics.model("m")
    assert {metric.name for metric in model._counters()} <= OF_ENGINES


def test_a_snapshot_is_small() -> None:
    metrics = Metrics()
    for name in ("one", "two"):
        metrics.model(name).on_finished(finished_request())
    for route in range(20):
        metrics.on_http(f"/v1/{route}", "POST", 200, 0.1)
    text = metrics.publish().encode()
    assert len(text) < 20_000
    assert Snapshot.decode(text) == Snapshot.decode(Snapshot.decode(text).encode())


def test_seconds_of_fronts_are_added_up() -> None:
    one = [Second(7, prompt_tokens=1, num_next=2, max_next=0.5, num_running=3), Second(8, generated_tokens=1)]
    two = [Second(6, generated_tokens=5), Second(7, prompt_tokens=2, num_next=1, max_next=0.25, num_running=1)]
    assert merged([one, two]) == [
        two[0], Second(7, prompt_tokens=3, num_next=3, max_next=0.5, num_running=3), one[1]
    ]  # fmt: skip
    assert merged([one]) == one
