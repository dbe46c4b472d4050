"""Traces as a collector gets them, over HTTP."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.server import tracing as tracing_module
from quire.server.tracing import TRACEPARENT, Tracing
from tests.helpers.live_server import LiveServer, MakeServer

pytest.importorskip("opentelemetry.sdk")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    data = gzip.decompress(data)
                request = trace_service.ExportTraceServiceRequest.FromString(data)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def flush(server: LiveServer) -> None:
    server.wait_until(lambda: server.context.num_open == 0)
    tracing = server.context.tracing
    assert tracing is not None
    tracing.close()


def ask(server: LiveServer, headers: dict[str, str] | None = None, **body: Any) -> Any:
    whole = {"model": "fake", "prompt": "xyz", "max_tokens": 4, "ignore_eos": True, "temperature": 0.5, **body}
    return server.http.post("/v1/completions", json=whole, headers=headers)


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        values[item.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return values


def test_the_spans_of_a_request(make_server: MakeServer, collector: Collector) -> None:
    server = make_server(otlp_traces_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "traced"}
    answer = ask(server, headers).json()
    server.http.get("/v1/models")
    flush(server)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /v1/completions", "llm_request", "queue", "prefill", "decode"}
    root, request = spans["POST /v1/completions"], spans["llm_request"]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert root.parent_span_id.hex() == PARENT
    assert request.parent_span_id == root.span_id
    assert all(spans[name].parent_span_id == request.span_id for name in ("queue", "prefill", "decode"))
    for span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    assert spans["queue"].end_time_unix_nano == spans["prefill"].start_time_unix_nano
    assert spans["prefill"].end_time_unix_nano == spans["decode"].start_time_unix_nano
    told = attributes(request)
    assert told["gen_ai.response.id"] == answer["id"] and told["gen_ai.request.model"] == "fake"
    assert told["gen_ai.usage.input_tokens"] == told["gen_ai.usage.prompt_tokens"] == 3
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.completion_tokens"] == 4
    assert (told["gen_ai.request.n"], told["gen_ai.request.max_tokens"]) == (1, 4)
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 <= told["gen_ai.latency.time_in_queue"] <= told["gen_ai.latency.time_to_first_token"]
    assert told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert attributes(root)["quire.request_id"] == "traced"
    assert attributes(root)["http.response.status_code"] == 200
    assert "xyz" not in str(collector.spans)


def test_each_prompt_has_a_span_and_no_parent_is_no_parent(make_server: MakeServer, collector: Collector) -> None:
    server = make_server(otlp_traces_endpoint=collector.url)
    ask(server, {"traceparent": "00-" + "0" * 32 + f"-{PARENT}-01"}, prompt=["a", "b"])
    flush(server)
    names = [span.name for span in collector.spans]
    assert names.count("llm_request") == 2
    [root] = [span for span in collector.spans if span.name.startswith("POST")]
    assert root.parent_span_id == b""


def test_who_is_not_sampled_is_not_traced(make_server: MakeServer, collector: Collector) -> None:
    server = make_server(otlp_traces_endpoint=collector.url)
    ask(server, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    flush(server)
    assert collector.spans == []


def test_a_collector_that_is_not_there_disturbs_nobody(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing_module, "EXPORT_SECONDS", 0.2)
    server = make_server(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    assert all(ask(server).status_code == 200 for _ in range(3))
    flush(server)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"cc-{TRACE}-{PARENT}-01-more", True),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}", False),
        ("", False),
    ],
)
def test_what_a_traceparent_looks_like(text: str, good: bool) -> None:
    assert bool(TRACEPARENT.fullmatch(text.encode())) == good


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'") as caught:
        Tracing("http://localhost:4318/v1/traces")
    assert caught.value.param == "otlp_traces_endpoint"


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        Tracing("localhost:4318")
