"""OpenTelemetry traces of requests: http -> queue, prefill, decode, with the `gen_ai.*` attributes.

Spans are made when a request has finished, from its recorded times, so tracing costs nothing per token.
They are sent in batches by a thread of the SDK; what it cannot deliver is dropped. The SDK is only imported if it is
needed (`--otlp-traces-endpoint`, extra `otel`). Prompts and outputs are never part of a trace.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from quire.errors import ConfigError, echo
from quire.frontend.prompts import Params
from quire.pooling_params import PoolingParams
from quire.server.timeline import RequestRecord, Timings
from quire.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SERVICE = "quire"
EXPORT_SECONDS = 5.0
NANOSECONDS = 1_000_000_000


class Tracing:
    """Makes spans of finished requests.

    Args:
        endpoint: URL of a collector that takes OTLP over HTTP. exporter: instead of it.

    Raises:
        ConfigError: it is no URL, or the packages are missing.
    """

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        if not re.match("https?://[^/]", endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint must be a URL of http or https, got {echo(endpoint)}",
                param="otlp_traces_endpoint",
            )
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
        except ImportError as error:
            raise ConfigError(
                f"otlp_traces_endpoint needs packages that are not installed ({error.name}): pip install 'quire[otel]'",
                param="otlp_traces_endpoint",
            ) from None
        self._api = trace
        resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("quire", __version__)
        # The wall clock at zero of the clock by which requests are timed.
        self._epoch = time.time_ns() - time.monotonic_ns()

    def close(self) -> None:
        """Send the remaining spans within a few seconds: a silent collector must not delay the shutdown."""
        thread = threading.Thread(target=self._provider.shutdown, name="quire-tracing-close", daemon=True)
        thread.start()
        thread.join(EXPORT_SECONDS)

    def trace(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        """Make the spans of a request that has just finished. Routes that generate nothing have none."""
        records: list[RequestRecord] = scope["state"].get("records", [])
        if not records:
            return
        ended = time.monotonic()
        started = min([ended - seconds, *(record.started for record in records)])
        kinds = self._api.SpanKind
        root = self._tracer.start_span(
            f"{scope['method']} {getattr(scope.get('route'), 'path', '')}",
            self._parent(scope),
            kinds.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "http.route": getattr(scope.get("route"), "path", ""),
                "http.response.status_code": status,
                "quire.request_id": request_id,
            },
            start_time=self._moment(started),
        )
        if status >= 500:
            root.set_status(self._api.StatusCode.ERROR)
        context = self._api.set_span_in_context(root)
        for record in records:
            for number, timings in enumerate(record.timings):
                self._generation(context, record, number, timings)
        root.end(self._moment(ended))

    def _generation(self, context: Context, record: RequestRecord, number: int, timings: Timings) -> None:
        """Make the span of one prompt and its completions, and within it those of its parts."""
        times = timings.metrics
        end = times.finished_time or times.last_token_time or record.ended or time.monotonic()
        span = self._tracer.start_span(
            "llm_request",
            context,
            attributes=_attributes(record, number, timings, end),
            start_time=self._moment(times.arrival_time),
        )
        inside = self._api.set_span_in_context(span)
        parts = (
            ("queue", times.arrival_time, times.first_scheduled_time),
            ("prefill", times.first_scheduled_time, times.first_token_time),
            ("decode", times.first_token_time, times.last_token_time),
        )
        for name, begun, over in parts:
            if begun is not None:
                part = self._tracer.start_span(name, inside, start_time=self._moment(begun))
                part.end(self._moment(max(over or end, begun)))
        if times.first_token_time is not None:
            span.add_event("first token", timestamp=self._moment(times.first_token_time))
        if times.num_preemptions:
            span.set_attribute("quire.preemptions", times.num_preemptions)
        span.end(self._moment(max(end, times.arrival_time)))

    def _moment(self, seconds: float) -> int:
        """Return monotonic seconds as nanoseconds since 1970."""
        return self._epoch + int(seconds * NANOSECONDS)

    def _parent(self, scope: Scope) -> Context:
        """Return the context that the client's `traceparent` names; an empty one without it, or if it is malformed."""
        from opentelemetry.context import Context

        found = trace_of(scope)
        if found is None:
            return Context()
        parent = self._api.SpanContext(
            trace_id=int(found[2], 16),
            span_id=int(found[3], 16),
            is_remote=True,
            trace_flags=self._api.TraceFlags(int(found[4], 16)),
        )
        return self._api.set_span_in_context(self._api.NonRecordingSpan(parent), Context())


def trace_of(scope: Scope) -> re.Match[bytes] | None:
    """Return the parts of the request's `traceparent`: version, trace, span, flags; None if there is no valid one."""
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    found = TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    return None if found is None or (found[1] == b"00" and found[5]) else found


def traced_parameters(params: Params) -> dict[str, Any]:
    """Return the attributes of a request's parameters."""
    if isinstance(params, PoolingParams):
        return {}
    return {
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }


def _attributes(record: RequestRecord, number: int, timings: Timings, end: float) -> Mapping[str, Any]:
    """Return the attributes of a generation, under the names of OpenTelemetry's conventions and under vLLM's."""
    times = timings.metrics
    values: dict[str, Any] = {
        "gen_ai.operation.name": "generate",
        "gen_ai.request.id": record.response_id,
        "gen_ai.request.model": record.model,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": [reason for reason in timings.finish_reasons if reason is not None],
        "gen_ai.usage.input_tokens": timings.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timings.num_tokens,
        "gen_ai.usage.prompt_tokens": timings.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": timings.num_tokens,
        "gen_ai.usage.cached_tokens": timings.num_cached_tokens,
        "gen_ai.latency.e2e": end - times.arrival_time,
        "gen_ai.latency.time_in_queue": times.queue_seconds,
        "gen_ai.latency.time_to_first_token": times.ttft_seconds,
        "gen_ai.latency.time_in_model_prefill": times.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": times.decode_seconds,
        "gen_ai.latency.time_in_model_inference": times.inference_seconds,
        "quire.prompt": number,
        **record.parameters,
    }
    return {name: value for name, value in values.items() if value is not None}
