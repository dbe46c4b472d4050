"""What schemathesis checks of every answer besides its own checks; loaded by it, see `test_schema_fuzz.py`."""

from __future__ import annotations

import re

import schemathesis

MAX_BYTES = 4096
INTERNALS = re.compile(r"/(home|tmp|usr|root|opt)/|0x[0-9a-f]{6,}|Traceback|site-packages")


@schemathesis.check
def every_answer_has_an_id(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: object) -> None:
    """X-Request-Id is on every answer."""
    assert response.headers.get("x-request-id"), "no X-Request-Id"


@schemathesis.check
def errors_are_short_and_discreet(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """An error has at most 4 KB and tells nothing of files, addresses or tracebacks that the client did not send."""
    if response.status_code < 400:
        return
    assert len(response.content) <= MAX_BYTES, f"{len(response.content)} bytes"
    sent = f"{case.body!r} {case.path_parameters!r} {case.query!r}"
    for found in INTERNALS.finditer(response.content.decode("utf-8", "replace")):
        assert found.group() in sent, f"the error tells {found.group()!r}"
