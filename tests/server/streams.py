"""What a client makes of a streamed chat: its events, and the answer they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx

from tests.helpers.live_server import LiveServer


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream, which must end well."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], text[-2000:]
    return [json.loads(item.removeprefix("data: ")) for item in events[:-2]]


def stream(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a request that is streamed, having checked their frame."""
    response = server.http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return parse_events(response.text)


def stream_events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a chat that is streamed."""
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False, verify=False)
    assert response.status_code == 200, response.text
    return parse_events(response.text)


def add_up(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what the chunks of a chat add up to, in the form of an answer that is not streamed.

    Checks the order of things: one role per choice, first; no empty deltas but in the last chunk; one reason of the
    end per choice, in its last chunk; a call's id, type and name in its first piece only.
    """
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {"usage": None}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        if not chunk["choices"]:
            answer["usage"] = chunk["usage"]
            continue
        [part] = chunk["choices"]
        index = part["index"]
        if index not in choices:
            assert part["delta"]["role"] == "assistant"
            assert part["finish_reason"] is None
            message = {"role": "assistant", "content": part["delta"]["content"], "refusal": None}
            choices[index] = {"index": index, "message": message, "logprobs": None, "finish_reason": None}
            continue
        choice = choices[index]
        assert choice["finish_reason"] is None, "nothing comes behind the end"
        assert len(part["delta"]) == 1 or (part["finish_reason"] and not part["delta"]), part
        add_deltas(choice["message"], [part["delta"]], last=bool(part["finish_reason"]))
        if part["logprobs"] is not None:
            known = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"] = {**known, "content": known["content"] + part["logprobs"]["content"]}
        choice["finish_reason"] = part["finish_reason"]
        if part["finish_reason"]:
            choice["stop_reason"] = part["stop_reason"]
    assert all(choice["finish_reason"] for choice in choices.values())
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


def add_deltas(message: dict[str, Any], deltas: Iterable[dict[str, Any]], *, last: bool = False) -> None:
    """Add deltas to a message, and check that each says something; `last`: only content may be empty."""
    for delta in deltas:
        for name in ("reasoning", "content"):
            if name in delta:
                assert delta[name] or last
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            _add_call(message.setdefault("tool_calls", []), piece)


def _add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    if piece["index"] == len(calls):
        assert set(piece) == {"index", "id", "type", "function"}
        assert piece["function"]["arguments"] == ""
        function = dict(piece["function"])
        calls.append({"id": piece["id"], "type": piece["type"], "function": function})
    else:
        assert set(piece) == {"index", "function"}
        assert set(piece["function"]) == {"arguments"}
        assert piece["function"]["arguments"]
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
