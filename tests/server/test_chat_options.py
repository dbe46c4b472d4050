"""What chats may say of templates, reasoning, tools and tokens, and what arrives at the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire.engine_request import EngineRequest
from quire.frontend.chat import ChatTemplate
from quire.sampling_params import SamplingParams
from quire.server.generation import SHARED_FIELDS
from quire.server.protocol import REFUSED_EVERYWHERE, CompletionRequest
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import CHAT, COMPLETIONS, HI, TOKENIZE, check_error, post, prompt_of
from tests.server.families import front_of
from tests.server.responses.asking import says
from tests.server.streams import add_up, parse_events

TEMPLATE = (
    "{%- if tools -%}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}"
    "{%- for document in documents or [] -%}<|im_start|>document\n{{ document.text + '<|im_end|>\n' }}{%- endfor -%}"
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}<tool_call>{{ call | tojson }}</tool_call>{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if reasoning_effort -%}<effort>{{ reasoning_effort }}</effort>{%- endif -%}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think></think>\n' }}"
    "{%- else -%}<think>{%- endif -%}"
    "{%- endif -%}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    """A model that reasons and calls, with a template that reads everything."""
    front = front_of("hermes", "qwen3", special=("<think>", "</think>"))
    assert front.tokenizer is not None
    front = dataclasses.replace(front, chat_template=ChatTemplate(TEMPLATE, front.tokenizer), max_logprobs=-1)
    live = LiveServer(llm={"front_model": front}, trust_request_chat_template=True, max_logprobs=-1)
    yield live
    live.close()


def chat(live: LiveServer, text: str = "hello", **body: Any) -> dict[str, Any]:
    """Return the answer to a chat for which the model says `text`."""
    says(live, text)
    response = post(live, CHAT, {"model": "fake", "messages": HI, **body})
    assert response.status_code == 200, response.text
    return add_up(parse_events(response.text)) if body.get("stream") else dict(response.json())


def added(live: LiveServer) -> EngineRequest:
    return live.do(lambda: live.engine.added[-1])


def test_reasoning_that_the_prompt_began(served: LiveServer) -> None:
    answer = chat(served, "let me see</think>\n\nhello")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "reasoning": "let me see",
    }
    cut = chat(served, "let me see", max_tokens=3)["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["content"] == ""
    assert cut["message"]["reasoning"] == "let"


def test_effort_goes_to_the_template(served: LiveServer) -> None:
    chat(served, reasoning_effort="high")
    assert prompt_of(served).endswith("assistant\n<effort>high</effort><think>")
    message = chat(served, "hello <think>", reasoning_effort="none", chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(served).endswith("assistant\n<effort>none</effort><think></think>\n")
    assert message["choices"][0]["message"]["content"] == "hello "
    assert "reasoning" not in message["choices"][0]["message"]
    assert post(served, TOKENIZE, {"messages": HI, "reasoning_effort": "low"}).json()["count"] > 30


def test_what_the_template_does_not_read_is_named_in_headers(server: LiveServer, served: LiveServer) -> None:
    ignored = "has no effect: this model's chat template does not read it"
    body = {"model": "fake", "messages": HI, "reasoning_effort": "high", "verbosity": "low"}
    body["prediction"] = {"type": "content", "content": "hi"}
    for stream in (False, True):
        response = post(server, CHAT, {**body, "stream": stream})
        assert response.status_code == 200, response.text
        warnings = response.headers.get_list("x-quire-warning")
        assert warnings == [f"verbosity {ignored}", f"reasoning_effort {ignored}"]
    assert (
        "x-quire-warning" not in post(server, CHAT, {**body, "reasoning_effort": None, "verbosity": "medium"}).headers
    )
    assert post(served, CHAT, body).headers.get_list("x-quire-warning") == [f"verbosity {ignored}"]


def test_a_budget_for_reasoning(served: LiveServer) -> None:
    chat(served, thinking_token_budget=5)
    thinking = added(served).thinking
    assert thinking is not None
    assert (thinking.budget, thinking.open, len(thinking.end_ids)) == (5, True, 1)
    chat(served, thinking_token_budget=-1)
    assert added(served).thinking is None


def test_documents_and_templates_of_requests(served: LiveServer, make_server: MakeServer) -> None:
    chat(served, documents=[{"title": "a", "text": "facts"}])
    assert prompt_of(served).startswith("<|im_start|>document\nfacts<|im_end|>\n")
    own = "{{ messages[0].content }}!{{ volume }}"
    chat(served, chat_template=own, chat_template_kwargs={"volume": 3})
    assert prompt_of(served) == "hi!3"
    tokens = post(served, TOKENIZE, {"messages": HI, "chat_template": own}).json()["tokens"]
    assert len(tokens) == 3
    body = {"model": "fake", "messages": HI, "chat_template": "{{ a b }}"}
    check_error(post(served, CHAT, body), 400, "invalid_value", "chat_template")
    silent = {"model": "fake", "messages": HI, "chat_template": own, "tools": TOOLS}
    check_error(post(served, CHAT, silent), 400, "unsupported_parameter", "tools")
    check_error(post(make_server(), TOKENIZE, body), 400, "unsupported_parameter", "chat_template")


def test_tools_are_rendered_and_calls_are_constrained(served: LiveServer) -> None:
    answer = chat(served, f"</think>{CALL}", tools=TOOLS)
    assert '<|im_start|>tools\n[{"type": "function", "function": {"name": "look"' in prompt_of(served)
    assert added(served).grammar
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "look"}}
    answer = chat(served, f"</think>{CALL}", tools=TOOLS, tool_choice=named)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    answer = chat(served, f"</think>{CALL}", tools=TOOLS, tool_choice=allowed)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_that_may_not_be_called_are_shown_all_the_same(served: LiveServer) -> None:
    answer = chat(served, f"</think>{CALL}", tools=TOOLS, tool_choice="none")
    assert "<|im_start|>tools" in prompt_of(served)
    assert added(served).grammar is None
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = post(served, TOKENIZE, {"messages": HI, "tools": TOOLS}).json()["tokens"]
    assert tokens == added(served).prompt_token_ids


def test_a_message_goes_on_where_it_ended(served: LiveServer) -> None:
    begun = {"role": "assistant", "content": None, "reasoning": "let me"}
    answer = chat(served, " see</think>hello", messages=[*HI, begun], continue_final_message=True)
    assert prompt_of(served).endswith("assistant\n<think>let me")
    assert answer["choices"][0]["message"]["reasoning"] == "see"
    assert answer["choices"][0]["message"]["content"] == "hello"
    long = {"role": "assistant", "content": None, "reasoning": "let me see " * 30}
    answer = chat(served, "again</think>hello", messages=[*HI, long], continue_final_message=True)
    assert answer["choices"][0]["message"]["reasoning"] == "again"
    begun = {"role": "assistant", "content": "he", "reasoning": "let me see"}
    answer = chat(served, "llo", messages=[*HI, begun], continue_final_message=True)
    assert prompt_of(served).endswith("<think>let me see</think>he")
    assert answer["choices"][0]["message"]["content"] == "llo"


def test_a_conversation_with_calls(served: LiveServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "reasoning": "well", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "nothing"}]},
    ]
    chat(served, messages=messages, tools=TOOLS)
    prompt = prompt_of(served)
    assert "<think>well</think>" in prompt
    assert '"arguments": {"at": 1}' in prompt
    assert "<|im_start|>tool\nnothing<|im_end|>" in prompt


def test_all_alternatives_of_a_token(served: LiveServer) -> None:
    answer = chat(served, "hi", logprobs=True, top_logprobs=-1, max_tokens=1)
    [token] = answer["choices"][0]["logprobs"]["content"]
    assert len(token["top_logprobs"]) == served.llm.vocab_size
    body = {"model": "fake", "messages": HI, "logprobs": True, "top_logprobs": -1, "n": 100}
    check_error(post(served, CHAT, body), 400, "invalid_value", "logprobs")


def test_sampling_options_arrive(served: LiveServer) -> None:
    options: dict[str, Any] = {
        "typical_p": 0.5,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n"],
        "dynatemp_range": 0.5,
        "dynatemp_exponent": 2.0,
        "stream_interval": 4,
        "spaces_between_special_tokens": False,
        "skip_reading_prefix_cache": True,
    }
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        response = post(served, path, {"model": "fake", "max_tokens": 2, "stream": True, **body, **options})
        assert response.status_code == 200, response.text
        params = added(served).sampling_params
        # Intervals are the front's own business.
        assert {**options, **{name: getattr(params, name) for name in options if name != "stream_interval"}} == options
    detection = {"max_pattern_size": 3, "min_count": 4}
    chat(served, repetition_detection=detection, mirostat=2, mirostat_tau=4.0, mirostat_eta=0.2)
    params = added(served).sampling_params
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta) == (2, 4.0, 0.2)
    assert msgspec.to_builtins(params.repetition_detection) == detection


def test_no_sampling_option_is_unknown() -> None:
    """Every field of `SamplingParams` is one of requests, or refused by name."""
    elsewhere = {"structured_outputs", "guided_decoding", "logprobs", "output_kind", "extra_args", "skip_clone"}
    fields = set(SamplingParams.__struct_fields__) - elsewhere
    assert fields <= set(SHARED_FIELDS) | set(REFUSED_EVERYWHERE)
    assert set(REFUSED_EVERYWHERE).isdisjoint(CompletionRequest.model_fields)


def test_a_stream_with_intervals_says_the_same(served: LiveServer) -> None:
    text = f"let me see</think>I look. {CALL}"
    whole = chat(served, text, tools=TOOLS)["choices"][0]
    streamed = chat(served, text, tools=TOOLS, stream=True, stream_interval=7)["choices"][0]
    for choice in (whole, streamed):
        for call in choice["message"]["tool_calls"]:
            del call["id"]
    assert streamed == whole
