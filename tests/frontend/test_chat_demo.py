"""The demo model's template: as it was trained without tools, in the hermes format with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.demo import demo_model_path
from quire.errors import RequestError
from quire.frontend.chat import ChatTemplate
from quire.tokenizer.tokenizer import Tokenizer
from quire.train.tokenizer import BOS, CHAT_TEMPLATE, prompt_text, render_chat

FOLDER = Path(demo_model_path())
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
USER = {"role": "user", "content": " What? "}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    tokenizer = Tokenizer.from_folder(FOLDER)
    assert tokenizer.chat_template == CHAT_TEMPLATE, "the folder has the template that training writes"
    return ChatTemplate(CHAT_TEMPLATE, tokenizer)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_without_tools_the_text_is_that_of_training(template: ChatTemplate) -> None:
    draw = random.Random(5)
    for _ in range(300):
        roles = [draw.choice(["system", "user", "assistant"]) for _ in range(draw.randint(1, 6))]
        texts = ["", " x ", "a <b>\n", "größe", "\n\na"]
        messages = [{"role": role, "content": draw.choice(texts)} for role in roles]
        assert template.render(messages) == BOS + prompt_text(messages)
        assert template.render(messages, False, tools=[]) == BOS + "".join(text for text, _ in render_chat(messages))


def test_tools_calls_and_results(template: ChatTemplate) -> None:
    from transformers import PreTrainedTokenizerFast

    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call({"a": 1}), call({"a": 2})]},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "1", "content": "two"},
    ]
    text = template.render(messages, tools=[TOOL])
    oracle = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    expected = oracle.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert text == expected
    system, user, assistant, results, prompt = text.removesuffix("<|assistant|>").split("<|end|>")
    assert system.startswith("<|bos|><|system|>Be brief.\n\n# Tools") and '"name": "add"' in system
    assert user == "<|user|>What?"
    block = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
    assert assistant == "<|assistant|>" + block % 1 + "\n" + block % 2
    assert results == ("<|user|><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>")
    assert prompt == ""


def test_tools_without_a_system_message(template: ChatTemplate) -> None:
    text = template.render([USER], tools=[TOOL])
    assert text.startswith("<|bos|><|system|># Tools\n") and text.endswith("<|end|><|user|>What?<|end|><|assistant|>")
    assert template.reads("tools")


def test_other_roles_are_refused(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="knows the roles"):
        template.render([{"role": "narrator", "content": "x"}])
