"""What tests of faults need: many streams at once from a real server, its processes, and when its probes say what."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.server import Server


@dataclass
class Answer:
    """What a client got. `text` of the first choice; `done`: whether a stream ended as it should; `at`: seconds."""

    status: int = 0
    text: str = ""
    reason: str | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    at: float = 0.0


def body_of(number: int, *, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a streamed completion: greedy, or for every third number sampled with a seed, always with one text."""
    body = {
        "model": "quire-demo",
        "prompt": f"{number}. KING RICHARD III:\n",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    if number % 3 == 2:
        body |= {"temperature": 0.9, "seed": number, "presence_penalty": 0.3}
    return body | fields


def read(server: Server, body: dict[str, Any], seen: Callable[[], None] = lambda: None) -> Answer:
    """Send a completion, streamed or not, and read the answer; `seen` is called for each event."""
    answer = Answer()
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            answer.status = response.status
            if not body.get("stream"):
                _take(answer, json.loads(response.read()))
                answer.done = True
            for line in response:
                if line.startswith(b"data: "):
                    seen()
                    if line.strip() == b"data: [DONE]":
                        answer.done = True
                    else:
                        _take(answer, json.loads(line[6:]))
    except urllib.error.HTTPError as error:
        with error:
            answer.status = error.code
            answer.error = json.loads(error.read())["error"]
    except (OSError, http.client.HTTPException) as error:
        answer.error = {"code": type(error).__name__}
    answer.at = time.monotonic()
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    answer.error = chunk.get("error", answer.error)
    for choice in chunk.get("choices", ()):
        if choice["index"] == 0:
            answer.text += choice["text"]
            answer.reason = choice["finish_reason"] or answer.reason


class Load:
    """Requests under way. `num_events` counts the events that all streams have got."""

    def __init__(self, server: Server, bodies: Sequence[dict[str, Any]], pool: ThreadPoolExecutor) -> None:
        self.num_events = 0
        self._futures: list[Future[Answer]] = [pool.submit(read, server, body, self._seen) for body in bodies]

    def _seen(self) -> None:
        self.num_events += 1

    def wait_for_events(self, count: int) -> None:
        """Return once the streams have got so many events together."""
        deadline = time.monotonic() + 60
        while self.num_events < count:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def answers(self) -> list[Answer]:
        """Wait for all answers."""
        return [future.result(180) for future in self._futures]


@contextmanager
def load(server: Server, bodies: Sequence[dict[str, Any]]) -> Iterator[Load]:
    """Have these requests served at the same time, beside the block."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        yield Load(server, bodies, pool)


def engine_pid(server: Server) -> int:
    """Return the process id of the engine, once there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in server.children():
            if b"quire.engine.process" in _command(pid):
                return pid
        time.sleep(0.01)
    raise AssertionError("there is no engine")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def num_connections(server: Server, pid: int) -> int:
    """Return how many connections to a server one of its processes has."""
    return sum(
        connection.laddr.port == server.port and connection.status == psutil.CONN_ESTABLISHED
        for connection in psutil.Process(pid).net_connections("tcp")
    )


def alive(pid: int) -> bool:
    """Whether a process exists that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def seconds_until(condition: Callable[[], bool], *, most: float, since: float | None = None) -> float:
    """Return how long it takes until the condition holds; fail after `most` seconds."""
    start = time.monotonic() if since is None else since
    while not condition():
        assert time.monotonic() - start < most, f"not within {most} s"
        time.sleep(0.005)
    return time.monotonic() - start


def is_ready(server: Server) -> bool:
    """Whether /readyz says so."""
    return server.get("/readyz")[0] == 200


def leftovers() -> set[str]:
    """Return what of ours lies in /dev/shm and in the folder of temporary files."""
    folders = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]
    return {str(path) for folder in folders for path in folder.glob("*quire*")}


def show(title: str, rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first row is its head."""
    texts = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    print(f"\n{title}")
    for row in texts:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
