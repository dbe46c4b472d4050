"""A bad request as a row of a table, and what is checked of each: the answer, and that nobody else noticed.

Tables have a letter and rows a number, with letters behind it where one row has several forms: "B8b". Numbers are
without gaps, so that a row that is lost is noticed (`check_numbers`). The status and codes are those of docs/server.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.helpers.live_server import LiveServer
from tests.server.checks import COMPLETIONS, JSON, LEAKS

MOST_BODY = 4 << 20  # of the server that the tables are sent to
MOST_BYTES = 4096  # of an error
CANARY = {"model": "fake", "prompt": "canary", "max_tokens": 8, "seed": 7}
NAME = re.compile(r"[A-Z]+(\d+)[a-z]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request and what must come back.

    Attributes:
        name: letter and number. what: the request in words.
        body: an object to send as JSON, or bytes. omit: fields of the table's base that are left out.
        status: 200 is fine too, where it says so. code, param: of the error object.
        words: what the message must have: numbers, positions, JSON pointers, names.
        tells: headers that the answer must have.
    """

    name: str
    what: str
    method: str = "POST"
    path: str = COMPLETIONS
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    status: int = 400
    code: str | None = None
    param: str | None = None
    words: tuple[str, ...] = ()
    tells: tuple[str, ...] = ()


def table(path: str, base: Mapping[str, Any]) -> Callable[..., Row]:
    """Return a maker of rows that change some fields of a good request; `...` leaves a field out."""

    def row(
        name: str, what: str, changes: dict[str, Any], code: str | None, param: str | None, *words: str, **more: Any
    ) -> Row:
        body = {key: value for key, value in {**base, **changes}.items() if value is not ...}
        more = {"path": path, "status": 200 if code is None else 400, **more}
        return Row(name=name, what=what, body=body, code=code, param=param, words=words, **more)

    return row


def check_numbers(rows: Iterable[Row], letter: str, count: int) -> None:
    """Check that a table has rows 1 to `count`, and no name twice."""
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), "a row is there twice"
    assert all(name.startswith(letter) for name in names)
    numbers = {int(match[1]) for name in names if (match := NAME.fullmatch(name))}
    assert numbers == set(range(1, count + 1))


def title(row: Row) -> str:
    """Return what a row is called in the output of tests."""
    return f"{row.name} {row.what}"


def ask(server: LiveServer, row: Row) -> httpx.Response:
    """Send a row's request."""
    content = row.body if isinstance(row.body, bytes) else None if row.body is None else json.dumps(row.body).encode()
    return server.http.request(row.method, row.path, content=content, headers=dict(row.headers))


def check_answer(response: httpx.Response, row: Row) -> None:
    """Check the answer to a request of OpenAI's API."""
    assert response.status_code == row.status, response.text[:2000]
    assert response.headers["x-request-id"]
    for name in row.tells:
        assert name in response.headers
    if row.status < 400:
        assert row.method == "HEAD" or response.json()
        return
    check_discreet(response.content)
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    wanted = {
        "message": error["message"],
        "type": "invalid_request_error" if row.status < 500 else "server_error",
        "param": row.param,
        "code": row.code,
    }
    assert response.json() == {"error": wanted}, error
    check_message(error["message"], row)


def check_message(message: str, row: Row) -> None:
    """Check that a message says what it should, in one line."""
    assert message and message.isprintable()
    for word in row.words:
        assert word in message, message


def check_discreet(body: bytes) -> None:
    """Check that an error is short, and tells nothing of files, addresses and tracebacks."""
    assert len(body) <= MOST_BYTES
    assert not LEAKS.search(body.decode()), body.decode()


def canary(server: LiveServer) -> str:
    """Return the text of a good request, which is the same whatever happened before."""
    response = server.http.post(COMPLETIONS, json=CANARY)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def check_unharmed(server: LiveServer, sung: str) -> None:
    """Check that nothing is left of a request, and that the canary sings as before."""
    assert server.do(lambda: server.engine.live) == []
    server.wait_until(lambda: server.context.num_open == 0)  # of a body that was not wanted the rest is still read
    assert canary(server) == sung
