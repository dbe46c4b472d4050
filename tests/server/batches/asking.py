"""How these tests make files and batches, and what they check in every answer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from tests.server.responses.spec import check

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FILES, BATCHES = "/v1/files", "/v1/batches"
SECONDS = 20.0
UNFINISHED = {"validating", "in_progress", "finalizing", "cancelling"}


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return a line of input."""
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fake", **content, **body}}


def content_of(lines: Sequence[Any]) -> bytes:
    """Return the content of a file with these lines."""
    return "\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines).encode()


def upload(http: httpx.Client, lines: Sequence[Any] | bytes, *, key: str | None = None, **fields: str) -> Any:
    """Return the answer to an upload."""
    content = lines if isinstance(lines, bytes) else content_of(lines)
    form = {"purpose": "batch", **fields}
    return http.post(FILES, data=form, files={"file": ("in.jsonl", content)}, headers=headers_of(key))


def headers_of(key: str | None) -> dict[str, str]:
    """Return the headers with a key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def uploaded(http: httpx.Client, lines: Sequence[Any] | bytes, **options: Any) -> str:
    """Return the id of a new file."""
    answer = upload(http, lines, **options)
    assert answer.status_code == 200, answer.text
    check("OpenAIFile", answer.json())
    return str(answer.json()["id"])


def begun(http: httpx.Client, lines: Sequence[Any], *, key: str | None = None, **fields: Any) -> str:
    """Return the id of a new batch of these lines."""
    body = {"input_file_id": uploaded(http, lines, key=key), "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = http.post(BATCHES, json=body, headers=headers_of(key))
    assert answer.status_code == 200, answer.text
    check_batch(answer.json())
    return str(answer.json()["id"])


def check_batch(batch: dict[str, Any]) -> None:
    """Check a batch against the official schema, whose own example has nulls for what has not happened."""
    check("Batch", {name: value for name, value in batch.items() if value is not None})


def found(http: httpx.Client, batch_id: str, key: str | None = None) -> dict[str, Any]:
    """Return a batch, checked."""
    answer = http.get(f"{BATCHES}/{batch_id}", headers=headers_of(key))
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    check_batch(batch)
    return batch


def until(http: httpx.Client, batch_id: str, condition: Any, key: str | None = None) -> dict[str, Any]:
    """Return a batch as soon as a condition holds for it."""
    deadline = time.monotonic() + SECONDS
    while not condition(batch := found(http, batch_id, key)):
        assert time.monotonic() < deadline, batch
    return batch


def ended(http: httpx.Client, batch_id: str, key: str | None = None) -> dict[str, Any]:
    """Return a batch once it has ended."""
    return until(http, batch_id, lambda batch: batch["status"] not in UNFINISHED, key)


def lines_of(http: httpx.Client, file_id: str | None, key: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a file; none for no file."""
    if file_id is None:
        return []
    answer = http.get(f"{FILES}/{file_id}/content", headers=headers_of(key))
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    return [json.loads(item) for item in answer.text.splitlines()]
