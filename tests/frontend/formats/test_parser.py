"""Parsers: what messages mean, however the text is cut, cut off or malformed, and that they take linear time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.formats.message import CallEnd, Message, MessageSpec, Tool, ToolCall
from quire.frontend.formats.registry import format_named
from tests.frontend.formats.cases import CASES, TOOLS, Case, call_texts, markers_of, normal, read

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def parse(case: Case, text: str, **more: object) -> Message:
    return read(case.message_format().parser(case.request(**more)), [text])[0]


@by_case
def test_message(case: Case) -> None:
    assert normal(parse(case, case.text)) == case.message


@by_case
def test_message_with_markers_that_are_special_tokens(case: Case) -> None:
    markers = {text: index for index, text in enumerate(markers_of(case.message_format()))}
    texts = [case.message.reasoning or "", case.message.content or ""]
    if not any(marker in text for marker in markers for text in texts):
        assert (
            normal(parse(case, case.text + "<|end|>", special_tokens=markers, end_tokens=["<|end|>"])) == case.message
        )


@by_case
def test_every_cut(case: Case) -> None:
    """One cut anywhere, and every character by itself, change nothing."""
    whole = parse(case, case.text)
    form, spec = case.message_format(), case.request()
    for at in range(1, len(case.text)):
        assert read(form.parser(spec), [case.text[:at], case.text[at:]])[0] == whole, at
    assert read(form.parser(spec), list(case.text))[0] == whole


@by_case
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_cuts(case: Case, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(case.text) - 1), max_size=12)))
    pieces = [case.text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    assert read(case.message_format().parser(case.request()), pieces)[0] == parse(case, case.text)


@by_case
def test_truncated_anywhere(case: Case) -> None:
    """What was cut off is not complete, and what came before is what it would have been."""
    whole = parse(case, case.text)
    calls_done = 0
    at_start = case.message_format().calls.at_start
    for at in range(len(case.text)):
        part = parse(case, case.text[:at])
        assert all(one.complete for one in part.tool_calls[:-1])
        done = [one for one in part.tool_calls if one.complete]
        assert done == whole.tool_calls[: len(done)] and len(done) >= calls_done, at
        calls_done = len(done)
        for one, full in zip(part.tool_calls, whole.tool_calls, strict=False):
            assert one.name == full.name and full.arguments.startswith(one.arguments)
        assert (whole.reasoning or "").startswith(part.reasoning or ""), at
        if not at_start:
            assert (whole.content or "").startswith(_without_beginning(case, part.content)), at
    assert len([one for one in whole.tool_calls if one.complete]) == len(case.message.tool_calls)


def _without_beginning(case: Case, content: str | None) -> str:
    """Drop what may be the beginning of a marker at the end: only more text can tell."""
    content, form = content or "", case.message_format()
    markers = [*call_texts(form), *(form.thinking_texts or ())]
    for at in range(len(content)):
        if any(marker.startswith(content[at:].lstrip()) for marker in markers):
            return content[:at].rstrip()
    return content


def test_text_that_is_no_call_is_content() -> None:
    form = format_named("hermes", None)
    spec = MessageSpec(tools=TOOLS)
    for text in (
        "<tool_call>\nnone</tool_call>",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": 1}\n</tool_call>',
        "<tool_call",
        "a <tool_call><tool_call> b",
    ):
        assert read(form.parser(spec), [text])[0] == Message(content=text)
        assert read(form.parser(spec), list(text))[0] == Message(content=text)


def test_no_calls_where_none_are_wanted() -> None:
    text = 'a <tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    form = format_named("hermes", None)
    for spec in (MessageSpec(tools=TOOLS, choice="none"), MessageSpec()):
        assert read(form.parser(spec), [text])[0] == Message(content=text)


def test_broken_call_never_ends() -> None:
    form = format_named("hermes", None)
    good = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": tru}}\n</tool_call>'
    message, events = read(form.parser(MessageSpec(tools=TOOLS)), [broken + good])
    assert message.tool_calls == [
        ToolCall("get_weather", '{"city": tru}', None, False),
        ToolCall("get_time", "{}", None, True),
    ]
    assert message.content is None
    assert [event.index for event in events if isinstance(event, CallEnd)] == [1]


def test_nesting_without_end_breaks_the_call() -> None:
    for name, begin in (("hermes", '{"a": '), ("pythonic", "["), ("gemma4", "{a:")):
        form = format_named(name, None)
        head = {
            "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ',
            "pythonic": "[get_weather(city=",
            "gemma4": "<|tool_call>call:get_weather{city:",
        }[name]
        message, _ = read(form.parser(MessageSpec(tools=TOOLS)), [head + begin * 5000])
        assert [one.complete for one in message.tool_calls] == [False]


def test_special_tokens_do_not_reach_content() -> None:
    form = format_named("hermes", "qwen3")
    spec = MessageSpec(
        tools=TOOLS, can_reason=True, special_tokens={"<|im_start|>": 1, "<|im_end|>": 2}, end_tokens=["<|im_end|>"]
    )
    text = "<think>a<|im_start|>b</think>c<|im_start|> d<|im_end|>"
    assert read(form.parser(spec), list(text))[0] == Message("ab", "c d")


def test_texts_and_json_in_tags() -> None:
    """A parameter that may be a text or something else is what it looks like; one that is a text stays one."""
    tool = Tool(
        "f",
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "maybe": {"type": ["string", "null"]},
                "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            },
        },
    )
    values = [
        ("text", "12"),
        ("maybe", "null"),
        ("maybe", "nul"),
        ("either", "12"),
        ("either", '"12"'),
        ("text", "null"),
    ]
    expected = ['"12"', "null", '"nul"', "12", '"12"', '"null"']
    form = format_named("qwen3_coder", None)
    for (key, value), wanted in zip(values, expected, strict=True):
        text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        (one,) = read(form.parser(MessageSpec(tools=[tool])), list(text))[0].tool_calls
        assert one.complete and one.arguments == f'{{"{key}": {wanted}}}'


def test_repeated_ids_are_dropped() -> None:
    one = "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>"
    message, _ = read(format_named("kimi_k2", None).parser(MessageSpec(tools=TOOLS)), [text])
    assert [call.id for call in message.tool_calls] == ["functions.get_time:0", None]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_text_any_cuts(data: st.DataObject) -> None:
    """Scraps of a format in any order: no error, no event lost or doubled by cutting, ends only for sound calls."""
    case = data.draw(st.sampled_from(CASES))
    form = case.message_format()
    scraps = [
        *call_texts(form),
        *(form.thinking_texts or ()),
        *case.text.split(),
        "\n",
        " ",
        "{",
        "}",
        '"',
        "\\",
        "é",
    ]
    scraps += [case.text, case.text[: len(case.text) // 2], "get_weather", "<|im_end|>", "<", "[", "="]
    scraps += [
        "1,",
        "a=1,",
        "b:'x',",
        "True",
        "None,",
        ",",
        ":",
        "]",
        ")",
        "[get_weather(",
        "<|tool_call>call:get_weather{",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=25)))
    spec = case.request(special_tokens={"<|im_end|>": 1})
    whole, _ = read(form.parser(spec), [text])
    assert read(form.parser(spec), list(text))[0] == whole
    cut = data.draw(st.integers(0, len(text)))
    assert read(form.parser(spec), [text[:cut], text[cut:]])[0] == whole
    normal(whole)


MANY = [*(f"<|r{index}|>" for index in range(300)), "<|r1|>x", "<|", "[X]", "[X", "ab", "abc", "bcd"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_many_special_tokens(data: st.DataObject) -> None:
    """They are all removed, the longest where several begin, wherever the text is cut."""
    scraps = [
        *data.draw(st.lists(st.sampled_from(MANY), min_size=1, max_size=6)),
        "<|r1",
        "|>",
        "[",
        "a",
        "b",
        "x",
        " ",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=20)))
    known = MANY if data.draw(st.booleans()) else scraps[:-7]
    wanted, at = [], 0
    while at < len(text):
        longest = max((len(one) for one in known if text.startswith(one, at)), default=0)
        wanted += [] if longest else [text[at]]
        at += longest or 1
    spec = MessageSpec(special_tokens={one: index for index, one in enumerate(known)})
    form = format_named(None, None)
    for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
        assert (read(form.parser(spec), pieces)[0].content or "") == "".join(wanted)


@pytest.mark.parametrize("case", {case.format: case for case in CASES}.values(), ids=lambda case: case.format)
def test_time_is_linear(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the text takes at most about twice the steps, whatever is repeated (counted in lines of Python run)."""
    import sys

    form = case.message_format()
    rng = random.Random(0)
    repeated = [*call_texts(form), case.text, case.text[: len(case.text) // 2], "{", "[", '"', "\\", "\n", "<", '\\"']
    heads = ["", case.text[: rng.randrange(len(case.text))], case.text[: len(case.text) // 2]]
    spec = case.request(special_tokens={f"<|r{i}|>": i for i in range(30)})

    def steps(text: str) -> int:
        count = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal count
            count += 1
            return trace

        parser = form.parser(spec)
        sys.settrace(trace)
        try:
            parser.feed(text)
            parser.finish()
        finally:
            sys.settrace(None)
        return count

    for head in heads:
        for scrap in repeated:
            few = steps(head + scrap * (1000 // len(scrap) + 1))
            many = steps(head + scrap * (2 * (1000 // len(scrap) + 1)))
            assert many <= 2.3 * few + 200, (head, scrap, few, many)


@pytest.mark.slow
@pytest.mark.parametrize("case", {case.format: case for case in CASES}.values(), ids=lambda case: case.format)
def test_a_megabyte_of_anything(case: Case) -> None:
    """Nothing that takes more than linear time would come to an end here."""
    form = case.message_format()
    spec = case.request(special_tokens={f"<|r{i}|>": i for i in range(250)})
    for scrap in (*call_texts(form), case.text[: len(case.text) // 2], "{", "[", '"', "\\", "\n", "<"):
        read(form.parser(spec), [scrap * (1_000_000 // len(scrap))])
        read(form.parser(spec), list(scrap * (20_000 // len(scrap))))
