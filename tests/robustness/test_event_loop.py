"""Nothing that a client sends keeps the event loop busy for long: processor time of its thread, as measured."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.faults import show
from tests.helpers.live_server import LiveServer

# Between two looks, on any machine; here bodies take up to 0.05, and freeing the log-probabilities of an answer 0.12.
MAX_SECONDS = 0.2
MAX_BYTES = 8 * 2**20 - 1000
_DIGITS = str((2**53 - 1) * 5**1075)
HALFWAY = f"{_DIGITS[0]}.{_DIGITS[1:]}e-308"  # the middle of two doubles: all its digits are looked at
USER = '{"role":"user","content":"a"}'


def many(part: str, count: int) -> str:
    return ",".join([part] * count)


def fill(part: str) -> str:
    return many(part, MAX_BYTES // (len(part) + 1) - 20)


def numbered(text: str, count: int) -> str:
    return ",".join([text % index for index in range(count)])


def bodies() -> dict[str, tuple[str, str]]:
    """Return route and fields of each attack."""
    return {
        "token ids": ("/v1/completions", '"prompt":[' + fill("5") + "]"),
        "lists": ("/v1/completions", '"prompt":[' + fill("[]") + "]"),
        "deep lists": ("/v1/completions", '"prompt":[' + fill("[" * 60 + "]" * 60) + "]"),
        "keys": ("/v1/completions", numbered('"k%d":1', 500_000)),
        "messages": ("/v1/chat/completions", '"messages":[' + many(USER, 100_000) + "]"),
        "blocks": ("/v1/messages", '"max_tokens":1,"messages":[' + many(USER, 100_000) + "]"),
        "parts": (
            "/v1/chat/completions",
            '"messages":[{"role":"user","content":[' + many('{"type":"text","text":"a"}', 100_000) + "]}]",
        ),
        "other messages": ("/api/chat", '"messages":[' + many(USER, 100_000) + "]"),
        "items": ("/v1/responses", '"max_output_tokens":16,"input":[' + many(USER, 8192) + '],"truncation":"auto"'),
        "variables": (
            "/v1/chat/completions",
            f'"messages":[{USER}],"chat_template_kwargs":{{{numbered(chr(34) + "k%d" + chr(34) + ":1", 200_000)}}}',
        ),
        "long text": ("/v1/completions", '"prompt":"' + "a b," * (MAX_BYTES // 4) + '"'),
        "a constant": ("/v1/completions", '"prompt":"' + "x" * (MAX_BYTES - 99) + '","n":NaN'),
        "escapes and a constant": ("/v1/completions", '"prompt":"' + "\\\\" * (MAX_BYTES // 2 - 99) + '","n":NaN'),
        "short escapes": ("/v1/completions", '"prompt":"' + "x\\n" * (MAX_BYTES // 3 - 99) + '"'),
        "an escaped key": ("/v1/completions", '"' + "x\\n" * (MAX_BYTES // 3 - 99) + '":1'),
        "wide escapes": ("/v1/completions", '"prompt":"\U0001f600' + "x\\n" * (MAX_BYTES // 3 - 99) + '"'),
        "integers": ("/v1/completions", numbered('"k%d":' + "9" * 4000, MAX_BYTES // 4020)),
        "a list of integers": ("/v1/completions", '"prompt":[' + fill("9" * 4000) + "]"),
        "integers of the longest kind": ("/v1/completions", '"prompt":[' + fill("9" * 400) + "]"),
        "fractions": ("/v1/completions", '"prompt":[' + fill(HALFWAY) + "]"),
        "fractions that are read": ("/v1/completions", numbered(f'"k%d":{HALFWAY[:390]}e-308', 2500)),
        "a long fraction": ("/v1/completions", '"n":1.' + "5" * (MAX_BYTES - 99)),
        "a long integer": ("/v1/completions", '"n":' + "5" * (MAX_BYTES - 99)),
        "text to split": ("/tokenize", '"return_token_strs":true,"prompt":"' + "a b," * 45_000 + '"'),
        "ids to join": ("/detokenize", '"tokens":[' + many("77", 2_000_000) + "]"),
        "many prompts": ("/v1/completions", '"max_tokens":1,"prompt":[' + many('"' + "a b," * 1000 + '"', 30) + "]"),
        "documents": ("/rerank", '"query":"a","documents":[' + many('"' + "a b," * 900 + '"', 2000) + "]"),
        "log-probabilities": (
            "/v1/completions",
            '"prompt":"a","n":16,"logprobs":20,"max_tokens":2000,"ignore_eos":true',
        ),
        "log-probabilities of a chat": (
            "/v1/chat/completions",
            f'"messages":[{USER}],"n":16,"logprobs":true,"top_logprobs":20,"max_tokens":2000,"ignore_eos":true',
        ),
    }


@dataclass
class Probe:
    """The longest that the loop's thread, or the one for JSON, was busy between two looks [seconds].

    The one for JSON keeps the loop waiting as long as it does not let go of the interpreter.
    """

    worst: float = 0.0

    async def look(self) -> None:
        before = self.times()
        while True:
            await asyncio.sleep(0.001)
            now = self.times()
            self.worst = max(self.worst, *(now[name] - before.get(name, now[name]) for name in now))
            before = now

    def times(self) -> dict[str, float]:
        """Return the processor time of each thread so far."""
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("quire-json")]
        clocks = {thread.name: time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident}
        return {"loop": time.thread_time(), **{name: time.clock_gettime(clock) for name, clock in clocks.items()}}


@pytest.fixture
def probed() -> Iterator[tuple[LiveServer, Probe]]:
    live = LiveServer(llm={"max_model_len": 200_000}, max_num_seqs=8)
    probe = Probe()
    task = live.do(lambda: asyncio.get_running_loop().create_task(probe.look()))
    yield live, probe
    live.do(task.cancel)
    live.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_holds_up_the_others(probed: tuple[LiveServer, Probe]) -> None:
    live, probe = probed
    live.http.timeout = 120
    rows: list[tuple[Any, ...]] = [("what", "bytes", "status", "longest [s]")]
    for name, (path, fields) in {"description": ("/openapi.json", ""), **bodies()}.items():
        body = '{"model":"fake",' + fields + "}" if fields else ""
        time.sleep(0.1)
        probe.worst = 0.0
        if body:
            answer = live.http.post(path, content=body, headers={"Content-Type": "application/json"})
        else:
            answer = live.http.get(path)
        rows.append((name, len(body), answer.status_code, probe.worst))
        assert answer.status_code in (200, 400, 413), answer.text[:300]
        json.loads(answer.content)
    show("event loop", rows)
    assert max(row[3] for row in rows[1:]) < MAX_SECONDS
