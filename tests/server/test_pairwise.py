"""Features of chat completions, two by two, with the built-in model: each combination works, or is refused by name.

Every answer must satisfy what its request asked for: forms and schemas are validated, choices and log-probabilities
counted, stop strings looked for, and what is streamed is compared with what is not.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.helpers.server import Server, serve
from tests.server.streams import add_up, stream_events

MAX_TOKENS = 100
AT_A_TIME = 8
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["hall", "cellar"]}, "lit": {"type": "boolean"}},
    "required": ["kind", "lit"],
    "additionalProperties": False,
}
REGEX = "(north|south) [0-9]{2}"
CHOICES = ["yes", "no", "perhaps"]
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "leave"}},
]
STOP = ["7", "ee"]
TEMPLATE = """
{{- bos_token }}
{%- if tools %}{{- '<|system|>Call with <tool_call>: ' + tools | tojson + '<|end|>' }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}
"""
BODY = {"model": "quire-demo", "messages": [{"role": "user", "content": "The king said"}], "max_tokens": MAX_TOKENS}


def schema_format(strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "room", "schema": SCHEMA, "strict": strict}}


# Values of each factor: a name, and the fields of the request that it stands for.
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "form": {
        "text": {},
        "schema": {"response_format": schema_format(False)},
        "strict": {"response_format": schema_format(True), "structured_outputs": {"disable_any_whitespace": True}},
        "regex": {"structured_outputs": {"regex": REGEX}},
        "choice": {"guided_choice": CHOICES},
    },
    "tools": {
        "no tools": {},
        "auto": {"tools": TOOLS},
        "none": {"tools": TOOLS, "tool_choice": "none"},
        "required": {"tools": TOOLS, "tool_choice": "required"},
        "named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
    },
    "parallel": {"parallel": {}, "one by one": {"parallel_tool_calls": False}},
    "reasoning": {
        "unbounded": {},
        "budget": {"thinking_token_budget": 6},
        "hidden": {"thinking_token_budget": 9, "include_reasoning": False},
        "no effort": {"reasoning_effort": "none"},
    },
    "n": {"one": {}, "two": {"n": 2}},
    "stop": {"no stop": {}, "stop": {"stop": STOP}},
    "logprobs": {"no logprobs": {}, "logprobs": {"logprobs": True}, "top": {"logprobs": True, "top_logprobs": 2}},
    "stream": {"whole": {}, "streamed": {"stream": True}},
    "seed": {"unseeded": {}, "seeded": {"seed": 7}},
    "temperature": {"greedy": {"temperature": 0}, "hot": {"temperature": 1.5}},
}


Value = tuple[str, str]


def pairwise() -> list[dict[str, str]]:
    """Return combinations of values in which every two values of two factors occur together."""
    names = list(FACTORS)
    missing = {
        ((a, one), (b, two)) for a, b in itertools.combinations(names, 2) for one in FACTORS[a] for two in FACTORS[b]
    }
    cases = []
    while missing:
        case = dict(min(missing))
        for name in names:
            if name not in case:
                gains = {value: _gain((name, value), case, missing) for value in FACTORS[name]}
                case[name] = max(gains, key=lambda value, gains=gains: gains[value])
        case = {name: case[name] for name in names}
        missing -= set(itertools.combinations(case.items(), 2))
        cases.append(case)
    return cases


def _gain(value: Value, case: Mapping[str, str], missing: set[tuple[Value, Value]]) -> int:
    return sum((value, other) in missing or (other, value) in missing for other in case.items())


CASES = pairwise()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with a chat template that has the model reason first."""
    folder = tmp_path_factory.mktemp("thinking")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with serve(folder / "log.txt", "--chat-template", str(folder / "template.jinja"), *flags) as running:
        yield running


def test_every_pair_is_there() -> None:
    assert 25 <= len(CASES) <= 40
    together = {pair for case in CASES for pair in itertools.combinations(case.items(), 2)}
    assert len(together) == sum(
        len(FACTORS[one]) * len(FACTORS[two]) for one, two in itertools.combinations(FACTORS, 2)
    )


@pytest.mark.slow
def test_a_model_that_reasons(thinking: Server) -> None:
    check_cases(thinking)


def test_a_model_that_does_not(demo_server: Server) -> None:
    check_cases(demo_server, ("budget", "hidden"), "thinking_token_budget")


def check_cases(server: Server, kinds: Sequence[str] = (), refused: str | None = None) -> None:
    """Check all cases, several at a time; those with these kinds of reasoning are refused for a field."""

    def check(case: dict[str, str]) -> None:
        try:
            check_case(server, case, refused if case["reasoning"] in kinds else None)
        except Exception as error:
            error.add_note(str(case))
            raise

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(check, CASES))


def check_case(server: Server, case: dict[str, str], refused: str | None = None) -> None:
    fields: dict[str, Any] = {}
    for name, value in case.items():
        fields |= FACTORS[name][value]
    if refused is not None:
        status, answer = server.post("/v1/chat/completions", {**BODY, **fields})
        assert (status, answer["error"]["param"]) == (400, refused)
        return
    streamed = fields.pop("stream", False)
    answer = ask(server, fields, streamed)
    check_answer(case, fields, answer)
    if case["seed"] == "seeded" or case["temperature"] == "greedy":
        other = ask(server, fields, not streamed)
        assert other["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
        assert without_ids(other) == without_ids(answer)


def ask(server: Server, fields: dict[str, Any], streamed: bool) -> dict[str, Any]:
    if not streamed:
        status, answer = server.post("/v1/chat/completions", {**BODY, **fields})
        assert status == 200, answer
        return dict(answer)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return add_up(stream_events(server.url, {**BODY, **fields, **options}))


def without_ids(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices without what is random in them."""
    choices = json.loads(json.dumps(answer["choices"]))
    for choice in choices:
        for call in choice["message"].get("tool_calls", ()):
            assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    return list(choices)


def check_answer(case: dict[str, str], fields: dict[str, Any], answer: dict[str, Any]) -> None:
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(fields.get("n", 1)))
    check_logprobs(fields, answer)
    for choice in choices:
        message = choice["message"]
        calls = message.get("tool_calls", [])
        # A stop string may cut a message anywhere; then it may be incomplete.
        complete = choice["finish_reason"] != "length" and choice["stop_reason"] is None
        check_reasoning(case, message)
        check_calls(case, calls, complete)
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
        if complete:
            assert (choice["finish_reason"] == "tool_calls") == (bool(calls) and case["tools"] != "named")
        assert (message["content"] is None) <= bool(calls)
        if case["stop"] == "stop":
            assert not any(stop in (message["content"] or "") for stop in STOP)
        if complete and not calls and case["tools"] not in ("required", "named"):
            check_form(case["form"], message["content"])


def check_logprobs(fields: dict[str, Any], answer: dict[str, Any]) -> None:
    found = [choice["logprobs"] for choice in answer["choices"]]
    if "logprobs" not in fields:
        assert found == [None] * len(found)
        return
    assert sum(len(item["content"]) for item in found) == answer["usage"]["completion_tokens"]
    for item in found:
        assert all(len(token["top_logprobs"]) == fields.get("top_logprobs", 0) for token in item["content"])


def check_reasoning(case: dict[str, str], message: dict[str, Any]) -> None:
    if case["reasoning"] in ("hidden", "no effort"):
        assert "reasoning" not in message
    assert "think>" not in (message["content"] or "")


def check_calls(case: dict[str, str], calls: list[dict[str, Any]], complete: bool) -> None:
    if case["tools"] in ("no tools", "none"):
        assert not calls
    if case["tools"] in ("required", "named") and complete:
        assert calls
    if case["parallel"] == "one by one" or case["tools"] == "named":
        assert len(calls) <= 1
    for index, call in enumerate(calls):
        assert call["type"] == "function"
        name = call["function"]["name"]
        assert name in (("look",) if case["tools"] == "named" else ("look", "leave"))
        if complete or index < len(calls) - 1:
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict)
            if name == "look":
                jsonschema.validate(arguments, SCHEMA)


def check_form(form: str, content: str) -> None:
    if form in ("schema", "strict"):
        value = json.loads(content)
        jsonschema.validate(value, SCHEMA)
        assert form == "schema" or list(value) == ["kind", "lit"]
    elif form == "regex":
        assert re.fullmatch(REGEX, content)
    elif form == "choice":
        assert content in CHOICES
