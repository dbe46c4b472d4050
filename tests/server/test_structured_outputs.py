"""Structured output asked for in the fields of OpenAI and vLLM: all of them arrive at the engine as one grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.protocol import ChatCompletionRequest, CompletionRequest
from quire.server.structured_outputs import structured_output
from quire.structured_outputs import StructuredOutputParams
from tests.helpers.live_server import LiveServer
from tests.server.checks import CHAT, COMPLETIONS, HI, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}


def json_schema(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}}


FIELDS: dict[str, tuple[dict[str, Any], StructuredOutputParams]] = {
    "json_schema": (json_schema(), StructuredOutputParams(json=SCHEMA)),
    "not strict": (json_schema(strict=False, description="d"), StructuredOutputParams(json=SCHEMA)),
    "strict": (json_schema(strict=True), StructuredOutputParams(json=SCHEMA, property_order="schema")),
    "with options": (
        {**json_schema(strict=True), "structured_outputs": {"disable_any_whitespace": True, "json": None}},
        StructuredOutputParams(json=SCHEMA, property_order="schema", disable_any_whitespace=True),
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, StructuredOutputParams(json_object=True)),
    "structural_tag": (
        {"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<a"]}},
        StructuredOutputParams(structural_tag={"type": "structural_tag", "structures": [TAG], "triggers": ["<a"]}),
    ),
    "json": ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructuredOutputParams(json=SCHEMA)),
    "json text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        StructuredOutputParams(json=json.dumps(SCHEMA), disable_any_whitespace=True),
    ),
    "regex": ({"structured_outputs": {"regex": "a+"}}, StructuredOutputParams(regex="a+")),
    "choice": ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputParams(choice=["a", "b"])),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputParams(grammar='start: "a"')),
    "json_object again": ({"structured_outputs": {"json_object": True}}, StructuredOutputParams(json_object=True)),
    "guided_json": (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " "},
        StructuredOutputParams(json=SCHEMA, whitespace_pattern=" "),
    ),
    "guided_json text": ({"guided_json": "true"}, StructuredOutputParams(json="true")),
    "guided_regex": (
        {"guided_regex": "a+", "response_format": {"type": "text"}},
        StructuredOutputParams(regex="a+"),
    ),
    "guided_choice": ({"guided_choice": ["a"]}, StructuredOutputParams(choice=["a"])),
    "guided_grammar": ({"guided_grammar": 'start: "a"'}, StructuredOutputParams(grammar='start: "a"')),
}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_arrives_at_the_engine(server: LiveServer, name: str) -> None:
    fields, params = FIELDS[name]
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        response = post(server, path, {"model": "fake", "max_tokens": 1, **body, **fields})
        assert response.status_code == 200, response.text
        assert server.do(lambda: server.engine.added[-1]).grammar
    for request in (
        CompletionRequest(model="fake", **fields),
        ChatCompletionRequest(model="fake", messages=[], **fields),
    ):
        form = structured_output(request)
        assert form is not None
        assert form.params == params


def test_text_is_no_form(server: LiveServer) -> None:
    response = post(server, COMPLETIONS, {"model": "fake", "prompt": "a", "response_format": {"type": "text"}})
    assert response.status_code == 200
    assert server.do(lambda: server.engine.added[-1]).grammar is None


def test_all_sequences_of_a_request_have_its_form(server: LiveServer) -> None:
    body = {"model": "fake", "prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 1, "guided_choice": ["a", "b"]}
    assert post(server, COMPLETIONS, body).status_code == 200
    added = server.do(lambda: server.engine.added[-2:])
    assert len(added[0].sequence_ids) == 3
    assert added[0].grammar == added[1].grammar != None  # noqa: E711
    search = {**body, "use_beam_search": True}
    assert post(server, COMPLETIONS, search).status_code == 200
    assert server.do(lambda: server.engine.added[-1]).grammar == added[0].grammar
