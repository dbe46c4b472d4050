"""`quire run-batch`: files of requests in OpenAI's batch format."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.errors import EngineDeadError
from quire.frontend.async_llm import AsyncLLM
from tests.helpers.fake_engine import FakeClient, fake_async_llm

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "quire-demo"


class Engine:
    """The fake engines that commands have opened."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {"reply_text": "hello world"}
        self.configs: list[Any] = []
        self.clients: list[FakeClient] = []
        self.dead = False

    def open(self, config: Any) -> AsyncLLM:
        llm, client = fake_async_llm(config=config, **self.options)
        self.configs.append(config)
        self.clients.append(client)
        if self.dead:
            client.die()
        return llm


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine()
    monkeypatch.setattr("quire.cli.offline.open_async_llm", made.open)
    yield made
    assert all(client.closed for client in made.clients)


@pytest.fixture
def batch(quire: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Run a batch of lines; the result has the lines of output."""

    def run(lines: list[Any], *words: str) -> Any:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        source.write_text("\n".join(texts))
        result = quire("run-batch", "-i", str(source), "-o", str(target), *words)
        result.lines = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else None
        return result

    return run


def line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **content, **body}}


def test_requests_are_answered_in_order(batch: Any, engine: Engine) -> None:
    result = batch([line("a", CHAT), "", line("b"), line("c", "/v1/responses", prompt=None, input="hi")])
    assert (result.code, result.out, result.err) == (0, "", "3 requests done\n")
    first, second, third = result.lines
    assert [item["custom_id"] for item in result.lines] == ["a", "b", "c"]
    assert len({item["id"] for item in result.lines}) == 3
    for item in result.lines:
        assert item["error"] is None
        assert item["response"]["status_code"] == 200
        assert item["response"]["request_id"]
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "hello world"
    assert second["response"]["body"]["choices"][0]["text"] == "hello world"
    assert third["response"]["body"]["object"] == "response"
    assert engine.configs[0].server.engine == "inline"


BAD: list[tuple[Any, str, str | None, str | None]] = [
    ("{", "invalid_json", None, None),
    ("[]", "invalid_type", None, None),
    ("[" * 100_000, "invalid_json", None, None),
    ({"method": "POST"}, "missing_required_parameter", "custom_id", None),
    (r'{"custom_id": "\ud800"}', "invalid_value", "custom_id", None),
    ({**line("x0"), "\ud800": 1}, "unknown_parameter", "line.\\ud800", "x0"),
    ({**line("x1"), "custom_id": 5}, "invalid_type", "custom_id", None),
    ({**line("x2"), "custom_id": "x" * 513}, "string_above_max_length", "custom_id", None),
    ({**line("x3"), "method": "GET"}, "invalid_value", "method", "x3"),
    ({**line("x4"), "url": "/v1/nope"}, "unknown_url", "url", "x4"),
    ({**line("x5"), "url": "http://example.com/v1/completions"}, "unknown_url", "url", "x5"),
    ({**line("x6"), "body": None}, "missing_required_parameter", "body", "x6"),
    ({**line("x7"), "body": "{}"}, "invalid_type", "body", "x7"),
    ({**line("x8"), "bdoy": 1}, "unknown_parameter", "line.bdoy", "x8"),
    (line("x9", stream=True), "unsupported_parameter", "body.stream", "x9"),
    (line("x10", "/v1/responses", background=True), "unsupported_parameter", "body.background", "x10"),
    (line("first"), "duplicate_custom_id", "custom_id", "first"),
]


def test_bad_lines_are_named_and_the_others_go_on(batch: Any, engine: Engine) -> None:
    result = batch([line("first"), *[bad for bad, *_ in BAD], line("last")])
    assert result.code == 1
    assert result.err.endswith(f"error: {len(BAD)} of {len(BAD) + 2} requests failed; their lines say why\n")
    first, *bad, last = result.lines
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    for number, (item, (_, code, param, custom_id)) in enumerate(zip(bad, BAD, strict=True), 2):
        assert item["response"] is None
        assert (item["error"]["code"], item["error"]["param"], item["custom_id"]) == (code, param, custom_id), item
        assert item["error"]["line"] == number
        assert item["error"]["message"].startswith(f"line {number}: ")


def test_what_the_server_refuses_has_its_answer(batch: Any, engine: Engine) -> None:
    result = batch(
        [line("a", temperature=-1), line("b", model="nope"), line("c", "/v1/embeddings", prompt=None, input="x")]
    )
    assert result.code == 1
    got = [(item["response"]["status_code"], item["response"]["body"]["error"]["code"]) for item in result.lines]
    assert got == [(400, "decimal_below_min_value"), (404, "model_not_found"), (400, "unsupported_endpoint")]
    assert all(item["error"] is None for item in result.lines)


def test_many_requests_run_together_but_not_too_many(batch: Any, engine: Engine) -> None:
    most = 0

    def reply(request: Any) -> list[int]:
        nonlocal most
        most = max(most, len(engine.clients[0].engine.live) + 1)
        return [5] * 50

    engine.options = {"reply": reply}
    result = batch([line(str(number), max_tokens=20) for number in range(40)], "--max-concurrency", "3")
    assert result.code == 0
    assert [item["custom_id"] for item in result.lines] == [str(number) for number in range(40)]
    assert most == 3


def test_requests_for_which_there_is_no_room_are_asked_again(batch: Any, engine: Engine, monkeypatch: Any) -> None:
    monkeypatch.setattr("quire.server.batches.lines.LONGEST_WAIT", 0.0)
    result = batch([line(str(number)) for number in range(3)], "--max-concurrency", "3", "--max-num-queued-reqs", "1")
    assert result.code == 0, result.lines


def test_a_request_of_many_prompts_finds_room(batch: Any, engine: Engine) -> None:
    result = batch([line("a", prompt=["x"] * 200, max_tokens=1)], "--max-num-seqs", "2")
    assert result.code == 0, result.lines


def test_a_dead_engine_ends_the_batch(batch: Any, engine: Engine) -> None:
    engine.dead = True
    result = batch([line("a")])
    assert result.code == EngineDeadError.exit_code
    assert result.err.splitlines()[-1].startswith("error: the engine process ended")


def test_a_line_that_is_too_long(batch: Any, engine: Engine) -> None:
    result = batch([line("a", prompt="x" * (9 * 2**20)), line("b")])
    first, second = result.lines
    assert (first["error"]["code"], first["custom_id"]) == ("request_too_large", None)
    assert second["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "input: give a file with -i, or - for standard input"),
        (("-i", "x"), "output: give a file with -o, or - for standard output"),
        (("-i", "nope.jsonl", "-o", "-"), "input: cannot read 'nope.jsonl': No such file or directory"),
        (("-i", ".", "-o", "-"), "input: cannot read '.': Is a directory"),
        (("-i", "x", "-o", "-", "--max-concurrency", "0"), "argument --max-concurrency: must be >= 1, got 0"),
    ],
)
def test_bad_options(quire: Any, engine: Engine, words: tuple[str, ...], message: str) -> None:
    result = quire("run-batch", *words)
    assert result.code == 2
    assert message.split(":")[0] in result.err and result.err.count("\n") == 1
    assert message in result.err or "max-concurrency" in message
    assert not engine.clients


def test_output_that_is_the_input_or_cannot_be_written(quire: Any, engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line("a")))
    assert quire("run-batch", "-i", str(source), "-o", str(source)).code == 2
    assert source.read_text(), "untouched"
    result = quire("run-batch", "-i", str(source), "-o", str(tmp_path / "no" / "out.jsonl"))
    assert (result.code, result.err.count("\n")) == (2, 1)


def test_standard_input_and_output(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source = io.TextIOWrapper(io.BytesIO(json.dumps(line("a")).encode()))
    target = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", source)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(target))
    assert main(["run-batch", "-i", "-", "-o", "-"]) == 0
    [result] = [json.loads(item) for item in target.getvalue().splitlines()]
    assert result["response"]["status_code"] == 200


def test_an_empty_file_is_an_empty_batch(batch: Any, engine: Engine) -> None:
    result = batch([])
    assert (result.code, result.lines, result.err) == (0, [], "0 requests done\n")
