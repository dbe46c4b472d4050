"""Table L: bad lines in files of requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

URL = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line and the error that its result has; of a status other than 0 it is the server's answer."""

    name: str
    what: str
    text: str
    code: str
    param: str | None = None
    status: int = 0


def line(name: str, what: str, code: str, param: str | None, *, status: int = 0, **changes: Any) -> Line:
    body = {"model": "quire-demo", "prompt": "a", "max_tokens": 2, **changes.pop("fields", {})}
    whole = {"custom_id": name, "method": "POST", "url": URL, "body": body, **changes}
    text = json.dumps({key: value for key, value in whole.items() if value is not ...})
    return Line(name=name, what=what, text=text, code=code, param=param, status=status)


ROWS = [
    Line(name="L1", what="JSON that is cut off", text='{"custom_id":', code="invalid_json"),
    Line(name="L2", what="a list", text="[]", code="invalid_type"),
    Line(name="L3", what="100000 open lists", text="[" * 100_000, code="invalid_json"),
    Line(
        name="L4",
        what="half a surrogate pair",
        text=r'{"custom_id": "\ud800"}',
        code="invalid_value",
        param="custom_id",
    ),
    line("L4b", "half a pair in a field's name", "unknown_parameter", "line.\\ud800", **{"\ud800": 1}),
    line("L5", "no custom_id", "missing_required_parameter", "custom_id", custom_id=...),
    line("L6", "a number as custom_id", "invalid_type", "custom_id", custom_id=5),
    line("L7", "a custom_id twice", "duplicate_custom_id", "custom_id", custom_id="first"),
    line("L8", "GET", "invalid_value", "method", method="GET"),
    line("L9", "an unknown url", "unknown_url", "url", url="/v1/nope"),
    line("L10", "a url of another machine", "unknown_url", "url", url="http://127.0.0.1:9/v1/completions"),
    line("L11", "no body", "missing_required_parameter", "body", body=...),
    line("L12", "a text as body", "invalid_type", "body", body="{}"),
    line("L13", "an unknown field", "unknown_parameter", "line.bdoy", bdoy=1),
    line("L14", "a stream", "unsupported_parameter", "body.stream", fields={"stream": True}),
    line("L15", "an unknown model", "model_not_found", "model", status=404, fields={"model": "nope"}),
    line("L16", "temperature 9", "decimal_above_max_value", "temperature", status=400, fields={"temperature": 9}),
    line("L17", "an empty prompt", "empty_array", "prompt", status=400, fields={"prompt": ""}),
]
