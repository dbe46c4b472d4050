"""What /metrics and the statistics line say after known work."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server import metrics as metrics_module
from quire.server.metrics import Metrics, StatsLog, one_two_five
from quire.step import SchedulerStats
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.test_limits import finished_request

LABELS = {"model_name": "fake", "engine": "0"}


def scrape(server: LiveServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return (name, labels without model and engine) -> value."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = frozenset((key, value) for key, value in sample.labels.items() if key not in LABELS)
            if sample.name.startswith("vllm:"):
                assert LABELS.items() <= sample.labels.items(), sample
            found[sample.name, labels] = sample.value
    return found


def test_counts_after_known_work(make_server: MakeServer) -> None:
    server = make_server(llm={"reply_text": "hello world"})

    def ask(**body: object) -> None:
        answer = server.http.post("/v1/completions", json={"model": "fake", "prompt": "abc", **body})
        assert answer.status_code == 200

    ask()
    ask(max_tokens=2, n=2)
    server.http.get("/nowhere/secret")
    values = scrape(server)

    def value(name: str, **labels: str) -> float:
        return values["vllm:" + name, frozenset(labels.items())]

    assert value("prompt_tokens_total") == 6
    assert value("generation_tokens_total") == 8
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("request_success_total", finished_reason="length") == 1
    assert value("request_success_total", finished_reason="abort") == 0
    assert value("time_to_first_token_seconds_count") == 2
    assert value("inter_token_latency_seconds_count") == 5
    assert value("e2e_request_latency_seconds_count") == 2
    assert value("request_params_n_sum") == 3
    assert value("request_params_max_tokens_sum") == 18
    assert value("request_prompt_tokens_bucket", le="5.0") == 2
    assert value("num_requests_running") == 0
    assert value("kv_cache_usage_perc") < 1
    done = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    assert values["http_requests_total", frozenset(done.items())] == 2
    assert not any("secret" in str(key) for key in values)


def test_what_the_tiers_hold_and_give_back(make_server: MakeServer) -> None:
    server = make_server()
    stats = SchedulerStats(
        num_waiting=3,
        num_swapped=2,
        num_blocks=100,
        num_free_blocks=60,
        num_layerwise_blocks=30,
        num_free_layerwise_blocks=18,
        num_host_blocks=50,
        num_free_host_blocks=40,
        num_stored_blocks=7,
        num_preemptions=9,
        num_swapped_out=4,
        prefix_cache_queries=1000,
        prefix_cache_hits=600,
        host_cache_hits=200,
        disk_cache_hits=100,
    )
    server.llm._stats = stats
    values = scrape(server)

    def value(name: str, **labels: str) -> float:
        return values[name, frozenset(labels.items())]

    assert value("vllm:num_requests_waiting") == 3
    assert value("vllm:num_requests_swapped") == 2
    assert value("vllm:kv_cache_usage_perc") == pytest.approx(0.4)
    assert value("vllm:cpu_cache_usage_perc") == pytest.approx(0.2)
    assert [value("quire:kv_blocks", tier=tier) for tier in ("device", "host", "disk")] == [100, 50, 7]
    assert [value("quire:kv_blocks_thin", state=state) for state in ("used", "free")] == [12, 18]
    assert value("vllm:num_preemptions_total") == 9
    assert value("quire:preemptions_total", kind="recompute") == 5
    assert value("quire:preemptions_total", kind="swap") == 4
    assert value("vllm:prefix_cache_hits_total") == 600
    assert value("vllm:external_prefix_cache_queries_total") == 700  # 300 were found on the device
    assert value("vllm:external_prefix_cache_hits_total") == 300
    assert value("quire:prefix_cache_hits_by_tier_total", tier="host") == 200
    assert value("quire:prefix_cache_hits_by_tier_total", tier="disk") == 100


def test_where_prompt_tokens_came_from(make_server: MakeServer) -> None:
    server = make_server()
    server.llm._stats = SchedulerStats(
        num_waiting=5, num_deferred=2, num_steps=9, prefix_cache_queries=1000, prefix_cache_hits=600,
        host_cache_hits=200, disk_cache_hits=100,
    )  # fmt: skip
    values = scrape(server)

    def value(name: str, **labels: str) -> float:
        return values["vllm:" + name, frozenset(labels.items())]

    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [value("prompt_tokens_by_source_total", source=source) for source in sources] == [400, 300, 300]
    tiers = ("device", "host", "disk")
    assert [value("prompt_tokens_cached_by_source_total", source=source) for source in tiers] == [300, 200, 100]
    assert value("num_requests_waiting_by_reason", reason="capacity") == 3
    assert value("num_requests_waiting_by_reason", reason="deferred") == 2


def test_counters_go_on_when_another_engine_begins_at_zero() -> None:
    metrics = Metrics()
    model = metrics.model("m")

    def counted() -> tuple[float | None, ...]:
        labels = {"model_name": "m", "engine": "0"}
        names = ("vllm:num_preemptions_total", "quire:engine_steps_total", "vllm:iteration_tokens_total_sum")
        return tuple(metrics.registry.get_sample_value(name, labels) for name in names)

    model.on_step(SchedulerStats(num_steps=10, num_preemptions=3, num_new_tokens=70), 0, 0)
    assert counted() == (3, 10, 70)
    model.on_step(SchedulerStats(num_steps=1, num_preemptions=0, num_new_tokens=5), 0, 0)
    assert counted() == (3, 11, 75)
    model.on_step(SchedulerStats(num_steps=2, num_preemptions=1, num_new_tokens=4), 0, 0)
    assert counted() == (4, 12, 79)


def test_what_steps_cost_is_counted() -> None:
    metrics = Metrics()
    stats = SchedulerStats(num_steps=4, step_seconds=2.5, host_gap_seconds=0.125, num_discarded_tokens=7)
    metrics.model("m").on_step(stats, 0, 0)
    labels = {"model_name": "m", "engine": "0"}
    names = ("step_seconds", "step_host_gap_seconds", "discarded_tokens")
    found = [metrics.registry.get_sample_value(f"quire:{name}_total", labels) for name in names]
    assert found == [2.5, 0.125, 7]


def test_models_of_one_server_have_values_of_their_own() -> None:
    metrics = Metrics()
    for name, tokens in (("one", 5), ("two", 7)):
        metrics.model(name).on_step(SchedulerStats(num_steps=1), 0, tokens)
    assert metrics.model("one") is metrics.model("one")
    metrics.on_rejected("queue_full", "two")
    metrics.on_rejected("rate_limit")

    def value(name: str, model: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": model, "engine": "0", **labels})

    assert value("vllm:generation_tokens_total", "one") == 5
    assert value("vllm:generation_tokens_total", "two") == 7
    assert value("vllm:admission_rejections_total", "one", reason="queue_full") == 0
    assert value("vllm:admission_rejections_total", "two", reason="queue_full") == 1
    assert metrics.registry.get_sample_value("quire:rejected_total", {"reason": "rate_limit"}) == 1
    assert value("vllm:admission_rejections_total", "one", reason="rate_limit") == 0, "nobody knows which it was for"
    text = asyncio.run(metrics.render(""))[0].decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "each is described once"


def test_a_sleeping_model_says_so(make_server: MakeServer) -> None:
    server = make_server()
    server.call(lambda: server.llm.sleep(1))
    values = scrape(server)
    states = {
        dict(labels)["sleep_state"]: value for (name, labels), value in values.items() if "sleep_state" in dict(labels)
    }
    assert states == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


def test_the_health_of_the_engine(make_server: MakeServer) -> None:
    server = make_server()
    values = scrape(server)
    assert values["quire:engine_up", frozenset()] == 1
    assert values["quire:engine_stalled", frozenset()] == 0
    assert values["quire:engine_restarts_total", frozenset()] == 0
    server.fake_client.stalled = 12.5
    assert scrape(server)["quire:engine_heartbeat_age_seconds", frozenset()] == 12.5


def test_aborts_are_counted_by_how_far_they_came() -> None:
    model = Metrics().model("m")
    for scheduled, first, last in ((None, None, None), (0.1, None, None), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3)):
        request = finished_request(finish_reason="abort")
        request.metrics.first_scheduled_time = scheduled
        request.metrics.first_token_time, request.metrics.last_token_time = first, last
        model.on_finished(request)
    found = [sample for metric in model.collect() for sample in metric.samples]
    samples = {s.labels["stage"]: s.value for s in found if s.name == "quire:requests_aborted_total"}
    assert [samples[stage] for stage in ("queued", "prefill", "decode")] == [1, 1, 2]


def test_the_lag_of_the_event_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "LAG_PERIOD", 0.001)
    metrics = Metrics()

    def count() -> float:
        return metrics.registry.get_sample_value("quire:event_loop_lag_seconds_count") or 0.0

    async def run() -> None:
        task = asyncio.create_task(metrics.watch_loop())
        async with asyncio.timeout(10):
            while count() < 3:  # noqa: ASYNC110 - the registry tells nobody
                await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(run())
    assert count() >= 3


def test_names_and_buckets_that_dashboards_read(server: LiveServer) -> None:
    server.http.post("/v1/completions", json={"model": "fake", "prompt": "abc"})
    values = scrape(server)
    names = {name for name, _ in values}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_inference_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
        "iteration_tokens_total_bucket",
        "request_generation_tokens_bucket",
        "request_params_max_tokens_bucket",
        "request_max_num_generation_tokens_bucket",
        "engine_sleep_state",
        "cache_config_info",
    ):
        assert f"vllm:{name}" in names
    edges = {dict(labels)["le"] for name, labels in values if name == "vllm:time_to_first_token_seconds_bucket"}
    assert {"0.001", "0.005", "0.25", "2.5", "640.0", "2560.0", "+Inf"} <= edges


def test_open_metrics_on_request(server: LiveServer) -> None:
    response = server.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_buckets_up_to_the_context_length() -> None:
    assert one_two_five(256) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_the_line_of_the_log() -> None:
    now = [0.0]
    log = StatsLog(clock=lambda: now[0])
    stats = SchedulerStats(
        num_running=3,
        num_waiting=2,
        num_swapped=1,
        num_blocks=10,
        num_free_blocks=5,
        num_host_blocks=20,
        num_free_host_blocks=15,
        prefix_cache_queries=100,
        prefix_cache_hits=25,
    )
    log.add(200, 50)
    now[0] = 10.0
    assert log.line(stats) == (
        "prompt 20.0 tokens/s, generation 5.0 tokens/s, running 3, waiting 2, swapped 1, KV cache 50.0%, "
        "host KV cache 25.0%, prefix cache hits 25.0%"
    )
    assert log.line(SchedulerStats()) is None
    log.add(10, 10)
    now[0] = 15.0
    together = log.line(SchedulerStats(), [(40, 10), (0, 30)])
    assert together is not None and together.startswith("prompt 10.0 tokens/s, generation 10.0 tokens/s, ")
    now[0] = 20.0
    line = log.line(SchedulerStats(num_running=1, num_blocks=10, step_seconds=8.0, host_gap_seconds=0.2))
    assert line is not None and line.endswith(", prefix cache hits 0.0%, host gap 2.5%")
    log.line(SchedulerStats(num_steps=9, prefix_cache_queries=1000, prefix_cache_hits=800))
    restarted = log.line(SchedulerStats(num_steps=1, num_running=1, prefix_cache_queries=10, prefix_cache_hits=5))
    assert restarted is not None and restarted.endswith(", prefix cache hits 50.0%")
