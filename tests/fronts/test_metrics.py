"""Metrics of several fronts are those of one server, whichever is asked, and after one has died; real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.faults import engine_pid
from tests.helpers.fronts import client_of, fronts_of, wait_for_fronts
from tests.helpers.server import Server, serve

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
# Of this front's own process, or of moments.
PASSING = ("process_", "quire:event_loop_lag", "http_", "quire:engine_heartbeat_age_seconds")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two fronts."""
    options = ("--api-server-count", "2", "--front-stall-timeout", "2", "--enable-admin-endpoints")
    with serve(tmp_path_factory.mktemp("metrics") / "log", *options) as server:
        wait_for_fronts(server, 2)
        yield server


def scrape(client: httpx.Client) -> Values:
    """Return (name, labels) -> value."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def total(values: Values, name: str) -> float:
    """Return the sum over all labels."""
    return sum(value for (found, _), value in values.items() if found == name)


def lasting(values: Values) -> Values:
    """Return what a scrape of the metrics does not change itself."""
    return {key: value for key, value in values.items() if not key[0].startswith(PASSING)}


def complete(client: httpx.Client, max_tokens: int = 8, prompt: str = "The king said to the queen") -> None:
    body = {"model": "quire-demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.slow
def test_all_fronts_show_the_sum_of_all(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with client_of(server, pids[0]) as one, client_of(server, pids[1]) as two:
        before = scrape(one)
        for client in (one, two, two):
            complete(client)
        time.sleep(0.2)  # until the idle engine has told all fronts
        after, same = scrape(one), scrape(two)
        assert lasting(after) == lasting(same)

        def grown(name: str) -> float:
            return total(after, name) - total(before, name)

        assert grown("vllm:generation_tokens_total") == 24
        assert grown("vllm:e2e_request_latency_seconds_count") == 3
        assert grown("vllm:request_success_total") == 3
        queries = grown("vllm:prefix_cache_queries_total")
        assert queries == grown("vllm:prompt_tokens_total")
        # Tokens of prompts that were not cached, and all generated ones but the last of each request.
        computed = queries - grown("vllm:prefix_cache_hits_total") + 24 - 3
        assert grown("vllm:iteration_tokens_total_sum") == computed + grown("quire:discarded_tokens_total")
        assert total(after, "vllm:num_requests_running") == 0
        assert total(after, "quire:fronts_serving") == 2
        assert total(after, "quire:connections_open") == 2
        device = frozenset({("model_name", "quire-demo"), ("engine", "0"), ("tier", "device")})
        assert after["quire:kv_blocks", device] == 16384


def test_gauges_of_a_busy_engine_are_shown_by_an_idle_front(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with client_of(server, pids[0]) as busy, client_of(server, pids[1]) as idle:
        body = {"model": "quire-demo", "prompt": "The king", "max_tokens": 800, "ignore_eos": True, "stream": True}
        with busy.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # without a name for it httpx would close the stream
            next(lines)
            values = scrape(idle)
            assert total(values, "vllm:num_requests_running") == 1
            assert total(values, "quire:http_requests_open") == 1
            assert idle.get("/load").json() == {"server_load": 1}


def test_all_fronts_know_that_an_engine_was_replaced_and_that_it_sleeps(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with client_of(server, pids[0]) as one, client_of(server, pids[1]) as two:
        os.kill(engine_pid(server), signal.SIGKILL)
        for client in (one, two):
            complete(client)
        assert lasting(scrape(one)) == lasting(scrape(two))
        assert total(scrape(one), "quire:engine_restarts_total") == 1
        asleep = frozenset({("model_name", "quire-demo"), ("engine", "0"), ("sleep_state", "weights_offloaded")})
        for path, expected in (("/sleep", 1), ("/wake_up", 0)):
            assert two.post(path).status_code == 200
            for client in (one, two):
                assert scrape(client)["vllm:engine_sleep_state", asleep] == expected


def test_counters_do_not_go_back_when_a_front_is_replaced(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with client_of(server, pids[0]) as one, client_of(server, pids[1]) as two:
        for client in (one, two):
            complete(client)
        shown = scrape(two)
        os.kill(pids[0], signal.SIGKILL)
        while (gone := scrape(two)) and total(gone, "quire:fronts_serving") == 2:
            time.sleep(0.01)
        check_not_less(shown, gone)
        wait_for_fronts(server, 2)
        [new] = set(fronts_of(server)) - set(pids)
        check_not_less(shown, scrape(two))
        with client_of(server, new) as three:
            again = scrape(three)
            check_not_less(shown, again)
            assert total(again, "quire:front_restarts_total") == total(shown, "quire:front_restarts_total") + 1
            complete(three)
            assert (
                total(scrape(two), "vllm:generation_tokens_total") == total(shown, "vllm:generation_tokens_total") + 8
            )


def check_not_less(before: Values, after: Values) -> None:
    """Check that no counter is less than before."""
    less = {
        key: (value, after.get(key))
        for key, value in before.items()
        if key[0].endswith(("_total", "_count", "_sum", "_bucket")) and not after.get(key, -1.0) >= value
    }
    assert not less


def test_a_frozen_front_delays_a_scrape_for_a_second_at_most(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with client_of(server, pids[0]) as one, client_of(server, pids[1]) as two:
        complete(one)
        shown = scrape(two)
        os.kill(pids[0], signal.SIGSTOP)
        began = time.monotonic()
        values = scrape(two)
        assert time.monotonic() - began < 1.5
        os.kill(pids[0], signal.SIGCONT)
        check_not_less(shown, values)
