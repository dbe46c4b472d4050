"""POST /api/chat and /api/generate: what requests become, and what answers and streams look like."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import HI, prompt_of
from tests.server.responses.asking import says

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": 3}}\n</tool_call>'
THOUGHT = "<think>\nhmm yes\n</think>\n\n"
COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


def ask(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    response = server.http.post(path, json={"model": "fake", **fields})
    assert response.status_code == 200, response.text
    return response


def parts_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the objects of a stream; all but the last one are not done."""
    assert response.headers["content-type"] == "application/x-ndjson"
    parts = [json.loads(line) for line in response.text.splitlines()]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    return parts


def test_a_chat(plain: LiveServer) -> None:
    answer = ask(plain, "/api/chat", messages=HI, stream=False).json()
    assert answer["model"] == "fake"
    assert answer["created_at"].endswith("Z")
    assert answer["message"] == {"role": "assistant", "content": "hello world"}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (21, 4)
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in COUNTS)
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"]


def test_streams_are_what_clients_get_unless_they_say_otherwise(plain: LiveServer) -> None:
    *parts, last = parts_of(ask(plain, "/api/chat", messages=HI))
    assert "".join(part["message"]["content"] for part in parts) == "hello world"
    assert len(parts) > 1
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done_reason"], last["eval_count"]) == ("stop", 4)
    assert set(COUNTS) <= set(last)


@pytest.mark.parametrize("raw", [False, True])
def test_prompts(plain: LiveServer, raw: bool) -> None:
    system = {} if raw else {"system": "be"}
    answer = ask(plain, "/api/generate", prompt="hi", raw=raw, stream=False, **system).json()
    assert answer["response"] == "hello world"
    assert answer["done_reason"] == "stop"
    assert prompt_of(plain) == (
        "hi" if raw else "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    *parts, last = parts_of(ask(plain, "/api/generate", prompt="hi", raw=raw))
    assert "".join(part["response"] for part in parts) == "hello world"
    assert last["response"] == "" and last["eval_count"] == 4


@pytest.mark.parametrize(("path", "field"), [("/api/chat", "message"), ("/api/generate", "response")])
def test_without_a_prompt_the_model_is_only_loaded(plain: LiveServer, path: str, field: str) -> None:
    answer = ask(plain, path, keep_alive="5m").json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert answer[field] in ("", {"role": "assistant", "content": ""})


def test_a_text_that_is_cut_off(plain: LiveServer) -> None:
    answer = ask(plain, "/api/chat", messages=HI, stream=False, options={"num_predict": 2}).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("hello wor", "length")


def test_options(plain: LiveServer) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "typical_p": 0.8,
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "seed": 11,
        "stop": ["x"],
        "num_predict": 5,
        "num_ctx": 256,
        "mirostat": 0,
        "tfs_z": 1.0,
        "num_thread": None,
        "num_gpu": -1,
        "num_batch": 512,
        "num_keep": 4,
        "use_mmap": True,
        "vocab_only": False,
    }
    for path, fields in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "a", "raw": True})):
        ask(plain, path, options=options, **fields)
        params = plain.engine.added[-1].sampling_params
        got = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")}
        assert got == {name: options[name] for name in got}
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.3, 0.4)
        assert plain.engine.added[-1].max_tokens == 5


def test_penalties_over_no_token_are_none(plain: LiveServer) -> None:
    ask(plain, "/api/chat", messages=HI, options={"repeat_last_n": 0, "repeat_penalty": 1.5})
    assert plain.engine.added[-1].sampling_params.repetition_penalty == 1.0


def test_texts_may_go_on_to_the_end_of_the_context(make_server: MakeServer) -> None:
    server = make_server()
    for path, fields in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "ab", "raw": True})):
        for options in ({}, {"num_predict": -1}, {"num_predict": -2}):
            answer = ask(server, path, stream=False, options=options, **fields).json()
            assert answer["prompt_eval_count"] + answer["eval_count"] == 256


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_forms(plain: LiveServer, form: Any) -> None:
    for path, fields in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "a", "raw": True})):
        ask(plain, path, format=form, options={"num_predict": 1}, **fields)
        assert plain.engine.added[-1].grammar is not None


def test_thinking_and_tools(family: LiveServer) -> None:
    says(family, THOUGHT + "let me\n" + CALL + CALL)
    whole = ask(family, "/api/chat", messages=HI, tools=[TOOL], think=True, stream=False).json()["message"]
    assert (whole["thinking"], whole["content"]) == ("hmm yes", "let me")
    calls = [call["function"] for call in whole["tool_calls"]]
    assert calls == [{"index": index, "name": "look", "arguments": {"at": "x", "n": 3}} for index in range(2)]
    parts = parts_of(ask(family, "/api/chat", messages=HI, tools=[TOOL]))
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hmm yes"
    streamed = [call["function"] for part in parts for call in part["message"].get("tool_calls", ())]
    assert streamed == calls


def test_thinking_of_prompts(family: LiveServer) -> None:
    says(family, THOUGHT + "yes")
    answer = ask(family, "/api/generate", prompt="hi", stream=False).json()
    assert (answer["thinking"], answer["response"]) == ("hmm yes", "yes")


def test_results_of_tools_find_their_calls(family: LiveServer) -> None:
    says(family, "done")
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("look", "see", "look")]
    messages = [*HI, {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "seen", "tool_name": "see"}, {"role": "tool", "content": "first"}]
    messages += [{"role": "tool", "content": "second", "tool_name": "look"}]
    ask(family, "/api/chat", messages=messages, tools=[TOOL])
    prompt = prompt_of(family)
    assert prompt.count("<|im_start|>tool\n") == 3
    assert prompt.index("seen") < prompt.index("first") < prompt.index("second")


def test_the_last_message_goes_on(plain: LiveServer) -> None:
    ask(plain, "/api/chat", messages=[*HI, {"role": "assistant", "content": "the answer is"}])
    assert prompt_of(plain).endswith("<|im_start|>assistant\nthe answer is")


def test_what_it_tells_of_models(family: LiveServer) -> None:
    says(family, "yes")
    [entry] = family.http.get("/api/tags").json()["models"]
    assert (entry["name"], entry["model"], entry["details"]["family"]) == ("fake", "fake", "llama")
    assert len(entry["digest"]) == 64 and entry["size"] >= 0
    [running] = family.http.get("/api/ps").json()["models"]
    assert running["digest"] == entry["digest"]
    assert running["context_length"] == 4096
    for name in ("fake", "fake:latest"):
        shown = family.http.post("/api/show", json={"model": name}).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["llama.context_length"] == 4096
        assert "<|im_start|>" in shown["template"]
    assert family.http.get("/api/version").json()["version"]
    ask(family, "/api/chat", messages=HI, model="fake:latest")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize("browser", [{}, {"origin": "http://elsewhere"}, {"sec-fetch-site": "cross-site"}])
def test_other_programs_than_browsers_need_not_say_that_it_is_json(
    plain: LiveServer, kind: str | None, browser: dict[str, str]
) -> None:
    headers = {**browser, **({} if kind is None else {"content-type": kind})}
    body = json.dumps({"model": "fake", "prompt": "hi", "stream": False}).encode()
    response = plain.http.post("/api/generate", content=body, headers=headers)
    assert response.status_code == (415 if browser else 200)
    assert plain.http.post("/v1/completions", content=body, headers=headers).status_code == 415
