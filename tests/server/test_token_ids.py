"""Errors about token ids name what the client sent: an id of a list of ids, or the whole of a text or conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer
from tests.server.checks import CHAT, COMPLETIONS, HI

SMALL = 20  # tokens of the model; the tokenizer knows all bytes
LONG = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *HI]


@pytest.fixture(scope="module")
def small() -> Iterator[LiveServer]:
    """A server of a model with fewer tokens than its tokenizer."""
    live = LiveServer()
    live.llm.processor.vocab_size = SMALL
    yield live
    live.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [5, 6, SMALL]}, "prompt[2]"),
        (COMPLETIONS, {"prompt": [[5, 6], [5, 6, SMALL, 7]]}, "prompt[1][2]"),
        (COMPLETIONS, {"prompt": "hello"}, "prompt"),
        (COMPLETIONS, {"prompt": ["hello", "world"]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": "hello", "add_special_tokens": False}, "prompt"),
        (CHAT, {"messages": LONG}, "messages"),
        (CHAT, {"messages": LONG, "add_special_tokens": True}, "messages"),
        ("/v1/messages", {"messages": LONG}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/responses", {"input": "hello"}, "input"),
        ("/detokenize", {"tokens": [1, 2, SMALL]}, "tokens[2]"),
    ],
)
def test_an_id_outside_the_vocabulary(small: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    tokens = {} if path == "/detokenize" else {"max_output_tokens" if "responses" in path else "max_tokens": 4}
    answer = small.http.post(path, json={"model": "fake", **tokens, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["message"].startswith(f"{param}: token id ") and error["message"].endswith(f" >= vocab {SMALL}")
    assert error.get("param", param) == param
