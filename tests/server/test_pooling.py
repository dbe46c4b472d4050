"""The routes about vectors and scores: every request is checked to the end, and no model makes up a vector."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from tests.helpers.live_server import LiveServer
from tests.server.checks import VOCAB, check_error, post
from tests.server.test_any_value import VALUES

EMBED = "/v1/embeddings"
PAIR = {"query": "a", "documents": ["b", "c"]}
SCORE = {"text_1": "a", "text_2": ["b", "c"]}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (EMBED, {"input": "a"}),
    (EMBED, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "me"}),
    (EMBED, {"input": [1, 2]}),
    (EMBED, {"input": [[1, 2], [3]], "truncate_prompt_tokens": 1}),
    ("/pooling", {"input": "a", "task": "embed"}),
    ("/classify", {"input": ["a"]}),
    ("/rerank", PAIR),
    ("/v1/rerank", {**PAIR, "top_n": 1, "return_documents": False}),
    ("/v2/rerank", {"query": "a", "documents": [{"text": "b"}, "c"]}),
    ("/score", SCORE),
    ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d"]}),
]
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (EMBED, {}, "missing_required_parameter", "input"),
    (EMBED, {"input": ""}, "string_below_min_length", "input"),
    (EMBED, {"input": []}, "empty_array", "input"),
    (EMBED, {"input": ["a", ""]}, "string_below_min_length", "input[1]"),
    (EMBED, {"input": ["a", 1]}, "invalid_type", "input[1]"),
    (EMBED, {"input": {"a": 1}}, "invalid_type", "input"),
    (EMBED, {"input": [10**6]}, "invalid_value", "input[0]"),
    (EMBED, {"input": [-1]}, "invalid_value", "input[0]"),
    (EMBED, {"input": [True]}, "invalid_type", "input[0]"),
    (EMBED, {"input": [[1], []]}, "empty_array", "input[1]"),
    (EMBED, {"input": [[1], [VOCAB]]}, "invalid_value", "input[1][0]"),
    (EMBED, {"input": "a b " * 200}, "context_length_exceeded", "input"),
    (EMBED, {"input": "a" * 100_000}, "context_length_exceeded", "input"),
    (EMBED, {"input": [[1] * 257]}, "context_length_exceeded", "input[0]"),
    (EMBED, {"input": ["a"] * 5000}, "array_above_max_length", "input"),
    (EMBED, {"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
    (EMBED, {"input": "a", "dimensions": 0}, "integer_below_min_value", "dimensions"),
    (EMBED, {"input": "a", "dimensions": -1}, "integer_below_min_value", "dimensions"),
    (EMBED, {"input": "a", "dimensions": 10**9}, "integer_above_max_value", "dimensions"),
    (EMBED, {"input": "a", "truncate_prompt_tokens": 0}, "integer_below_min_value", "truncate_prompt_tokens"),
    (EMBED, {"input": "a", "inptu": "b"}, "unknown_parameter", "inptu"),
    (EMBED, {"input": "a", "messages": []}, "unsupported_parameter", "messages"),
    ("/pooling", {"input": "a", "task": "dance"}, "invalid_value", "task"),
    ("/classify", {}, "missing_required_parameter", "input"),
    ("/rerank", {"documents": ["a"]}, "missing_required_parameter", "query"),
    ("/rerank", {"query": "a"}, "missing_required_parameter", "documents"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "invalid_type", "query"),
    ("/rerank", {"query": "a", "documents": "b"}, "invalid_type", "documents"),
    ("/rerank", {"query": "a", "documents": []}, "empty_array", "documents"),
    ("/rerank", {"query": "a", "documents": ["b", 1]}, "invalid_type", "documents[1]"),
    ("/rerank", {"query": "a", "documents": [1]}, "invalid_type", "documents[0]"),
    ("/rerank", {"query": "a", "documents": [{"text": None}]}, "missing_required_parameter", "documents[0].text"),
    ("/rerank", {"query": "a", "documents": [{"url": "b"}]}, "unknown_parameter", "documents[0].url"),
    ("/rerank", {**PAIR, "top_n": 0}, "integer_below_min_value", "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "array_above_max_length", "documents"),
    ("/score", {"text_1": "a"}, "missing_required_parameter", "text_2"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "invalid_value", "text_1"),
    ("/score", {**SCORE, "queries": "a"}, "invalid_value", "queries"),
    ("/score", {"text_1": [1], "text_2": "a"}, "invalid_type", "text_1[0]"),
]
ROUTES: list[tuple[str, type[PoolingRequest], dict[str, Any]]] = [
    (EMBED, EmbeddingRequest, {"input": "a"}),
    ("/pooling", PoolRequest, {"input": "a"}),
    ("/classify", ClassifyRequest, {"input": "a"}),
    ("/rerank", RerankRequest, PAIR),
    ("/score", ScoreRequest, {"text_1": "a", "text_2": "b"}),
]


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_a_model_that_generates_text_says_so(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    error = check_error(post(server, path, {"model": "fake", **body}), 400, "unsupported_endpoint", "model")
    assert "'fake'" in error["message"]
    assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(("path", "body", "code", "param"), BAD)
def test_bad_requests(server: LiveServer, path: str, body: dict[str, Any], code: str, param: str) -> None:
    check_error(post(server, path, {"model": "fake", **body}), 400, code, param)


def test_models_that_do_not_exist(server: LiveServer) -> None:
    check_error(post(server, EMBED, {"model": "nope", "input": "a"}), 404, "model_not_found", "model")
    check_error(post(server, EMBED, {"input": "a"}), 400, "missing_required_parameter", "model")


CASES = [
    (path, name) for path, model, _ in ROUTES for name in sorted({*model.model_fields, *model.refused} - {"model"})
]


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path.rsplit('/')[-1]}-{name}" for path, name in CASES])
def test_any_value_is_refused_by_name_or_leads_to_the_end(server: LiveServer, path: str, name: str) -> None:
    base = next(body for route, _, body in ROUTES if route == path)
    for value in VALUES:
        response = post(server, path, json.dumps({"model": "fake", **base, name: value}).encode())
        error = response.json()["error"]
        check_error(response, 400, error["code"], error["param"])
        named = error["param"].split(".")[0].split("[")[0]
        if error["code"] == "unsupported_endpoint":
            assert named == "model"
        elif path == "/score":  # either of two names
            assert named in {name, "text_1", "text_2"}
        else:
            assert named == name, (value, error)
