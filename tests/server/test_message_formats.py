"""What models of many families write, over HTTP: the stream, however it is cut, adds up to the whole answer.

The engine is a fake that says what a model of the family would say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from quire.frontend.formats.registry import TOOL_FORMATS
from tests.helpers.fake_engine import reply_with
from tests.helpers.live_server import LiveServer
from tests.server.checks import CHAT, COMPLETIONS, HI, check_error, post
from tests.server.families import front_of
from tests.server.streams import add_up, parse_events

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "times": {"type": "integer"}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "leave", "parameters": {"type": "object", "properties": {}}}},
]
PLACE = "the \"old\" hall, né 'Süd'"


@dataclass(frozen=True)
class Family:
    """A family, by the names of its formats, and what a model of it writes.

    `special`: which markers are special tokens. `calls`: two, of `look` and `leave` (one where the family knows only
    one at a time). `reasoning`, `content`: what a message says before.
    """

    tools: str
    text: str
    reasoning: str | None = None
    special: tuple[str, ...] = ()
    content: str | None = "I look."
    single: bool = False

    @property
    def thinks(self) -> bool:
        return self.reasoning is not None


ARGUMENTS = json.dumps({"place": PLACE, "times": 2}, ensure_ascii=False)
LITERAL = json.dumps(PLACE, ensure_ascii=False)
THOUGHTS = "<think>\nWell. {x} [y]\n</think>\n\n"
FAMILIES = [
    Family(
        "hermes",
        f'{THOUGHTS}I look.\n<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "leave", "arguments": {}}\n</tool_call>',
        reasoning="qwen3",
    ),
    Family(
        "qwen3_coder",
        f"I look.\n\n<tool_call>\n<function=look>\n<parameter=place>\n{PLACE}\n</parameter>\n<parameter=times>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=leave>\n</function>\n</tool_call>",
    ),
    Family(
        "glm45",
        f"{THOUGHTS}I look.\n<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>{PLACE}</arg_value>\n"
        "<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>leave\n</tool_call>",
        reasoning="glm45",
        special=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    Family(
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.leave:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        special=(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    Family(
        "deepseek_v3",
        f"{THOUGHTS}I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
        f"```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>leave\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reasoning="deepseek_r1",
        special=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Family(
        "mistral",
        f"[THINK]Well. {{x}} [y][/THINK]I look.[TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]leave[ARGS]{{}}",
        reasoning="mistral",
        special=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    Family(
        "phi4_mini_json",
        f'I look.<|tool_call|>[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "leave", "arguments": {{}}}}]'
        "<|/tool_call|>",
        special=("<|tool_call|>", "<|/tool_call|>"),
    ),
    Family(
        "gemma4",
        f'I look.<|tool_call>call:look{{place:<|"|>{PLACE}<|"|>,times:2}}<tool_call|><|tool_call>call:leave{{}}'
        "<tool_call|>",
        special=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Family("pythonic", f"[look(place={LITERAL}, times=2), leave()]", content=None),
    Family(
        "llama3_json",
        f'{{"name": "look", "parameters": {ARGUMENTS}}}; {{"name": "leave", "parameters": {{}}}}',
        content=None,
    ),
    Family(
        "openai",
        "<|channel|>analysis<|message|>Well. {x} [y]<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>" + ARGUMENTS,
        reasoning="openai_gptoss",
        special=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        single=True,
    ),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=[family.tools for family in FAMILIES])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Family, LiveServer]]:
    family: Family = request.param
    assert family.tools in TOOL_FORMATS
    front = front_of(family.tools, family.reasoning, special=family.special)
    live = LiveServer(llm={"front_model": front})
    yield family, live
    live.close()


def ask(live: LiveServer, text: str, step: int = 1, **body: Any) -> dict[str, Any]:
    """Have the engine say `text`, `step` tokens at a time; return the answer, streamed or not."""
    assert live.llm.tokenizer is not None
    reply = reply_with(live.llm.tokenizer, text)

    def prepare() -> None:
        live.engine.reply, live.engine.tokens_per_step = reply, step

    live.do(prepare)
    response = post(live, CHAT, {"model": "fake", "messages": HI, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return add_up(parse_events(response.text)) if body.get("stream") else dict(response.json())


def choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices without the random ids of calls."""
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            assert re.fullmatch(r"call_[0-9a-f]{24}|functions\.\w+:\d", call.pop("id"))
    return list(answer["choices"])


def test_a_message_with_everything(served: tuple[Family, LiveServer]) -> None:
    family, live = served
    [choice] = choices(ask(live, family.text))
    message = choice["message"]
    assert message.get("reasoning") == ("Well. {x} [y]" if family.thinks else None)
    assert message["content"] == family.content
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    expected = [("look", {"place": PLACE, "times": 2}), ("leave", {})]
    assert calls == expected[: 1 if family.single else 2]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("step", [1, 7])
def test_streams_add_up_to_the_message(served: tuple[Family, LiveServer], step: int) -> None:
    family, live = served
    options = {"n": 2, "logprobs": True}
    whole = ask(live, family.text, **options)
    streamed = ask(live, family.text, step, **options, stream=True, stream_options={"include_usage": True})
    assert streamed["usage"] == whole["usage"]
    assert choices(streamed) == choices(whole)


def test_truncated_messages_end_with_length_in_both(served: tuple[Family, LiveServer]) -> None:
    family, live = served
    assert live.llm.tokenizer is not None
    size = len(live.llm.tokenizer.encode(family.text, add_special_tokens=False))
    for most in range(1, size + 1, 23):
        whole = choices(ask(live, family.text, max_tokens=most))
        streamed = choices(ask(live, family.text, 3, max_tokens=most, stream=True))
        assert streamed == whole
        assert whole[0]["finish_reason"] == "length"
        assert whole[0]["message"]["content"] is not None or whole[0]["message"]["tool_calls"]


def test_reasoning_can_be_left_out(served: tuple[Family, LiveServer]) -> None:
    family, live = served
    whole = choices(ask(live, family.text))
    del whole[0]["logprobs"]
    whole[0]["message"].pop("reasoning", None)
    for stream in (False, True):
        hidden = choices(ask(live, family.text, 3, stream=stream, include_reasoning=False))
        del hidden[0]["logprobs"]
        assert hidden == whole


def test_without_tools_there_are_no_calls(served: tuple[Family, LiveServer]) -> None:
    family, live = served
    text = family.text if family.tools == "openai" else "Hello."
    for stream in (False, True):
        [choice] = choices(ask(live, text, 3, stream=stream, tools=None))
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_the_marks_are_special_tokens_so_these_must_be_read(served: tuple[Family, LiveServer]) -> None:
    _, live = served
    body = {"model": "fake", "messages": HI, "tools": TOOLS, "skip_special_tokens": False}
    check_error(post(live, CHAT, body), 400, "unsupported_parameter", "skip_special_tokens")
    assert post(live, COMPLETIONS, {"model": "fake", "prompt": "a", "skip_special_tokens": False}).status_code == 200


def test_reasoning_is_counted_where_its_end_is_a_token(served: tuple[Family, LiveServer]) -> None:
    family, live = served
    usage = ask(live, family.text)["usage"]
    assert live.llm.tokenizer is not None
    marks = live.llm.front_model.message_format.thinking_texts
    if marks is None or len(live.llm.tokenizer.encode(marks[1], add_special_tokens=False)) > 1:
        assert "completion_tokens_details" not in usage
        return
    # Up to its end, from behind its beginning.
    begun, _, _ = family.text.partition(marks[1])
    reasoning = begun.rpartition(marks[0])[2] + marks[1]
    expected = len(live.llm.tokenizer.encode(reasoning, add_special_tokens=False)) if family.thinks else 0
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}
