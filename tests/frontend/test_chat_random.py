"""Random conversations through every template: text, ids and refusals are those of transformers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.frontend.families import FAMILIES
from tests.frontend.test_chat_families import (
    ONE_FORM_ONLY,
    TOOLS,
    WAYS,
    call,
    calling,
    ids_of,
    oracle_of,
    ours,
    result,
    theirs,
)

TEXTS = ["", " ", "x", " a\n", "<think>r</think>b", "</think>", "\n\n<b>日本</b>", "<tool_response>1</tool_response>"]
TEXTS += ['{"a": 1}', "INST]", "a 'q' \"d\"", "{{ messages }}{% x %}"]
VALUES: list[Any] = [1, -2.5, None, True, "x", "<é>", [1, {"y": None}], {"z": []}, 10**30]
VARIABLES: list[tuple[str, Any]] = [
    ("enable_thinking", True),
    ("enable_thinking", False),
    ("thinking", True),
    ("reasoning_effort", "low"),
    ("tools_in_user_message", False),
]


def arguments(draw: random.Random, as_text: bool) -> Any:
    given = {draw.choice("abcdé"): draw.choice(VALUES) for _ in range(draw.randint(0, 3))}
    return json.dumps(given, ensure_ascii=False) if as_text else given


def round_of(draw: random.Random, as_text: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw.choice(TEXTS)}]
    if draw.random() < 0.15:
        role = draw.choice(["user", "system", "developer", "function"])
        messages.append({"role": role, "content": draw.choice(TEXTS), "name": "n"})
    if draw.random() < 0.4:
        calls = [call(arguments(draw, as_text), index, "now") for index in range(draw.choice([1, 1, 2]))]
        message = calling(*calls, content=draw.choice(TEXTS))
        if draw.random() < 0.3:
            message["reasoning_content"] = draw.choice(TEXTS)
        messages += [message, *(result(draw.choice(TEXTS), index) for index in range(len(calls)))]
    if draw.random() < 0.7:
        answer: dict[str, Any] = {"role": "assistant", "content": draw.choice(TEXTS)}
        if draw.random() < 0.4:
            answer[draw.choice(["reasoning", "thinking", "reasoning_content"])] = draw.choice(TEXTS)
        if draw.random() < 0.3:
            answer = dict(reversed(answer.items()))
        messages.append({**answer, "tool_calls": None} if draw.random() < 0.2 else answer)
    return messages


def conversation(draw: random.Random, as_text: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    messages = [{"role": "system", "content": draw.choice(TEXTS)}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        messages += round_of(draw, as_text)
    options: dict[str, Any] = dict(draw.choice(list(WAYS.values())))
    if options.get("continue_final_message") and draw.random() < 0.3:
        options["continue_final_message"] = draw.choice(["reasoning_content", "thinking", "content"])
    if draw.random() < 0.5:
        options["tools"] = draw.choice([TOOLS, TOOLS[:1], [], None])
    options |= {name: value for name, value in VARIABLES if draw.random() < 0.1}
    return messages, options


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations(family: str) -> None:
    draw = random.Random(f"chat {family}")
    rendered = 0
    for index in range(80):
        messages, options = conversation(draw, family in ONE_FORM_ONLY)
        expected = theirs(family, messages, **options)
        assert ours(family, messages, **options) == expected, (messages, options)
        if expected is not None:
            rendered += 1
            if index % 4 == 0 and not options.get("continue_final_message"):
                ids = oracle_of(family)(expected, add_special_tokens=False).input_ids
                assert ids_of(family, messages, options) == ids, (messages, options)
    assert rendered >= 15
