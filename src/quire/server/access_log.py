"""Log lines of single requests: one for each, and with `--enable-log-requests` another with its prompt and parameters.

Keys appear by name only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import Scope

from quire.frontend.output_processor import RequestStream
from quire.frontend.prompts import Params
from quire.server.auth import ApiKeys
from quire.server.errors import shorten
from quire.server.timeline import RequestRecord
from quire.server.tracing import trace_of

logger = logging.getLogger("quire.access")
request_logger = logging.getLogger("quire.requests")

MAX_PATH = 200
MAX_METHOD = 20
MAX_PARAMS = 2000


def unlogged_paths(given: Iterable[str], always: Iterable[str] = ()) -> frozenset[str]:
    """Return the paths of `--disable-access-log-for`, each item of which may be several with commas, and `always`."""
    return frozenset([*always, *(path for item in given for path in item.split(",") if path)])


def log_access(keys: ApiKeys, scope: Scope, request_id: str, status: int, seconds: float) -> None:
    """Write the line of a finished request."""
    state = scope["state"]
    client = scope.get("client")
    fields: dict[str, Any] = {
        "request_id": request_id,
        "client": client[0] if client else "-",
        "method": shorten(scope["method"], MAX_METHOD),
        "path": shorten(scope["path"], MAX_PATH),
        "status": status,
        "ms": round(1000 * seconds, 1),
    }
    trace = trace_of(scope)
    if trace is not None:
        fields["trace_id"] = trace[2].decode()
    text = "{client} {method} {path} {status} {ms:.1f} ms {request_id}".format(**fields)
    key = keys.get(state.get("key_digest"))
    if key is not None:
        fields["key"] = key.name
        text += f" key={key.name}"
    records: list[RequestRecord] = state.get("records", [])
    if records:
        timings = [timing for record in records for timing in record.timings]
        fields["response_id"] = records[-1].response_id
        fields["prompt_tokens"] = sum(timing.num_prompt_tokens for timing in timings)
        fields["completion_tokens"] = sum(timing.num_tokens for timing in timings)
        text += f" tokens={fields['prompt_tokens']}+{fields['completion_tokens']}"
    logger.info("%s", text, extra={"fields": fields})


def log_prompt(response_id: str, stream: RequestStream, params: Params, most: int) -> None:
    """Write a request's prompt, at most `most` characters and tokens of it, and its parameters."""
    prompt = stream.state.prompt
    token_ids = stream.prompt_token_ids
    fields = {
        "response_id": response_id,
        "prompt": None if prompt is None else prompt[:most],
        "prompt_token_ids": token_ids[:most],
        "num_prompt_tokens": len(token_ids),
        "params": msgspec.json.encode(params, enc_hook=str).decode("utf-8", "replace")[:MAX_PARAMS],
    }
    request_logger.info(
        "received %s: %d tokens, %r, params %s",
        response_id,
        len(token_ids),
        fields["prompt"] if prompt is not None else fields["prompt_token_ids"],
        fields["params"],
        extra={"fields": fields},
    )
