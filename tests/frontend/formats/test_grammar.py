"""Constraints: what they accept and reject, and that whatever is drawn from them is what was asked for."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire.errors import RequestError, UnsupportedError
from quire.frontend.formats.message import Message, MessageSpec, Tool
from quire.frontend.formats.registry import MessageFormat, format_named
from quire.structured_outputs import StructuredOutputParams
from tests.frontend.formats.cases import (
    CASES,
    EOS,
    FORMATS,
    TOOLS,
    Case,
    accepts,
    markers_of,
    matcher_of,
    read,
    tokenizer_for,
)
from tests.helpers.errors import refused

MARKINGS = ("none", "calls", "all")
MARKED = pytest.mark.parametrize("marked", MARKINGS)
FORM_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
WALKED = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1},
                "metric": {"type": "boolean"},
                "unit": {"enum": ["C", "F"]},
                "code": {"type": "string", "maxLength": 4},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
                "place": {
                    "type": "object",
                    "properties": {"lat": {"type": "number"}, "ok": {"type": "boolean"}},
                    "required": ["lat"],
                    "additionalProperties": False,
                },
                "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    ),
    Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False}),
    Tool("pick", {"type": "object", "properties": {"zone": {"enum": ["a b", "c"]}}, "required": ["zone"]}, strict=True),
]


def with_markings(name: str, items: list[Any], ids: Any = str) -> pytest.MarkDecorator:
    """Run each item with one of the markings, these in turns; with the other two among the slow tests."""
    rows = [
        pytest.param(item, marked, id=f"{ids(item)}-{marked}", marks=() if turn % 3 == place else pytest.mark.slow)
        for turn, item in enumerate(items)
        for place, marked in enumerate(MARKINGS)
    ]
    return pytest.mark.parametrize((name, "marked"), rows)


def grammar_of(model: MessageFormat, special: dict[str, int], **spec: Any) -> str:
    grammar = model.grammar(MessageSpec(special_tokens=special, end_tokens=[EOS], **spec))
    assert grammar is not None
    return grammar


@with_markings("case", CASES, lambda case: case.id)
def test_accepts_what_the_family_writes(case: Case, marked: str) -> None:
    form = case.message_format()
    backend, guide, special = tokenizer_for(form, marked)
    texts = [case.message.reasoning or "", case.message.content or ""]
    texts += [one.arguments for one in case.message.tool_calls]
    if any(mark in text for text in texts for mark in special):
        pytest.skip("special tokens cannot stand in text")
    grammar = form.grammar(case.request(special_tokens=special, end_tokens=[EOS]))
    assert grammar is not None
    assert accepts(backend, guide, grammar, case.text)
    if case.message.tool_calls and not case.message.content:
        assert accepts(backend, guide, _required(case, special), case.text)
    elif not case.message.tool_calls:
        assert not accepts(backend, guide, _required(case, special), case.text)


def _required(case: Case, special: dict[str, int]) -> str:
    grammar = case.message_format().grammar(case.request(special_tokens=special, end_tokens=[EOS], choice="required"))
    assert grammar is not None
    return grammar


@MARKED
def test_rejects_what_was_not_asked_for(marked: str) -> None:
    form = format_named("hermes", "qwen3")
    backend, guide, special = tokenizer_for(form, marked)

    @cache
    def grammar(**spec: Any) -> str:
        return grammar_of(form, special, tools=TOOLS, can_reason=True, **spec)

    def taken(text: str, **spec: Any) -> bool:
        return accepts(backend, guide, grammar(**spec), text)

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    good, other = call("get_weather", '{"city": "Paris"}'), call("get_time", "{}")
    for choice in ("auto", "required", "function:get_weather"):
        assert taken(good, choice=choice)
        assert taken(f"<think>\nHm.\n</think>\n\n{good}", choice=choice)
        for bad in (
            call("unknown", "{}"),
            call("get_weather", "{}"),
            call("get_weather", '{"city": 1}'),
            call("get_weather", '{"city": "a", "days": "b"}'),
            call("get_weather", '{"city": "a", "other": 1}'),
            good[:-1],
            good[:-14] + "x</tool_call>",
        ):
            assert not taken(bad, choice=choice), bad
    assert taken("Hi " + good) and taken("Hi") and taken("") and taken(f"\n<think>a</think>{good}")
    for choice in ("required", "function:get_weather"):
        assert not taken("Hi " + good, choice=choice) and not taken("Hi", choice=choice)
        assert not taken("<think>a</think>Hi", choice=choice) and not taken("<think>a", choice=choice)
    assert taken(f"{good}\n{other}", choice="required")
    assert not taken(f"{good}\n{other}", choice="required", parallel=False)
    assert not taken(other, choice="function:get_weather") and not taken(
        f"{good}\n{good}", choice="function:get_weather"
    )


@MARKED
def test_content_in_a_form(marked: str) -> None:
    form = format_named("hermes", "qwen3")
    backend, guide, special = tokenizer_for(form, marked)
    answer = '{"answer": 12}'
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'

    def taken(text: str, **spec: Any) -> bool:
        spec = {"structured_outputs": StructuredOutputParams(json=FORM_SCHEMA), "can_reason": True, **spec}
        return accepts(backend, guide, grammar_of(form, special, **spec), text)

    assert taken(answer) and taken(f"<think>\nSo: {{\n</think>\n\n{answer}") and taken(f"<think></think>{answer}")
    assert taken(f"Hm</think>\n\n{answer}", reasoning_open=True)
    assert not taken("Hm") and not taken(f"<think>a</think>b{answer}") and not taken(call)
    assert taken(answer, tools=TOOLS) and taken(call, tools=TOOLS) and not taken("Hm", tools=TOOLS)
    assert not taken(call, tools=TOOLS, choice="none") and taken(answer, tools=TOOLS, choice="none")
    assert not taken(answer, tools=TOOLS, choice="required") and taken(call, tools=TOOLS, choice="required")
    # A form that admits everything does not take reasoning, or calls, for content.
    anything = StructuredOutputParams(regex="(?s:.*)")
    assert taken("Hm <b> a", structured_outputs=anything) and not taken("<think>a", structured_outputs=anything)
    assert taken("a <tool", tools=TOOLS, structured_outputs=anything) and not taken(
        "<tool_call> a", tools=TOOLS, structured_outputs=anything
    )
    assert taken(f"<think>a</think>\n\n{call}", tools=TOOLS, structured_outputs=anything)


@pytest.mark.parametrize("reasoning, between", [("qwen3", "\n\n"), ("deepseek_r1", "")])
def test_blanks_that_a_form_asks_for_are_content(reasoning: str, between: str) -> None:
    """Where content may begin with blanks, those of the family between it and reasoning are known exactly."""
    form = format_named("hermes", reasoning)
    backend, guide, special = tokenizer_for(form, "none")
    wanted = StructuredOutputParams(regex=r"\s{2}a\n?")
    grammar = grammar_of(form, special, structured_outputs=wanted, can_reason=True)
    for content in ("\n\na", "  a\n"):
        text = f"<think>b</think>{between}{content}"
        assert accepts(backend, guide, grammar, text) and accepts(backend, guide, grammar, content)
        assert not accepts(backend, guide, grammar, f"<think>b</think>\n{between}{content}")
        for whole, reasoned in ((text, "b"), (content, None)):
            message, _ = read(form.parser(MessageSpec(structured_outputs=wanted, can_reason=True)), list(whole))
            assert message == Message(reasoned, content)


def test_calls_that_are_json_beside_content_that_is() -> None:
    form = format_named("llama3_json", None)
    backend, guide, special = tokenizer_for(form, "none")
    grammar = grammar_of(form, special, tools=TOOLS, structured_outputs=StructuredOutputParams(json=FORM_SCHEMA))
    call = '{"name":"get_weather","parameters":{"city":"a"}}'
    assert accepts(backend, guide, grammar, call) and accepts(backend, guide, grammar, '{"answer": 12}')
    assert not accepts(backend, guide, grammar, call.replace("city", "town"))
    spec = MessageSpec(tools=TOOLS, structured_outputs=StructuredOutputParams(json=FORM_SCHEMA))
    assert read(form.parser(spec), list(call))[0].tool_calls[0].arguments == '{"city":"a"}'
    assert read(form.parser(spec), list('{"answer": 12}'))[0].content == '{"answer": 12}'


@pytest.mark.parametrize("name, mark", [("llama3_json", "<|python_tag|>"), ("llama4_pythonic", "<|python_start|>")])
def test_marks_that_a_family_may_write(name: str, mark: str) -> None:
    form = format_named(name, None)
    backend, guide, special = tokenizer_for(form, "all")
    text = mark + ('{"name": "get_time", "parameters": {}}' if name == "llama3_json" else "[get_time()]")
    for choice in ("auto", "required"):
        assert accepts(backend, guide, grammar_of(form, special, tools=TOOLS, choice=choice), text)
        spec = MessageSpec(tools=TOOLS, choice=choice, special_tokens=special)
        message, _ = read(form.parser(spec), list(text))
        assert [one.name for one in message.tool_calls] == ["get_time"] and message.content is None


def test_nothing_to_constrain() -> None:
    form = format_named("hermes", "qwen3")
    assert form.grammar(MessageSpec(can_reason=True)) is None
    assert form.grammar(MessageSpec(tools=TOOLS, choice="none")) is None
    assert format_named("openai", None).grammar(MessageSpec(tools=TOOLS, choice="none")) is None


def test_schemas_that_cannot_be_enforced() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
    tools = [TOOLS[0], Tool("bad", bad)]
    for name in ("hermes", "qwen3_coder", "pythonic", "gemma4"):
        form = format_named(name, None)
        assert form.grammar(MessageSpec(tools=tools)) is not None
        for spec in (
            MessageSpec(tools=tools, choice="required"),
            MessageSpec(tools=tools, choice="function:bad"),
            MessageSpec(tools=[TOOLS[0], Tool("bad", bad, strict=True)]),
        ):
            with refused(code="invalid_function_parameters") as caught:
                form.grammar(spec)
            assert caught.value.param.startswith("tools[1].function.parameters#/properties/a/pattern")
        assert form.grammar(MessageSpec(tools=tools, choice="function:get_weather")) is not None


CIRCLE = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"type": "string"}]}
HOSTILE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": CIRCLE}},
    {"type": "object", "properties": {"x": {"$ref": "#"}}},
    {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}},
    {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$defs": {"a": CIRCLE}},
    {"type": "object", "properties": {"x": {"type": "string", "enum": 1}}},
    {"type": "object", "properties": [], "required": {}},
    {"type": "object", "required": ["x"], "additionalProperties": False},
    {"type": "array"},
    {"type": "object", "properties": {"x": {"type": "string", "minLength": 10**9}}},
    {"type": "object", "properties": {'a"b>c=d': {"type": "string"}}},
    {"$ref": "#/$defs/o", "$defs": {"o": {"type": "object", "properties": {"x": {"type": "integer"}}}}},
]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gemma4", "llama3_json", "openai"])
def test_hostile_schemas_are_enforced_or_refused(name: str) -> None:
    form = format_named(name, None)
    _, guide, special = tokenizer_for(form, "none")
    rng = random.Random(0)
    for schema in HOSTILE:
        assert form.grammar(MessageSpec(tools=[Tool("f", schema)])) is not None
        spec = MessageSpec(tools=[Tool("f", schema)], choice="required", special_tokens=special)
        try:
            grammar = form.grammar(spec)
        except RequestError as error:
            assert error.code == "invalid_function_parameters" and error.param.startswith(
                "tools[0].function.parameters#"
            )
            continue
        drawn = [walk(guide, grammar, rng, 120, {b'"', b"}", b"]", b")"}) for _ in range(3)]
        for text in filter(None, drawn):
            check_walk(text.decode(), form, spec, rng)


def test_choices_that_cannot_be_met() -> None:
    with refused("tool_choice"):
        format_named("hermes", None).grammar(MessageSpec(tools=TOOLS, choice="function:other"))
    with pytest.raises(UnsupportedError):
        MessageFormat(None, None).grammar(MessageSpec(tools=TOOLS, choice="required"))
    assert MessageFormat(None, None).grammar(MessageSpec(tools=TOOLS)) is None


@cache
def ending_tokens(guide: Any, ends: frozenset[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens of a vocabulary are one of `ends`, and which do not end the text."""
    size = guide.vocab_size
    others = np.ones(size, np.uint8)
    others[list(guide.eos_tokens)] = 0
    return np.array([guide.decode_bytes([index]) in ends for index in range(size)]), others


def walk(guide: Any, grammar: str, rng: random.Random, most: int, ends: set[bytes]) -> bytes | None:
    """Draw tokens that the grammar allows until it accepts; None if it does not within so many.

    Markers and brackets come more often, or free text would never end.
    """
    matcher = matcher_of(guide, grammar)
    size = guide.vocab_size
    ending, others = ending_tokens(guide, frozenset(ends))
    tokens: list[int] = []
    while len(tokens) < most:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.2):
            return guide.decode_bytes(tokens)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
        allowed = np.flatnonzero(bits & others)
        if not len(allowed):
            assert matcher.is_accepting(), (grammar, guide.decode_bytes(tokens))
            return guide.decode_bytes(tokens)
        if rng.random() < 0.45 or len(tokens) > most // 2:
            marked = allowed[ending[allowed]]
            allowed = marked if len(marked) else allowed
        token = int(rng.choice(allowed))
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return None


def check_walk(text: str, form: MessageFormat, spec: MessageSpec, rng: random.Random) -> Message:
    """Check that a text drawn from the grammar is what was asked for."""
    cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    message, _ = read(form.parser(spec), [text])
    assert read(form.parser(spec), pieces)[0] == message
    schemas = {tool.name: tool.parameters for tool in spec.tools}
    for one in message.tool_calls:
        assert one.complete, text
        check_instance(one.arguments, schemas[one.name])
    if spec.choice == "required" or spec.choice.startswith("function:"):
        assert message.tool_calls and not message.content, text
        names = {one.name for one in message.tool_calls}
        assert spec.choice == "required" or (names == {spec.choice[9:]} and len(message.tool_calls) == 1)
    if spec.choice == "none":
        assert not message.tool_calls
    if not spec.parallel:
        assert len(message.tool_calls) <= 1
    if spec.structured_outputs is not None and not message.tool_calls:
        check_instance(message.content or "", FORM_SCHEMA)
    return message


def check_instance(text: str, schema: dict[str, Any]) -> None:
    """Raise `ValidationError` unless the text is JSON that fits the schema, which itself is not checked."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


ASKS: list[dict[str, Any]] = [
    {"choice": "auto"},
    {"choice": "required", "parallel": False},
    {"choice": "required", "can_reason": True},
    {"choice": "function:get_weather"},
    {"choice": "function:pick", "can_reason": True, "reasoning_open": True},
    {"choice": "auto", "structured_outputs": StructuredOutputParams(json=FORM_SCHEMA), "can_reason": True},
    {
        "choice": "none",
        "structured_outputs": StructuredOutputParams(json=FORM_SCHEMA),
        "can_reason": True,
        "reasoning_open": True,
    },
]


@with_markings("name", list(FORMATS))
def test_whatever_is_drawn_is_what_was_asked_for(name: str, marked: str) -> None:
    rng = random.Random(name)
    reasoning = {"mistral": "mistral", "gemma4": "gemma4", "openai": None}.get(name, "qwen3")
    form = format_named(name, reasoning)
    _, guide, special = tokenizer_for(form, marked)
    enough = 4 if marked == "calls" else 2
    calls = contents = 0
    ends = {text.encode() for text in (*markers_of(form), *'"}])>')}
    for settings in ASKS:
        spec = MessageSpec(tools=WALKED, special_tokens=special, end_tokens=[EOS], **settings)
        grammar = form.grammar(spec)
        assert grammar is not None
        done = 0
        for _ in range(20):
            if done == enough:
                break
            drawn = walk(guide, grammar, rng, 300, ends)
            if drawn is not None:
                message = check_walk(drawn.decode(), form, spec, rng)
                done += 1
                calls += len(message.tool_calls)
                contents += message.content is not None
        assert done, (settings, grammar)
    assert calls > enough and contents >= enough // 2
