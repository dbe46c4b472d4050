"""Bad requests, one line each: what comes back is an OpenAI error object, the server goes on, nothing leaks.

The tables follow the project's list of hostile inputs: protocol level, completions, chat, tokenization.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import CHAT, COMPLETIONS, DETOKENIZE, HI, JSON, TOKENIZE, VOCAB, check_error, post

BODIES: dict[str, tuple[bytes, str, str | None]] = {
    "1 cut": (b'{"model":', "invalid_json", None),
    "2 empty": (b"", "invalid_json", None),
    "3 null": (b"null", "invalid_type", None),
    "3 list": (b"[]", "invalid_type", None),
    "3 string": (b'"x"', "invalid_type", None),
    "3 number": (b"1", "invalid_type", None),
    "4 not UTF-8": (b'{"model":"fake","prompt":"\xff\xfe"}', "invalid_json", None),
    "5 UTF-16": ('{"model":"fake","prompt":"a"}'.encode("utf-16"), "invalid_json", None),
    "7 lone surrogate": (rb'{"model":"fake","prompt":"a\ud800"}', "invalid_value", "prompt"),
    "9 NaN": (b'{"model":"fake","prompt":"a","temperature":NaN}', "invalid_json", None),
    "9 Infinity": (b'{"model":"fake","prompt":"a","temperature":-Infinity}', "invalid_json", None),
    "10 float overflow": (
        b'{"model":"fake","prompt":"a","temperature":1e400}',
        "decimal_above_max_value",
        "temperature",
    ),
    "11 NaN within": (b'{"model":"fake","prompt":"a","logit_bias":{"5":NaN}}', "invalid_json", None),
    "12 deep lists": (b"[" * 100_000, "invalid_json", None),
    "13 deep objects": (
        b'{"model":"fake","prompt":"a","x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        "invalid_json",
        None,
    ),
    "13 just too deep": (
        b'{"model":"fake","prompt":"a","metadata":' + b"[" * 65 + b"]" * 65 + b"}",
        "invalid_json",
        None,
    ),
    "14 seed of 5000 digits": (
        b'{"model":"fake","prompt":"a","seed":' + b"9" * 5000 + b"}",
        "integer_above_max_value",
        "seed",
    ),
    "14 negative": (
        b'{"model":"fake","prompt":"a","seed":-' + b"9" * 5000 + b"}",
        "integer_below_min_value",
        "seed",
    ),
    "surrogate in a name": (rb'{"model":"fake","prompt":"a","\ud800":1}', "unknown_parameter", r"\ud800"),
    "surrogate in the model": (rb'{"model":"\ud800","prompt":"a"}', "model_not_found", "model"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(server: LiveServer, name: str) -> None:
    body, code, param = BODIES[name]
    check_error(post(server, COMPLETIONS, body), 404 if code == "model_not_found" else 400, code, param)


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model":"fake","prompt":"a"}',
        rb'{"model":"fake","prompt":"a\u0000b"}',
        b'{"model":"nope","model":"fake","prompt":"a"}',
        b'{"model":"fake","prompt":"a","metadata":' + b"[" * 63 + b"]" * 63 + b"}",
    ],
    ids=["6 byte order mark", "8 NUL", "15 last duplicate wins", "64 levels"],
)
def test_bodies_that_are_odd_but_fine(server: LiveServer, body: bytes) -> None:
    assert post(server, COMPLETIONS, body).status_code == 200


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"content-type": "text/plain"}, b"{}", 415, "unsupported_content_type"),
        ({"content-type": "application/x-www-form-urlencoded"}, b"{}", 415, "unsupported_content_type"),
        ({"content-type": ""}, b"{}", 415, "unsupported_content_type"),
        ({**JSON, "content-encoding": "gzip"}, gzip.compress(b"{}", mtime=0), 415, "unsupported_content_encoding"),
    ],
)
def test_headers_of_the_body(
    server: LiveServer, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    check_error(server.http.post(COMPLETIONS, headers=headers, content=content), status, code)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_content_types_of_json(server: LiveServer, kind: str) -> None:
    body = b'{"model":"fake","prompt":"a"}'
    assert server.http.post(COMPLETIONS, headers={"content-type": kind}, content=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", COMPLETIONS, 405, "method_not_supported"),
        ("PUT", CHAT, 405, "method_not_supported"),
        ("POST", "/health", 405, "method_not_supported"),
        ("POST", "/v1/nope", 404, "unknown_url"),
        ("GET", "/nope", 404, "unknown_url"),
        ("POST", COMPLETIONS + "/", 404, "unknown_url"),
        ("POST", "/V1/completions", 404, "unknown_url"),
        ("GET", "/%1b[2J%0a", 404, "unknown_url"),
        ("OPTIONS", COMPLETIONS, 405, "method_not_supported"),
    ],
)
def test_routes_that_do_not_exist(server: LiveServer, method: str, path: str, status: int, code: str) -> None:
    response = server.http.request(method, path, headers={"origin": "http://evil"})
    check_error(response, status, code)
    assert "access-control-allow-origin" not in response.headers
    if status == 405:
        assert "GET" in response.headers["allow"] or "POST" in response.headers["allow"]


def test_a_body_over_the_limit_is_refused_by_its_length(server: LiveServer) -> None:
    check_error(post(server, COMPLETIONS, b" " * (2**20 + 1)), 413, "request_too_large")


def test_a_body_without_length_is_refused_where_the_limit_is(server: LiveServer) -> None:
    chunks = iter([b" " * 65536] * 64)
    check_error(server.http.post(COMPLETIONS, content=chunks, headers=JSON), 413, "request_too_large")


def test_unknown_models_and_known_ones(server: LiveServer) -> None:
    check_error(server.http.get("/v1/models/nope"), 404, "model_not_found", "model")
    check_error(server.http.get("/v1/models/a/b/../c"), 404, "model_not_found", "model")
    assert server.http.get("/v1/models/fake").json()["id"] == "fake"
    assert [item["id"] for item in server.http.get("/v1/models").json()["data"]] == ["fake"]


COMPLETION_ROWS: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "26 no model": ({"model": None}, 400, "missing_required_parameter", "model"),
    "27 model": ({"model": 5}, 400, "invalid_type", "model"),
    "28 unknown model": ({"model": "nope"}, 404, "model_not_found", "model"),
    "29 path as model": ({"model": "../../etc/passwd"}, 404, "model_not_found", "model"),
    "30 no prompt": ({"prompt": None}, 400, "missing_required_parameter", "prompt"),
    "31 empty prompt": ({"prompt": ""}, 400, "empty_array", "prompt"),
    "32 no prompts": ({"prompt": []}, 400, "empty_array", "prompt"),
    "33 empty text": ({"prompt": [""]}, 400, "empty_array", "prompt[0]"),
    "33 empty ids": ({"prompt": [[]]}, 400, "empty_array", "prompt[0]"),
    "33 second empty": ({"prompt": ["a", ""]}, 400, "empty_array", "prompt[1]"),
    "34 object": ({"prompt": {"a": 1}}, 400, "invalid_type", "prompt"),
    "34 number": ({"prompt": 5}, 400, "invalid_type", "prompt"),
    "35 mixed": ({"prompt": ["a", 1]}, 400, "invalid_type", "prompt[1]"),
    "36 booleans": ({"prompt": [True, False]}, 400, "invalid_type", "prompt[0]"),
    "37 float id": ({"prompt": [1.5]}, 400, "invalid_type", "prompt[0]"),
    "37 null id": ({"prompt": [5, None]}, 400, "invalid_type", "prompt[1]"),
    "38 negative id": ({"prompt": [-1]}, 400, "invalid_value", "prompt[0]"),
    "39 id == vocab": ({"prompt": [5, VOCAB]}, 400, "invalid_value", "prompt[1]"),
    "39 in a list of lists": ({"prompt": [[5], [5, VOCAB]]}, 400, "invalid_value", "prompt[1][1]"),
    "40 id 2^63": ({"prompt": [2**63]}, 400, "invalid_value", "prompt[0]"),
    "41 too long": ({"prompt": [5] * 2000}, 400, "context_length_exceeded", "prompt"),
    "42 exactly the context": ({"prompt": [5] * 256}, 400, "context_length_exceeded", "prompt"),
    "44 long text": ({"prompt": "x" * 900_000}, 400, "context_length_exceeded", "prompt"),
    "44 second text": ({"prompt": ["a", "x" * 900_000]}, 400, "context_length_exceeded", "prompt[1]"),
    "45 many prompts": ({"prompt": ["a"] * 1025}, 400, "array_above_max_length", "prompt"),
    "46 max_tokens 0": ({"max_tokens": 0}, 400, "integer_below_min_value", "max_tokens"),
    "47 max_tokens -1": ({"max_tokens": -1}, 400, "integer_below_min_value", "max_tokens"),
    "49 max_tokens 2^70": ({"max_tokens": 2**70}, 400, "integer_above_max_value", "max_tokens"),
    "50 max_tokens text": ({"max_tokens": "5"}, 400, "invalid_type", "max_tokens"),
    "51 max_tokens float": ({"max_tokens": 5.5}, 400, "invalid_type", "max_tokens"),
    "52 max_tokens true": ({"max_tokens": True}, 400, "invalid_type", "max_tokens"),
    "53 temperature low": ({"temperature": -0.1}, 400, "decimal_below_min_value", "temperature"),
    "54 temperature high": ({"temperature": 2.1}, 400, "decimal_above_max_value", "temperature"),
    "55 temperature text": ({"temperature": "hot"}, 400, "invalid_type", "temperature"),
    "55 temperature true": ({"temperature": True}, 400, "invalid_type", "temperature"),
    "55 temperature 10^400": ({"temperature": 10**400}, 400, "decimal_above_max_value", "temperature"),
    "56 top_p 0": ({"top_p": 0}, 400, "decimal_below_min_value", "top_p"),
    "56 top_p high": ({"top_p": 1.1}, 400, "decimal_above_max_value", "top_p"),
    "56 top_p low": ({"top_p": -1}, 400, "decimal_below_min_value", "top_p"),
    "57 top_k float": ({"top_k": 1.5}, 400, "invalid_type", "top_k"),
    "57 top_k -2": ({"top_k": -2}, 400, "integer_below_min_value", "top_k"),
    "58 top_k 2^70": ({"top_k": 2**70}, 400, "integer_above_max_value", "top_k"),
    "59 presence_penalty": ({"presence_penalty": 3}, 400, "decimal_above_max_value", "presence_penalty"),
    "59 frequency_penalty": ({"frequency_penalty": -3}, 400, "decimal_below_min_value", "frequency_penalty"),
    "60 repetition_penalty 0": ({"repetition_penalty": 0}, 400, "decimal_below_min_value", "repetition_penalty"),
    "61 repetition_penalty": ({"repetition_penalty": 1e308}, 400, "decimal_above_max_value", "repetition_penalty"),
    "min_p": ({"min_p": 1.5}, 400, "decimal_above_max_value", "min_p"),
    "62 n 0": ({"n": 0}, 400, "integer_below_min_value", "n"),
    "62 n -1": ({"n": -1}, 400, "integer_below_min_value", "n"),
    "63 n": ({"n": 100_000}, 400, "integer_above_max_value", "n"),
    "65 best_of": ({"best_of": 1_000_000}, 400, "integer_above_max_value", "best_of"),
    "65 best_of 0": ({"best_of": 0}, 400, "integer_below_min_value", "best_of"),
    "65 best_of true": ({"best_of": True}, 400, "invalid_type", "best_of"),
    "65 best_of below n": ({"n": 3, "best_of": 2}, 400, "invalid_value", "best_of"),
    "65 best_of, greedy": ({"best_of": 2, "temperature": 0}, 400, "invalid_value", "best_of"),
    "65 best_of, streamed": ({"best_of": 2, "stream": True}, 400, "invalid_value", "best_of"),
    "66 logprobs 21": ({"logprobs": 21}, 400, "integer_above_max_value", "logprobs"),
    "66 logprobs": ({"logprobs": 100_000}, 400, "integer_above_max_value", "logprobs"),
    "66 logprobs true": ({"logprobs": True}, 400, "invalid_type", "logprobs"),
    "67 logprobs -2": ({"logprobs": -2}, 400, "integer_below_min_value", "logprobs"),
    "68 prompt_logprobs": ({"prompt_logprobs": 10**6}, 400, "integer_above_max_value", "prompt_logprobs"),
    "68 prompt_logprobs streamed": ({"prompt_logprobs": 1, "stream": True}, 400, "invalid_value", "prompt_logprobs"),
    "69 five stops": ({"stop": list("abcde")}, 400, "array_above_max_length", "stop"),
    "70 many stops": ({"stop": ["a"] * 100_000}, 400, "array_above_max_length", "stop"),
    "71 empty stop": ({"stop": ""}, 400, "string_below_min_length", "stop"),
    "71 empty stop in a list": ({"stop": ["a", ""]}, 400, "string_below_min_length", "stop[1]"),
    "72 stop 5": ({"stop": 5}, 400, "invalid_type", "stop"),
    "73 long stop": ({"stop": "x" * 900_000}, 400, "string_above_max_length", "stop"),
    "74 stop id": ({"stop_token_ids": [999_999]}, 400, "invalid_value", "stop_token_ids[0]"),
    "74 stop id -1": ({"stop_token_ids": [5, -1]}, 400, "invalid_value", "stop_token_ids[1]"),
    "74 many stop ids": ({"stop_token_ids": [5] * 129}, 400, "array_above_max_length", "stop_token_ids"),
    "75 logit_bias key": ({"logit_bias": {"abc": 1}}, 400, "invalid_value", "logit_bias"),
    "76 logit_bias id": ({"logit_bias": {"999999": 1}}, 400, "invalid_value", "logit_bias"),
    "77 logit_bias value": ({"logit_bias": {"5": 101}}, 400, "decimal_above_max_value", "logit_bias"),
    "77 logit_bias list": ({"logit_bias": [5]}, 400, "invalid_type", "logit_bias"),
    "78 no allowed ids": ({"allowed_token_ids": []}, 400, "empty_array", "allowed_token_ids"),
    "78 allowed id": ({"allowed_token_ids": [VOCAB]}, 400, "invalid_value", "allowed_token_ids[0]"),
    "79 bad_words": ({"bad_words": ["x"] * 50_000}, 400, "array_above_max_length", "bad_words"),
    "80 seed text": ({"seed": "x"}, 400, "invalid_type", "seed"),
    "80 seed 2^64": ({"seed": 2**64}, 400, "integer_above_max_value", "seed"),
    "81 stream text": ({"stream": "yes"}, 400, "invalid_type", "stream"),
    "81 stream 1": ({"stream": 1}, 400, "invalid_type", "stream"),
    "82 stream_options": ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    "82 in stream_options": (
        {"stream": True, "stream_options": {"x": 1}},
        400,
        "unknown_parameter",
        "stream_options.x",
    ),
    "83 stream, unknown model": ({"stream": True, "model": "nope"}, 404, "model_not_found", "model"),
    "84 stream, too long": ({"stream": True, "prompt": [5] * 2000}, 400, "context_length_exceeded", "prompt"),
    "85 echo text": ({"echo": "x"}, 400, "invalid_type", "echo"),
    "86 suffix": ({"suffix": "x"}, 400, "unsupported_parameter", "suffix"),
    "87 unknown": ({"foo_bar": 1}, 400, "unknown_parameter", "foo_bar"),
    "88 user": ({"user": "x" * 900_000}, 400, "string_above_max_length", "user"),
    "89 request_id": ({"request_id": "x" * 100_000}, 400, "string_above_max_length", "request_id"),
    "89 request_id lines": ({"request_id": "a\nb"}, 400, "invalid_value", "request_id"),
    "90 no cache_salt": ({"cache_salt": ""}, 400, "invalid_value", "cache_salt"),
    "90 cache_salt": ({"cache_salt": "a/b"}, 400, "invalid_value", "cache_salt"),
    "91 min_tokens": ({"min_tokens": 9, "max_tokens": 8}, 400, "invalid_value", "min_tokens"),
    "92 prompt_embeds": ({"prompt_embeds": "gASVAAAA"}, 400, "unsupported_parameter", "prompt_embeds"),
    "detokenize": ({"detokenize": False}, 400, "unsupported_parameter", "detokenize"),
    "watermarking": ({"watermarking": {}}, 400, "unsupported_parameter", "watermarking"),
    "regex of others": ({"regex": "a"}, 400, "unknown_parameter", "regex"),
    "ebnf of others": ({"ebnf": "a"}, 400, "unknown_parameter", "ebnf"),
    "typical_p": ({"typical_p": 0}, 400, "decimal_below_min_value", "typical_p"),
    "dry_base alone": ({"dry_base": 2.0}, 400, "invalid_value", "dry_base"),
    "mirostat 3": ({"mirostat": 3}, 400, "integer_above_max_value", "mirostat"),
    "mirostat with top_k": ({"mirostat": 2, "top_k": 5}, 400, "invalid_value", "top_k"),
    "repetition_detection": ({"repetition_detection": 5}, 400, "invalid_type", "repetition_detection"),
    "in repetition_detection": (
        {"repetition_detection": {"max_pattern_size": 0}},
        400,
        "integer_below_min_value",
        "repetition_detection.max_pattern_size",
    ),
    "unknown in repetition_detection": (
        {"repetition_detection": {"max_pattern_size": 2, "x": 1}},
        400,
        "unknown_parameter",
        "repetition_detection",
    ),
    "logits_processors": ({"logits_processors": ["nope"]}, 400, "invalid_value", "logits_processors"),
    "logits_processors as code": ({"logits_processors": "os:system"}, 400, "invalid_type", "logits_processors"),
    "vllm_xargs alone": ({"vllm_xargs": {"a": 1}}, 400, "invalid_value", "vllm_xargs"),
    "logprobs -1": ({"logprobs": -1}, 400, "integer_above_max_value", "logprobs"),
    "logprob_token_ids": ({"logprob_token_ids": [VOCAB]}, 400, "invalid_value", "logprob_token_ids[0]"),
    "logprob_token_ids text": ({"logprob_token_ids": "a"}, 400, "invalid_type", "logprob_token_ids"),
    "logprob_token_ids, logprobs": ({"logprob_token_ids": [5, 6], "logprobs": 3}, 400, "invalid_value", "logprobs"),
    "stream_interval": ({"stream_interval": 0, "stream": True}, 400, "integer_below_min_value", "stream_interval"),
    "stream_interval alone": ({"stream_interval": 2}, 400, "invalid_value", "stream_interval"),
    "thinking_token_budget": ({"thinking_token_budget": 5}, 400, "unsupported_parameter", "thinking_token_budget"),
    "documents": ({"documents": [{"text": "a"}]}, 400, "unsupported_parameter", "documents"),
    "beams 1": ({"use_beam_search": 1}, 400, "invalid_type", "use_beam_search"),
    "beams, length_penalty alone": ({"length_penalty": 2.0}, 400, "invalid_value", "length_penalty"),
    "beams, length_penalty true": ({"length_penalty": True}, 400, "invalid_value", "length_penalty"),
    "beams, early_stopping alone": ({"early_stopping": True}, 400, "invalid_value", "early_stopping"),
    "beams, early_stopping 0": ({"early_stopping": 0}, 400, "invalid_value", "early_stopping"),
    "priority": ({"priority": 1}, 400, "unsupported_parameter", "priority"),
    "priority text": ({"priority": "high"}, 400, "invalid_type", "priority"),
    "truncate": ({"truncate_prompt_tokens": 0}, 400, "integer_below_min_value", "truncate_prompt_tokens"),
    "ignore_eos": ({"ignore_eos": 1}, 400, "invalid_type", "ignore_eos"),
    "product": ({"prompt": ["a"] * 100, "n": 11}, 400, "invalid_value", "n"),
    "product with best_of": ({"prompt": ["a"] * 100, "best_of": 11}, 400, "invalid_value", "best_of"),
    "product with logprobs": ({"prompt": ["a"] * 40, "n": 20, "logprobs": 20}, 400, "invalid_value", "logprobs"),
}


@pytest.mark.parametrize("name", COMPLETION_ROWS)
def test_bad_completions(server: LiveServer, name: str) -> None:
    changes, status, code, param = COMPLETION_ROWS[name]
    response = post(server, COMPLETIONS, {"model": "fake", "prompt": "a", **changes})
    check_error(response, status, code, param)
    assert server.do(lambda: server.engine.live) == []


BEAM_ROWS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "n": ({"n": 0}, "integer_below_min_value", "n"),
    "n 129": ({"n": 129}, "integer_above_max_value", "n"),
    "best_of 129": ({"best_of": 129}, "integer_above_max_value", "best_of"),
    "best_of below n": ({"n": 3, "best_of": 2}, "invalid_value", "best_of"),
    "stream": ({"stream": True}, "unsupported_parameter", "stream"),
    "temperature": ({"temperature": 0.5}, "unsupported_parameter", "temperature"),
    "temperature tiny": ({"temperature": 1e-9}, "unsupported_parameter", "temperature"),
    "temperature text": ({"temperature": "0"}, "invalid_type", "temperature"),
    "top_p": ({"top_p": 0.5}, "unsupported_parameter", "top_p"),
    "top_k": ({"top_k": 5}, "unsupported_parameter", "top_k"),
    "min_p": ({"min_p": 0.5}, "unsupported_parameter", "min_p"),
    "presence_penalty": ({"presence_penalty": 1}, "unsupported_parameter", "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": 1}, "unsupported_parameter", "frequency_penalty"),
    "repetition_penalty": ({"repetition_penalty": 1.5}, "unsupported_parameter", "repetition_penalty"),
    "stop": ({"stop": "x"}, "unsupported_parameter", "stop"),
    "stop_token_ids": ({"stop_token_ids": [5]}, "unsupported_parameter", "stop_token_ids"),
    "bad_words": ({"bad_words": ["x"]}, "unsupported_parameter", "bad_words"),
    "allowed_token_ids": ({"allowed_token_ids": [5]}, "unsupported_parameter", "allowed_token_ids"),
    "logit_bias": ({"logit_bias": {"5": 1}}, "unsupported_parameter", "logit_bias"),
    "min_tokens": ({"min_tokens": 1}, "unsupported_parameter", "min_tokens"),
    "logprobs": ({"logprobs": 0}, "unsupported_parameter", "logprobs"),
    "prompt_logprobs": ({"prompt_logprobs": 0}, "unsupported_parameter", "prompt_logprobs"),
    "length_penalty": ({"length_penalty": 11}, "decimal_above_max_value", "length_penalty"),
    "length_penalty text": ({"length_penalty": "1"}, "invalid_type", "length_penalty"),
    "early_stopping": ({"early_stopping": "always"}, "invalid_value", "early_stopping"),
    "early_stopping 1": ({"early_stopping": 1}, "invalid_value", "early_stopping"),
    "max_tokens": ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    "seed": ({"seed": "x"}, "invalid_type", "seed"),
}


@pytest.mark.parametrize("name", BEAM_ROWS)
def test_bad_beam_searches(server: LiveServer, name: str) -> None:
    """Nothing that beams cannot honour is ignored."""
    changes, code, param = BEAM_ROWS[name]
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        changes = {**changes, "logprobs": True} if path == CHAT and "logprobs" in changes else changes
        response = post(server, path, {"model": "fake", **body, "use_beam_search": True, **changes})
        check_error(response, 400, code, param)
    assert server.do(lambda: server.engine.live) == []


def test_messages_name_what_is_allowed(server: LiveServer) -> None:
    def message(**changes: Any) -> str:
        text: str = post(server, COMPLETIONS, {"model": "fake", "prompt": "a", **changes}).json()["error"]["message"]
        return text

    long = message(prompt=[5] * 2000)
    assert "2000" in long
    assert "256" in long
    assert f"vocab {VOCAB}" in message(prompt=[VOCAB])
    assert "128" in message(n=100_000)
    assert "did you mean temperature?" in message(temprature=1)
    assert "fake" in message(model="nope")


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 10**9},
        {"n": 2, "temperature": 0},
        {"best_of": 1},
        {"n": 2, "best_of": 2},
        {"n": 2, "best_of": 2, "stream": True, "temperature": 0},
        {"n": 2, "best_of": 3, "logprobs": 1},
        {"use_beam_search": True},
        {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0, "early_stopping": "never", "seed": 5},
        {"use_beam_search": True, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0},
        {"use_beam_search": True, "ignore_eos": True, "skip_special_tokens": False, "truncate_prompt_tokens": 5},
        {"use_beam_search": False, "early_stopping": False, "length_penalty": 1},
        {"suffix": None},
        {"stop": None, "seed": None, "user": None, "stream_options": None, "max_tokens": None},
        {"user": "me", "metadata": {"a": {"b": 1}}, "store": False, "service_tier": "auto"},
        {"response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1.0},
        {"top_k": -1, "top_p": 1, "temperature": 0, "min_p": 0},
        {"prompt": [5, 6, 7]},
        {"prompt": [[5], [6, 7]]},
        {"seed": -1},
        {"logit_bias": {"5": 100, "6": -100}},
        {"stop": ["\n", "x"], "stop_token_ids": [9], "bad_words": ["foo"]},
    ],
)
def test_completions_that_are_fine(server: LiveServer, changes: dict[str, Any]) -> None:
    response = post(server, COMPLETIONS, {"model": "fake", "prompt": "a", **changes})
    assert response.status_code == 200, response.text


def test_more_tokens_than_fit_are_clamped(server: LiveServer) -> None:
    answer = post(server, COMPLETIONS, {"model": "fake", "prompt": [5] * 250, "max_tokens": 1000}).json()
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


TOKENIZE_ROWS: dict[str, tuple[str, dict[str, Any], int, str, str | None]] = {
    "156 no prompt": (TOKENIZE, {}, 400, "missing_required_parameter", "prompt"),
    "157 lone surrogate": (TOKENIZE, {"prompt": "\ud800"}, 400, "invalid_value", "prompt"),
    "158 huge": (TOKENIZE, {"prompt": "x" * 5_000_000}, 413, "request_too_large", None),
    "158 too long": (TOKENIZE, {"prompt": "x" * 900_000}, 400, "context_length_exceeded", "prompt"),
    "prompt 5": (TOKENIZE, {"prompt": 5}, 400, "invalid_type", "prompt"),
    "both": (TOKENIZE, {"prompt": "a", "messages": HI}, 400, "invalid_value", "messages"),
    "model": (TOKENIZE, {"prompt": "a", "model": "nope"}, 404, "model_not_found", "model"),
    "159 negative": (DETOKENIZE, {"tokens": [-1]}, 400, "invalid_value", "tokens[0]"),
    "160 outside": (DETOKENIZE, {"tokens": [5, 10**6]}, 400, "invalid_value", "tokens[1]"),
    "161 huge": (DETOKENIZE, {"tokens": [2**62]}, 400, "invalid_value", "tokens[0]"),
    "tokens text": (DETOKENIZE, {"tokens": "ab"}, 400, "invalid_type", "tokens"),
    "token text": (DETOKENIZE, {"tokens": ["a"]}, 400, "invalid_type", "tokens[0]"),
    "no tokens": (DETOKENIZE, {}, 400, "missing_required_parameter", "tokens"),
}


@pytest.mark.parametrize("name", TOKENIZE_ROWS)
def test_bad_tokenization(server: LiveServer, name: str) -> None:
    path, body, status, code, param = TOKENIZE_ROWS[name]
    check_error(post(server, path, json.dumps(body).encode()), status, code, param)


def test_unknown_fields_can_be_ignored(make_server: MakeServer) -> None:
    server = make_server(ignore_unknown_fields=True)
    body = {"model": "fake", "prompt": "a", "foo_bar": 1}
    assert post(server, COMPLETIONS, body).status_code == 200
    chat = {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}], "y": 2}]}
    assert post(server, CHAT, chat).status_code == 200
    assert post(server, TOKENIZE, chat).status_code == 200
    refused = post(server, COMPLETIONS, {**body, "prompt_embeds": "{}"})
    check_error(refused, 400, "unsupported_parameter", "prompt_embeds")
    odd = {"type": "json_schema", "x": 1, "json_schema": {"name": "a", "schema": {}, "y": 2}}
    assert post(server, COMPLETIONS, {**body, "response_format": odd}).status_code == 200


def test_the_server_still_works(server: LiveServer) -> None:
    answer = post(server, COMPLETIONS, {"model": "fake", "prompt": "a", "max_tokens": 3}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert server.http.head("/health").status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", {"a": 1}),
        ("documents", []),
        ("tools", []),
        ("chat_template_kwargs", {}),
        ("chat_template", "x"),
        ("add_generation_prompt", True),
        ("continue_final_message", True),
        ("reasoning_effort", "low"),
    ],
)
def test_a_prompt_is_not_tokenized_with_what_only_conversations_have(
    server: LiveServer, field: str, value: object
) -> None:
    response = server.http.post("/tokenize", json={"prompt": "a", field: value})
    check_error(response, 400, "invalid_value", field)
