"""Forms made to hurt, against a real server: each is answered soon, with a text or an error that names the field,
nobody else notices, and nothing is left behind.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.helpers.server import Server, serve

MODEL = "quire-demo"
SECONDS = 15.0  # for an answer; it takes two and a half where nothing else goes on
MAX_GROWTH = 400 << 20  # bytes, of all processes


def chain(count: int) -> dict[str, Any]:
    """Return a schema that doubles with each of so many references."""
    parts: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)
    }
    return {"$defs": {**parts, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def tags(count: int) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "integer"}}}}
    each = [{"begin": f"<f{i}>", "content": content, "end": "</f>"} for i in range(count)]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": each}}


SCHEMAS: dict[str, Any] = {
    "enum": {"enum": [f"value {i}" for i in range(20_000)]},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    "many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 10**9},
    "itself": {"$ref": "#"},
    "without end": {
        "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
        "$ref": "#/$defs/n",
    },
    "pattern": {"type": "string", "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}$"},
    "patterns": {"allOf": [{"type": "string", "pattern": f"^.*{a}.{{9}}{b}"} for a in "abcd" for b in "efg"]},
    "names": {"patternProperties": {f".*{chr(97 + i)}.*{chr(98 + i)}.*": {"type": "integer"} for i in range(20)}},
    "numbers": {"type": "number", "minimum": -1e308, "maximum": 1e308},
    "large numbers": {"type": "integer", "minimum": -(10**400), "maximum": 10**400},
    "parts": {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(20)]},
    "conditions": {
        "allOf": [
            {"if": {"properties": {"a": {"const": i}}}, "then": {"properties": {"b": {"const": i}}}} for i in range(12)
        ]
    },
    "references": chain(25),
    "elsewhere": {"$ref": "http://127.0.0.1:9/schema"},
    "const": {"const": "x" * 60_000},
    "nothing": {"type": "string", "minLength": 5, "maxLength": 3},
    "kind": {"type": "strnig"},
}
REGEXES: dict[str, str] = {
    "repetitions": "(((a{1,100}){1,100}){1,100}){1,100}",
    "backtracking": "(a|aa)+$",
    "nested": "((((a*)*)*)*)*b",
    "states": "(a|b)*a(a|b){30}",
    "more states": "(.*[a-m].{20}[n-z])|(.*[a-g].{12}[h-z])|([^e]*[f-t].{15})",
    "options": "a?" * 2048,
    "groups": "(" * 2040 + "a" + ")" * 2040,
    "million": "a{1000000}",
    "nothing": "[^\\s\\S]",
    "look-ahead": "(?=a)b",
    "open": "[a",
}
GRAMMARS: dict[str, str] = {
    "bomb": "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1} a{i + 1}" for i in range(30)) + '\na30 ::= "x"',
    "left recursion": 'start: start "a" | "a"',
    "without end": 'start: "a" start',
    "itself": "start: start",
    "ambiguous": 'start: start start | "a" | ""',
    "repetitions": 'start: ((("a"{1,100}){1,100}){1,100}){1,100}',
    "million": 'start: "a"{1000000}',
    "parameters": "start: o::0\no::_: " + " | ".join(f'o::set_bit({i}) "{i}" %if bit_clear({i})' for i in range(20)),
    "counting": 'start: o::0\no::_: o::incr([0:60]) | "a" %if eq([0:60],5000000)',
    "json": 'start: %json {"type": "array", "items": {"type": "integer"}, "maxItems": 1000000000}',
    "lark": "start: " + "%lark {\nstart: " * 30 + '"a"' + "\n}" * 30,
    "out of braces": 'start: "a"\n}\nrule_1: %lark {\nstart: "b"\n',
    "json for lark": '{"grammars": [{"json_schema": {"type": "object"}}]}',
    "no such token": "start: <|there is none|>",
    "no such id": "start: <[99999999]>",
    "any token": "start: <[*]>{1,5}",
    "file": "%import /etc/passwd\nstart: A",
    "options": '%llguidance {"allow_invalid_utf8": true, "no_forcing": true}\nstart: /[a-z]+/',
    "names": 'start: TEXT_1 grammar_1\nTEXT_1: /[a-z]+/\ngrammar_1: "!"',
    "and not": "start: T\nT: /.*a.{10}/ & /.*b.{12}/ & ~/.*c.{9}/",
    "parentheses": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "alternatives": "start: (" + " | ".join(f'"w{i}"' for i in range(5000)) + ")*",
}
FORMS: dict[str, dict[str, Any]] = {
    **{f"schema: {name}": {"json": schema} for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": {"regex": regex} for name, regex in REGEXES.items()},
    **{f"grammar: {name}": {"grammar": grammar} for name, grammar in GRAMMARS.items()},
    "tags": {"structural_tag": tags(250)},
    "too many tags": {"structural_tag": tags(600)},
    "choice": {"choice": [f"choice {i}" for i in range(100_000)]},
    "long choice": {"choice": ["x" * 60_000, "y"]},
    "blanks": {"json": {"type": "array"}, "whitespace_pattern": "(( *)*){1000}"},
    "more than blanks": {"json": {"type": "array"}, "whitespace_pattern": '"'},
    "out of a regex": {"json": {"type": "array"}, "whitespace_pattern": "\\/)/ | /(x"},
}


# Ended for taking too long, as others are, each of which costs two seconds and a process.
SLOW = (
    *("schema: conditions", "schema: const", "schema: names", "schema: enum", "schema: references"),
    *("regex: million", "grammar: bomb", "grammar: parameters", "tags"),
)


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with serve(tmp_path / "log.txt") as running:
        yield running


@contextmanager
def canary(server: Server) -> Iterator[list[float]]:
    """Stream plain completions all the while; the list has the seconds between their pieces."""
    gaps: list[float] = []
    end = threading.Event()
    body = {"model": MODEL, "prompt": "KING", "max_tokens": 30, "temperature": 0, "stream": True}

    def run() -> None:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
            while not end.is_set():
                last = time.monotonic()
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for _ in response.iter_lines():
                        gaps.append(time.monotonic() - last)
                        last = time.monotonic()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield gaps
    finally:
        end.set()
        thread.join()


def processes(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def at_rest(server: Server) -> bool:
    """Whether no request and no block is left, soon."""
    deadline = time.monotonic() + SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while time.monotonic() < deadline:
        if all(server.metric(name) == 0 for name in names):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FORMS]
)
def test_every_form_is_answered_soon(server: Server, name: str) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "seed": 1, "structured_outputs": FORMS[name]}
    status, answer = server.post("/v1/completions", body, timeout=SECONDS)
    assert status in (200, 400), answer
    if status == 400:
        error = answer["error"]
        assert error["param"].startswith("structured_outputs"), error
        assert error["code"] in (
            "array_above_max_length",
            "grammar_too_complex",
            "invalid_grammar",
            "invalid_json_schema",
            "unsupported_json_schema",
        )
        assert len(error["message"]) < 2000


@pytest.mark.slow
def test_nobody_else_notices(server: Server) -> None:
    with canary(server) as gaps:
        for name in ("schema: conditions", "regex: million", "grammar: parameters", "schema: enum", "tags"):
            # Another form each time: what is remembered would be answered at once.
            form = {**FORMS[name], "disable_additional_properties": True}
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "structured_outputs": form}
            assert server.post("/v1/completions", body, timeout=SECONDS)[0] in (200, 400)
    assert len(gaps) > 100
    assert max(gaps) < 5.0
    assert at_rest(server)


def test_errors_found_in_the_engine_are_told_in_the_words_of_the_request(server: Server) -> None:
    schema = {"type": "string", "format": "email", "pattern": "^.*a.{20}$", "minLength": 30, "maxLength": 64}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
    for fields, param in (
        ({"response_format": wanted}, "response_format"),
        ({"guided_grammar": "start: <|there is none|>"}, "guided_grammar"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
    ):
        status, answer = server.post("/v1/chat/completions", {**chat, **fields})
        assert status == 400, answer
        assert answer["error"]["param"].startswith(param)


def send_and_leave(server: Server, body: dict[str, Any], seconds: float, reset: bool) -> None:
    """Send a request and close the connection after a while, with a reset if asked for."""
    data = json.dumps(body).encode()
    url = urlsplit(server.url)
    assert url.hostname is not None
    with socket.create_connection((url.hostname, url.port or 80), timeout=SECONDS) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        time.sleep(seconds)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def use_many(server: Server, count: int, seed: int) -> None:
    """Ask with as many different schemas, and leave now and then."""
    draw = random.Random(seed)
    kinds = ({"type": "string", "maxLength": 30}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "boolean"})
    for number in range(count):
        names = [f"k{seed}_{number}_{index}" for index in range(draw.randint(1, 8))]
        schema = {"properties": {name: draw.choice(kinds) for name in names}, "required": names[:3], "type": "object"}
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 30, "n": draw.choice([1, 3])}
        body["structured_outputs"] = draw.choice([{"json": schema}, {"regex": f".*a.{{12}}(b|c{{{number}}}).*d"}])
        if draw.random() < 0.3:
            send_and_leave(server, {**body, "stream": True}, draw.choice([0, 0.01, 0.05]), draw.random() < 0.5)
        else:
            status, answer = server.post("/v1/completions", body)
            assert status == 200, answer


@pytest.mark.parametrize("count", [4, pytest.param(800, marks=pytest.mark.slow)])
def test_many_forms_and_clients_that_leave_leave_nothing(server: Server, count: int) -> None:
    use_many(server, 8, seed=0)  # processes and threads are started when they are first needed
    assert at_rest(server)
    before = processes(server)
    memory = sum(process.memory_info().rss for process in before)
    files = sum(process.num_fds() for process in before)
    use_many(server, count, seed=count)
    assert at_rest(server)
    after = processes(server)
    assert len(after) <= len(before) + 1
    assert sum(process.num_fds() for process in after) <= files + 20
    assert sum(process.memory_info().rss for process in after) - memory < MAX_GROWTH


@pytest.mark.slow
def test_a_killed_compiler_costs_no_request(own_server: Server) -> None:
    server = own_server
    for number in range(2):
        for process in processes(server):
            ended = process.status() == psutil.STATUS_ZOMBIE  # not noticed yet
            if not ended and "quire.frontend.grammars" in process.cmdline():
                process.kill()
        body = {
            "model": MODEL,
            "prompt": "Hello",
            "max_tokens": 9,
            "structured_outputs": {"regex": f"(ab|c){{{number + 2}}}"},
        }
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
    assert at_rest(server)
