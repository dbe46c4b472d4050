"""Bad requests to the other APIs, row by row: responses (R), Anthropic's (M), Ollama's (O), files of requests (L)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.cli.main import main
from tests.helpers.fake_engine import fake_async_llm
from tests.helpers.live_server import LiveServer
from tests.robustness.rows import table_batches, table_dialects, table_responses
from tests.robustness.rows.row import (
    Row,
    ask,
    check_answer,
    check_discreet,
    check_message,
    check_numbers,
    check_unharmed,
    title,
)


@pytest.mark.parametrize("row", table_responses.ROWS, ids=title)
def test_table_r_responses(server: LiveServer, sung: str, row: Row) -> None:
    check_answer(ask(server, row), row)
    check_unharmed(server, sung)


def check_head(response: httpx.Response, row: Row) -> Any:
    """Check what all errors have in common; return the body."""
    assert response.status_code == row.status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    check_discreet(response.content)
    return response.json()


@pytest.mark.parametrize("row", table_dialects.MESSAGE_ROWS, ids=title)
def test_table_m_messages(server: LiveServer, sung: str, row: Row) -> None:
    response = ask(server, row)
    body = check_head(response, row)
    message = body["error"]["message"]
    assert body == {
        "type": "error",
        "error": {"type": row.code, "message": message},
        "request_id": response.headers["request-id"],
    }
    check_message(message, row)
    check_unharmed(server, sung)


@pytest.mark.parametrize("row", table_dialects.CHAT_ROWS, ids=title)
def test_table_o_chats(server: LiveServer, sung: str, row: Row) -> None:
    body = check_head(ask(server, row), row)
    assert set(body) == {"error"}
    check_message(body["error"], row)
    check_unharmed(server, sung)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All lines as one file, between two that are good: what comes out, by number of the line."""
    folder = tmp_path_factory.mktemp("batch")
    body = {"model": "quire-demo", "prompt": "a", "max_tokens": 2, "seed": 1}
    good = {"custom_id": "first", "method": "POST", "url": table_batches.URL, "body": body}
    lines = [json.dumps(good), *(row.text for row in table_batches.ROWS), json.dumps({**good, "custom_id": "last"})]
    (folder / "in").write_text("\n".join(lines))
    clients = []

    def open_fake(config: Any) -> Any:
        llm, client = fake_async_llm(config=config)
        clients.append(client)
        return llm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.cli.offline.open_async_llm", open_fake)
        assert main(["run-batch", "-i", str(folder / "in"), "-o", str(folder / "out")]) == 1
    assert [client.closed for client in clients] == [True]
    found = [json.loads(line) for line in Path(folder / "out").read_text().splitlines()]
    assert len(found) == len(lines)
    assert found[0]["response"]["body"]["choices"] == found[-1]["response"]["body"]["choices"]
    return {row.name: result for row, result in zip(table_batches.ROWS, found[1:-1], strict=True)}


@pytest.mark.parametrize("row", table_batches.ROWS, ids=lambda row: f"{row.name} {row.what}")
def test_table_l_lines(results: dict[str, Any], row: table_batches.Line) -> None:
    result = results[row.name]
    if row.status:
        assert result["error"] is None
        assert result["response"]["status_code"] == row.status
        error = result["response"]["body"]["error"]
        assert error["type"] == "invalid_request_error"
    else:
        assert result["response"] is None
        error = result["error"]
        assert error["message"].startswith(f"line {error['line']}: ")
    assert (error["code"], error["param"]) == (row.code, row.param)
    check_discreet(json.dumps(error).encode())


def test_no_row_is_missing() -> None:
    check_numbers(table_responses.ROWS, "R", 18)
    check_numbers(table_dialects.MESSAGE_ROWS, "M", 18)
    check_numbers(table_dialects.CHAT_ROWS, "O", 18)
    assert {row.name.rstrip("b") for row in table_batches.ROWS} == {f"L{number}" for number in range(1, 18)}
