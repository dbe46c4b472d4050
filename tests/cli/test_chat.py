"""`quire chat`: turns, commands, and a server at the other end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quire.cli.chat import Conversation
from quire.errors import QuireError
from tests.cli.conftest import FakeStream


def test_each_line_is_a_turn_that_knows_the_ones_before(quire, fake_llm, type_in):
    type_in("hello", "", "again")
    result = quire("chat", "--system", "be brief", "--temperature", "0")
    assert (result.code, result.err) == (0, "")
    first = "system:be brief|user:hello"
    second = f"{first}|assistant:{first} back|user:again"
    assert result.out == f"{first} back\n{second} back\n"
    assert [params.max_tokens for _, params in fake_llm.requests] == [None, None]
    assert fake_llm.closed and fake_llm.closed_streams == 2


@pytest.mark.parametrize("leave", ["/exit", "/bye"])
def test_commands_are_obeyed_through_a_pipe_and_do_not_reach_the_model(quire, fake_llm, type_in, leave):
    type_in("one", "/reset", "/help", "two", leave, "three")
    quire("chat")
    assert [prompt for prompt, _ in fake_llm.requests] == ["user:one", "user:two"]


def test_at_a_terminal_commands_are_obeyed_and_replies_shown(quire, fake_llm, type_in):
    type_in("hi", "/help", "/reset", "there", tty=True)
    result = quire("chat")
    assert result.code == 0
    assert "user:hi back" in result.out
    assert "forget the conversation" in result.out
    assert [prompt for prompt, _ in fake_llm.requests] == ["user:hi", "user:there"]


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(quire, fake_llm, type_in):
    type_in("\x1b[2Jboo", tty=True)
    result = quire("chat")
    assert "[2Jboo back" in result.out
    assert "\x1b[2J" not in result.out


def test_errors_at_a_terminal_are_shown_and_the_talk_goes_on(quire, fake_llm, type_in, monkeypatch):
    async def refuse(messages):
        raise QuireError("no [red]template[/red]")

    monkeypatch.setattr(fake_llm, "chat_prompt", refuse)
    type_in("one", "two", tty=True)
    result = quire("chat")
    assert result.code == 0
    assert result.out.count("error: no [red]template[/red]") == 2


def test_a_failed_turn_is_forgotten_but_a_broken_off_one_is_kept():
    class Broken:
        name = "p"

        def __init__(self, pieces: list[str]) -> None:
            self.pieces = pieces

        def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
            yield from self.pieces
            raise QuireError("gone")

        def close(self) -> None:
            pass

    conversation = Conversation(None)
    with pytest.raises(QuireError):
        list(conversation.turn("one", Broken([])))
    assert conversation.messages == []
    with pytest.raises(QuireError):
        list(conversation.turn("two", Broken(["a", "b"])))
    assert conversation.messages == [{"role": "user", "content": "two"}, {"role": "assistant", "content": "ab"}]


@pytest.mark.parametrize("tty", [False, True])
def test_an_empty_reply_is_part_of_the_conversation(quire, fake_llm, type_in, monkeypatch, tty):
    async def submit(prompt, params):
        return FakeStream(fake_llm, [1], "" if prompt == "user:one" else prompt, params)

    monkeypatch.setattr(fake_llm, "submit", submit)
    type_in("one", "two", tty=tty)
    result = quire("chat")
    assert result.code == 0
    assert result.out.endswith("\nuser:one|assistant:|user:two\n" + "\n" * tty)


class FakeServer:
    """An OpenAI-style server that streams fixed pieces and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, Any]] = []
        self.status = 200
        self.broken = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append((self.path, self.headers["authorization"], None))
                self._answer(json.dumps({"data": [{"id": "m1"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.asked.append((self.path, self.headers["authorization"], body))
                if fake.status != 200:
                    self._answer(b'{"error": {"message": "no such model"}}')
                    return
                events = [{"choices": [{"delta": {"content": text}}]} for text in ("", "Good", " day")]
                events += [{"error": {"message": "the engine died"}}] if fake.broken else [{"choices": []}]
                stream = b": keep-alive\n\n" + b"".join(b"data: %s\n\n" % json.dumps(item).encode() for item in events)
                self._answer(stream + b"data: [DONE]\n\n")

            def _answer(self, body: bytes) -> None:
                self.send_response(fake.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_a_server_is_talked_to_with_its_first_model_and_the_key(quire, fake_server, type_in):
    type_in("hello", "more")
    result = quire("chat", "--url", fake_server.url, "--api-key", "k", "--top-p", "0.5", "--sampling-seed", "3")
    assert (result.code, result.out, result.err) == (0, "Good day\nGood day\n", "")
    models, first, second = fake_server.asked
    assert models == ("/v1/models", "Bearer k", None)
    assert first[:2] == ("/v1/chat/completions", "Bearer k")
    assert first[2] == {
        "model": "m1",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "top_p": 0.5,
        "seed": 3,
    }
    assert second[2]["messages"][1] == {"role": "assistant", "content": "Good day"}


def test_the_address_of_a_server_will_do(quire, fake_server, type_in):
    type_in("hello")
    assert quire("chat", "--url", fake_server.url.removesuffix("v1")).out == "Good day\n"
    assert [path for path, _, _ in fake_server.asked] == ["/v1/models", "/v1/chat/completions"]


def test_a_refusal_of_the_server_ends_the_command(quire, fake_server, type_in):
    type_in("hello")
    fake_server.status = 404
    result = quire("chat", "nope", "--url", fake_server.url)
    assert result.code == 2
    assert "404: no such model" in result.err


def test_an_error_in_the_stream_is_reported(quire, fake_server, type_in):
    type_in("hello")
    fake_server.broken = True
    result = quire("chat", "--url", fake_server.url)
    assert (result.code, result.err) == (1, "error: the engine died\n")


def test_an_unreachable_server_is_reported(quire, type_in):
    type_in("hello")
    result = quire("chat", "--url", "http://127.0.0.1:9/v1")
    assert result.code == 1
    assert result.err.startswith("error: 127.0.0.1:9: no answer")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--url", "ftp://x/v1"], "must look like"),
        (["--url", "http://x:99999/v1"], "bad port"),
        (["--url", "http://127.0.0.1:9/v1", "--dtype", "float32"], "dtype contradicts url"),
        (["--api-key", "k"], "api_key"),
        (["--n", "2"], "unknown option --n"),
    ],
)
def test_contradictions_end_with_code_2(quire, type_in, words, part):
    type_in("hello")
    result = quire("chat", *words)
    assert result.code == 2
    assert part in result.err
