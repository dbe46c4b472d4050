"""Bad requests to all APIs, a row each: what is sent, and the code, the field and the words of the error.

They follow the project's list of hostile inputs. `test_bad_requests` sends them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.server.responses.items import seal
from tests.server.checks import CHAT, COMPLETIONS, DETOKENIZE, HI, JSON, TOKENIZE, VOCAB, nested
from tests.server.families import MAX_MODEL_LEN

MISSING, TYPE, VALUE, UNKNOWN = "missing_required_parameter", "invalid_type", "invalid_value", "unknown_parameter"
UNSUPPORTED, EMPTY, EMPTY_TEXT = "unsupported_parameter", "empty_array", "string_below_min_length"
ABOVE, BELOW, LONG_LIST = "integer_above_max_value", "integer_below_min_value", "array_above_max_length"
DECIMAL_ABOVE, DECIMAL_BELOW, LONG_TEXT = (
    "decimal_above_max_value",
    "decimal_below_min_value",
    "string_above_max_length",
)
TOO_LONG, MEDIA, NO_MODEL = "context_length_exceeded", "unsupported_content_type", "model_not_found"
GRAMMAR, SCHEMA, COMPLEX = "invalid_grammar", "invalid_json_schema", "grammar_too_complex"
NO_JSON, FUNCTION, CODING = "invalid_json", "invalid_function_parameters", "unsupported_content_encoding"

CONTEXT = 256  # of the fixture `server`
MESSAGES, OLLAMA_CHAT, GENERATE, SHOW = "/v1/messages", "/api/chat", "/api/generate", "/api/show"
RESPONSES, EMBED = "/v1/responses", "/v1/embeddings"


class Bad(NamedTuple):
    """A bad request and its error.

    `server` is the name of the fixture: "server", or "family" for a model with tools and reasoning. `code` and `param`
    are None where the API's errors have none; `words` are in the message.
    """

    server: str
    path: str
    content: bytes
    headers: dict[str, str]
    status: int
    code: str | None
    param: str | None
    words: tuple[str, ...]

    def __str__(self) -> str:
        shown = self.content[:60].decode("ascii", "replace").replace('"', "")
        return f"{self.path.rpartition('/')[2]} {self.code or self.words[0]} {self.param or ''} {shown}"


def table(server: str, path: str, **base: Any) -> Callable[..., Bad]:
    """Return a maker of rows that change fields of a good request; `...` leaves one out."""

    def bad(code: str | None, param: str | None, *words: str, status: int = 400, **changes: Any) -> Bad:
        body = {key: value for key, value in {**base, **changes}.items() if value is not ...}
        return Bad(server, path, json.dumps(body).encode(), JSON, status, code, param, words)

    return bad


def by_words(server: str, path: str, **base: Any) -> Callable[..., Bad]:
    """As `table`, for APIs whose errors name neither code nor field: the words do."""
    bad = table(server, path, **base)
    return lambda *words, **changes: bad(None, None, *words, **changes)


def user(*parts: Any, **more: Any) -> list[Any]:
    """Return a conversation of one message: parts of content, or content that is no list."""
    content = parts[0] if len(parts) == 1 and not isinstance(parts[0], dict) else list(parts)
    return [{"role": "user", "content": content, **more}]


# ---- bodies that are no request ----

GOOD = b'{"model":"fake","prompt":"a"}'


def raw(content: bytes, code: str, param: str | None = None, *words: str, status: int = 400, **headers: str) -> Bad:
    kinds = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Bad("server", COMPLETIONS, content, kinds, status, code, param, words)


def with_field(text: bytes) -> bytes:
    return GOOD[:-1] + b"," + text + b"}"


BODIES = [
    raw(b'{"model":', NO_JSON, None, "character 9"),
    raw(b"", NO_JSON),
    *[raw(body, TYPE, None, "must be a JSON object") for body in (b"null", b"[]", b'"x"', b"1")],
    raw(b'{"model":"fake","prompt":"\xff\xfe"}', NO_JSON, None, "UTF-8"),
    *[raw(GOOD.decode().encode(coding), NO_JSON) for coding in ("utf-16", "utf-16-le", "utf-32")],
    raw(rb'{"model":"fake","prompt":"a\ud800"}', VALUE, "prompt"),
    raw(rb'{"model":"fake","prompt":"a","\ud800":1}', UNKNOWN, r"\ud800"),
    raw(rb'{"model":"\ud800","prompt":"a"}', NO_MODEL, "model", status=404),
    raw(with_field(b'"temperature":NaN'), NO_JSON, None, "NaN"),
    raw(with_field(b'"temperature":-Infinity'), NO_JSON, None, "Infinity"),
    raw(with_field(b'"logit_bias":{"5":NaN}'), NO_JSON, None, "NaN"),
    raw(with_field(b'"temperature":1e400'), DECIMAL_ABOVE, "temperature", "1.79769e+308"),
    raw(with_field(b'"seed":' + b"9" * 5000), ABOVE, "seed"),
    raw(with_field(b'"seed":-' + b"9" * 5000), BELOW, "seed"),
    raw(b"[" * 100_000, NO_JSON, None, "nested too deeply", "64"),
    raw(with_field(b'"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000), NO_JSON, None, "nested too deeply"),
    raw(with_field(b'"metadata":' + b"[" * 65 + b"]" * 65), NO_JSON, None, "64"),
    raw(GOOD, MEDIA, None, "application/json", status=415, content_type="text/plain"),
    raw(GOOD, MEDIA, status=415, content_type="application/x-www-form-urlencoded"),
    raw(GOOD, MEDIA, status=415, content_type=""),
    raw(
        gzip.compress(GOOD, mtime=0), "unsupported_content_encoding", None, "gzip", status=415, content_encoding="gzip"
    ),
    raw(b" " * (2**20 + 1), "request_too_large", None, str(2**20), status=413),
]

# ---- /v1/completions ----

bad = table("server", COMPLETIONS, model="fake", prompt="a")
LONG_PROMPT = [5] * 2000
COMPLETION_ROWS = [
    *[bad(MISSING, "model", model=value) for value in (..., None)],
    bad(TYPE, "model", model=5),
    bad(NO_MODEL, "model", "nope", "fake", model="nope", status=404),
    bad(NO_MODEL, "model", model="../../etc/passwd", status=404),
    *[bad(MISSING, "prompt", prompt=value) for value in (..., None)],
    *[bad(EMPTY, "prompt", prompt=value) for value in ("", [])],
    *[bad(EMPTY, "prompt[0]", prompt=value) for value in ([""], [[]])],
    bad(EMPTY, "prompt[1]", prompt=["a", ""]),
    *[bad(TYPE, "prompt", prompt=value) for value in ({"a": 1}, 5)],
    *[bad(TYPE, "prompt[1]", prompt=value) for value in (["a", 1], [5, None])],
    *[bad(TYPE, "prompt[0]", prompt=value) for value in ([True, False], [1.5])],
    *[bad(VALUE, "prompt[0]", prompt=value) for value in ([-1], [2**63])],
    bad(VALUE, "prompt[1]", f"vocab {VOCAB}", prompt=[5, VOCAB]),
    bad(VALUE, "prompt[1][1]", prompt=[[5], [5, VOCAB]]),
    bad(TOO_LONG, "prompt", "2000", f"{CONTEXT}", prompt=LONG_PROMPT),
    bad(TOO_LONG, "prompt", f"{CONTEXT}", prompt=[5] * CONTEXT),
    bad(TOO_LONG, "prompt", f"{CONTEXT}", prompt="x" * 900_000),
    bad(TOO_LONG, "prompt[1]", prompt=["a", "x" * 900_000]),
    bad(LONG_LIST, "prompt", "256", "1025", prompt=["a"] * 1025),
    *[bad(BELOW, "max_tokens", max_tokens=value) for value in (0, -1)],
    bad(ABOVE, "max_tokens", max_tokens=2**70),
    *[bad(TYPE, "max_tokens", max_tokens=value) for value in ("5", 5.5, True)],
    bad(DECIMAL_BELOW, "temperature", "-0.1", temperature=-0.1),
    *[bad(TYPE, "temperature", temperature=value) for value in ("hot", True)],
    *[bad(DECIMAL_BELOW, "top_p", top_p=value) for value in (0, -1)],
    bad(DECIMAL_ABOVE, "top_p", top_p=1.1),
    bad(TYPE, "top_k", top_k=1.5),
    bad(BELOW, "top_k", top_k=-2),
    bad(ABOVE, "top_k", top_k=2**70),
    bad(DECIMAL_ABOVE, "presence_penalty", presence_penalty=3),
    bad(DECIMAL_BELOW, "frequency_penalty", frequency_penalty=-3),
    bad(DECIMAL_BELOW, "repetition_penalty", repetition_penalty=0),
    bad(DECIMAL_ABOVE, "repetition_penalty", repetition_penalty=1e308),
    bad(DECIMAL_ABOVE, "min_p", min_p=1.5),
    bad(DECIMAL_BELOW, "typical_p", typical_p=0),
    bad(VALUE, "dry_base", dry_base=2.0),
    bad(ABOVE, "mirostat", mirostat=3),
    bad(VALUE, "top_k", mirostat=2, top_k=5),
    *[bad(BELOW, "n", n=value) for value in (0, -1)],
    bad(ABOVE, "n", "16384", n=100_000),
    bad(ABOVE, "best_of", "16384", best_of=1_000_000),
    bad(BELOW, "best_of", best_of=0),
    bad(TYPE, "best_of", best_of=True),
    bad(VALUE, "best_of", n=3, best_of=2),
    bad(VALUE, "best_of", best_of=2, temperature=0),
    bad(VALUE, "best_of", best_of=2, stream=True),
    bad(VALUE, "n", prompt=["a"] * 100, n=200),
    bad(VALUE, "best_of", prompt=["a"] * 100, best_of=200),
    bad(VALUE, "logprobs", prompt=["a"] * 40, n=20, logprobs=20),
    *[bad(ABOVE, "logprobs", logprobs=value) for value in (21, 100_000, -1)],
    bad(TYPE, "logprobs", logprobs=True),
    bad(BELOW, "logprobs", logprobs=-2),
    bad(ABOVE, "prompt_logprobs", prompt_logprobs=10**6),
    bad(VALUE, "prompt_logprobs", prompt_logprobs=1, stream=True),
    bad(VALUE, "logprob_token_ids[0]", logprob_token_ids=[VOCAB]),
    bad(TYPE, "logprob_token_ids", logprob_token_ids="a"),
    bad(VALUE, "logprobs", logprob_token_ids=[5, 6], logprobs=3),
    bad(LONG_LIST, "stop", "128", stop=["ab"] * 129),
    bad(LONG_LIST, "stop", stop=["a"] * 100_000),
    bad(EMPTY_TEXT, "stop", stop=""),
    bad(EMPTY_TEXT, "stop[1]", stop=["a", ""]),
    bad(TYPE, "stop", stop=5),
    *[bad(LONG_TEXT, "stop", "1024", stop="x" * length) for length in (1025, 900_000)],
    bad(VALUE, "stop_token_ids[0]", stop_token_ids=[999_999]),
    bad(VALUE, "stop_token_ids[1]", stop_token_ids=[5, -1]),
    bad(LONG_LIST, "stop_token_ids", stop_token_ids=[5] * 129),
    bad(VALUE, "logit_bias", "abc", logit_bias={"abc": 1}),
    bad(VALUE, "logit_bias", "999999", logit_bias={"999999": 1}),
    bad(DECIMAL_ABOVE, "logit_bias", "100", logit_bias={"5": 101}),
    bad(TYPE, "logit_bias", logit_bias=[5]),
    bad(EMPTY, "allowed_token_ids", allowed_token_ids=[]),
    bad(VALUE, "allowed_token_ids[0]", allowed_token_ids=[VOCAB]),
    bad(LONG_LIST, "bad_words", "128", bad_words=["x"] * 50_000),
    bad(TYPE, "seed", seed="x"),
    bad(ABOVE, "seed", seed=2**64),
    *[bad(TYPE, "stream", stream=value) for value in ("yes", 1)],
    bad(VALUE, "stream_options", "stream", stream_options={"include_usage": True}),
    bad(UNKNOWN, "stream_options.x", stream=True, stream_options={"x": 1}),
    bad(NO_MODEL, "model", stream=True, model="nope", status=404),
    bad(TOO_LONG, "prompt", stream=True, prompt=LONG_PROMPT),
    bad(BELOW, "stream_interval", stream_interval=0, stream=True),
    bad(VALUE, "stream_interval", stream_interval=2),
    bad(TYPE, "echo", echo="x"),
    bad(UNSUPPORTED, "suffix", suffix="x"),
    bad(UNSUPPORTED, "prompt_embeds", prompt_embeds="gASVAAAA"),
    bad(UNSUPPORTED, "detokenize", detokenize=False),
    bad(UNSUPPORTED, "watermarking", watermarking={}),
    bad(UNSUPPORTED, "thinking_token_budget", thinking_token_budget=5),
    bad(UNSUPPORTED, "documents", documents=[{"text": "a"}]),
    bad(TYPE, "priority", priority="high"),
    *[bad(UNKNOWN, name, **{name: "a"}) for name in ("foo_bar", "regex", "ebnf")],
    bad(UNKNOWN, "temprature", "did you mean temperature?", temprature=1),
    bad(LONG_TEXT, "user", "256", user="x" * 900_000),
    bad(LONG_TEXT, "request_id", "128", request_id="x" * 100_000),
    bad(VALUE, "request_id", request_id="a\nb"),
    *[bad(VALUE, "cache_salt", cache_salt=value) for value in ("", "a/b")],
    bad(VALUE, "min_tokens", "9", "8", min_tokens=9, max_tokens=8),
    bad(BELOW, "truncate_prompt_tokens", truncate_prompt_tokens=0),
    bad(TYPE, "ignore_eos", ignore_eos=1),
    bad(TYPE, "repetition_detection", repetition_detection=5),
    bad(BELOW, "repetition_detection.max_pattern_size", repetition_detection={"max_pattern_size": 0}),
    bad(UNKNOWN, "repetition_detection", repetition_detection={"max_pattern_size": 2, "x": 1}),
    bad(VALUE, "logits_processors", logits_processors=["nope"]),
    bad(TYPE, "logits_processors", logits_processors="os:system"),
    bad(TYPE, "use_beam_search", use_beam_search=1),
    bad(VALUE, "length_penalty", length_penalty=2.0),
    bad(TYPE, "length_penalty", length_penalty=True),
    *[bad(VALUE, "early_stopping", early_stopping=value) for value in (True, 0)],
]

# ---- beam search, in completions and chats: nothing that beams cannot honour is ignored ----

BEAM_FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    (BELOW, "n", {"n": 0}),
    (ABOVE, "n", {"n": 129}),
    (ABOVE, "best_of", {"best_of": 129}),
    (VALUE, "best_of", {"n": 3, "best_of": 2}),
    (TYPE, "temperature", {"temperature": "0"}),
    (UNSUPPORTED, "temperature", {"temperature": 1e-9}),
    (DECIMAL_ABOVE, "length_penalty", {"length_penalty": 11}),
    (TYPE, "length_penalty", {"length_penalty": "1"}),
    (VALUE, "early_stopping", {"early_stopping": "always"}),
    (VALUE, "early_stopping", {"early_stopping": 1}),
    (BELOW, "max_tokens", {"max_tokens": 0}),
    (TYPE, "seed", {"seed": "x"}),
    *[
        (UNSUPPORTED, name, {name: value})
        for name, value in {
            "stream": True,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 5,
            "min_p": 0.5,
            "min_tokens": 1,
            "presence_penalty": 1,
            "frequency_penalty": 1,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 1},
            "stop": "x",
            "stop_token_ids": [5],
            "bad_words": ["x"],
            "allowed_token_ids": [5],
            "prompt_logprobs": 0,
        }.items()
    ],
]
chat = table("server", CHAT, model="fake", messages=HI)
BEAM_ROWS = [
    *[make(code, param, use_beam_search=True, **fields) for make in (bad, chat) for code, param, fields in BEAM_FIELDS],
    bad(UNSUPPORTED, "logprobs", use_beam_search=True, logprobs=0),
    chat(UNSUPPORTED, "logprobs", use_beam_search=True, logprobs=True),
]

# ---- /v1/chat/completions ----


def tools(*functions: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": function} for function in functions]


def called(call_id: Any, arguments: Any = "{}") -> dict[str, Any]:
    function = {"name": "a", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


def answered(**fields: Any) -> list[Any]:
    return [*HI, called("x"), {"role": "tool", "content": "1", **fields}]


A = tools({"name": "a"})
STRANGE = {"properties": {"x": {"type": "strnig"}}}
PARAMETERS = "tools[0].function.parameters"
PART, CALLS = "messages[0].content[0]", "messages[1].tool_calls[0]"
NAMED_B = {"type": "function", "function": {"name": "b"}}
NO_TOOLS_ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
CHAT_ROWS = [
    chat(MISSING, "messages", messages=...),
    chat(EMPTY, "messages", messages=[]),
    *[chat(TYPE, "messages", messages=value) for value in (None, "hi")],
    chat(TYPE, "messages[0]", messages=["hi"]),
    chat(MISSING, "messages[0].role", messages=[{"content": "hi"}]),
    chat(VALUE, "messages[0].role", "user", "assistant", messages=[{"role": "wizard", "content": "a"}]),
    chat(TYPE, "messages[0].role", messages=[{"role": 5, "content": "a"}]),
    *[chat(TYPE, "messages[0].content", messages=user(value)) for value in (5, None)],
    chat(MISSING, "messages[1].content", messages=[*HI, {"role": "user"}]),
    chat(EMPTY, "messages[0].content", messages=user()),
    chat(VALUE, f"{PART}.type", "text", messages=user({"type": "blah"})),
    chat(MISSING, f"{PART}.type", messages=user({"text": "a"})),
    chat(MISSING, f"{PART}.text", messages=user({"type": "text"})),
    chat(UNKNOWN, f"{PART}.x", messages=user({"type": "text", "text": "a", "x": 1})),
    chat(MEDIA, f"{PART}.type", messages=user({"type": "input_audio"})),
    chat(MEDIA, f"{PART}.type", messages=user({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}})),
    chat(TOO_LONG, "messages", f"{CONTEXT}", messages=HI * 10_000),
    chat(TOO_LONG, "messages", messages=user("x" * 900_000)),
    chat(VALUE, "messages", messages=user("\ud800")),
    chat(UNKNOWN, "messages[0].colour", messages=user("a", colour="red")),
    chat(UNKNOWN, "messages[0].tool_calls", messages=user("a", tool_calls=[])),
    chat(UNKNOWN, "messages[0].reasoning", messages=user("a", reasoning="b")),
    chat(VALUE, "messages[0].role", "tool_calls", messages=[{"role": "tool", "content": "1"}]),
    chat(VALUE, "messages[2].tool_call_id", messages=answered(tool_call_id="y")),
    chat(MISSING, "messages[2].tool_call_id", messages=answered()),
    chat(UNSUPPORTED, "messages[0].role", messages=[{"role": "function", "name": "a", "content": "1"}]),
    chat(MISSING, f"{CALLS}.function", messages=[*HI, {"role": "assistant", "tool_calls": [{"id": "x"}]}]),
    chat(MISSING, f"{CALLS}.id", messages=[*HI, called(None)]),
    chat(MISSING, f"{CALLS}.function.arguments", messages=[*HI, called("x", None)]),
    chat(TYPE, f"{CALLS}.function.arguments", messages=[*HI, called("x", {"a": 1})]),
    chat(
        VALUE,
        "messages[1].tool_calls[1].id",
        messages=[*HI, {"role": "assistant", "tool_calls": called("x")["tool_calls"] * 2}],
    ),
    chat(
        UNSUPPORTED,
        "messages[1].function_call",
        messages=[*HI, {"role": "assistant", "content": "a", "function_call": {"name": "a", "arguments": ""}}],
    ),
    chat(VALUE, "continue_final_message", messages=[*HI, called("x")], continue_final_message=True),
    chat(VALUE, "continue_final_message", add_generation_prompt=True, continue_final_message=True),
    chat(BELOW, "max_completion_tokens", max_completion_tokens=0),
    chat(TYPE, "max_completion_tokens", max_completion_tokens="5"),
    chat(BELOW, "max_tokens", max_tokens=0),
    chat(ABOVE, "n", n=16385),
    chat(TYPE, "logprobs", logprobs=5),
    chat(VALUE, "top_logprobs", "logprobs", top_logprobs=2),
    *[chat(ABOVE, "top_logprobs", logprobs=True, top_logprobs=value) for value in (21, -1)],
    chat(VALUE, "logprob_token_ids", logprob_token_ids=[5]),
    chat(EMPTY, "tools", tools=[]),
    chat(TYPE, "tools", tools="a"),
    chat(LONG_LIST, "tools", tools=tools(*[{"name": f"a{index}"} for index in range(129)])),
    chat(COMPLEX, "tools", tools=tools({"name": "a", "parameters": nested(100)})),
    chat(UNSUPPORTED, "tools", tools=A),  # a template that renders none
    chat(UNSUPPORTED, "tools[0].type", tools=[{"type": "custom"}]),
    chat(MISSING, "tools[0].function", tools=[{"type": "function"}]),
    chat(MISSING, "tools[0].function.name", tools=tools({})),
    *[chat(VALUE, "tools[0].function.name", tools=tools({"name": name})) for name in ("a b$", "a" * 65)],
    chat(VALUE, "tools[1].function.name", tools=A + A),
    chat(TYPE, PARAMETERS, tools=tools({"name": "a", "parameters": 5})),
    chat(FUNCTION, PARAMETERS, tools=tools({"name": "a", "parameters": {"type": "strnig"}}), tool_choice="required"),
    chat(UNKNOWN, "tools[0].function.colour", tools=tools({"name": "a", "colour": 5})),
    chat(TYPE, "tools[0].function.strict", tools=tools({"name": "a", "strict": 1})),
    chat(VALUE, "tool_choice", "tools", tool_choice="auto"),
    chat(VALUE, "tool_choice", tools=A, tool_choice="any"),
    chat(TYPE, "tool_choice", tools=A, tool_choice=5),
    chat(MISSING, "tool_choice.type", tools=A, tool_choice={}),
    chat(VALUE, "tool_choice.type", tools=A, tool_choice={"type": "custom"}),
    chat(VALUE, "tool_choice.function.name", "'b'", tools=A, tool_choice=NAMED_B),
    chat(EMPTY, "tool_choice.allowed_tools.tools", tools=A, tool_choice=NO_TOOLS_ALLOWED),
    chat(TYPE, "parallel_tool_calls", tools=A, parallel_tool_calls=1),
    chat(UNSUPPORTED, "functions", functions=[{"name": "a"}]),
    chat(UNSUPPORTED, "function_call", function_call="auto"),
    chat(UNSUPPORTED, "thinking_token_budget", thinking_token_budget=5),
    chat(UNSUPPORTED, "documents", documents=[{"text": "a"}]),
    chat(TYPE, "documents", documents=5),
    chat(TYPE, "documents[0]", documents=[5]),
    chat(TYPE, "include_reasoning", include_reasoning=1),
    chat(VALUE, "reasoning_effort", "high", reasoning_effort="ultra"),
    chat(VALUE, "verbosity", "high", verbosity="ultra"),
    chat(VALUE, "verbosity", verbosity="low", chat_template_kwargs={"verbosity": "high"}),
    chat(MISSING, "prediction.content", prediction={"type": "content"}),
    chat(VALUE, "prediction.type", prediction={"type": "other", "content": "a"}),
    chat(VALUE, "reasoning_effort", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}),
    chat(VALUE, "reasoning_effort", reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}),
    chat(UNSUPPORTED, "chat_template", chat_template="{{ 1 }}"),
    *[
        chat(VALUE, f"chat_template_kwargs.{name}", chat_template_kwargs={name: value})
        for name, value in {"tokenize": True, "messages": [], "chat_template": "x"}.items()
    ],
    chat(UNSUPPORTED, "echo", echo=True),
    chat(UNSUPPORTED, "modalities", modalities=["text", "audio"]),
    chat(UNSUPPORTED, "web_search_options", web_search_options={}),
    chat(UNKNOWN, "prompt", prompt="a"),
]

# What is found out where the grammar is made, so only of a model that has tools. The message has a JSON pointer.
with_tools = table("family", CHAT, model="fake", messages=HI)
B_AND_STRANGE = tools({"name": "b"}, {"name": "a", "parameters": STRANGE})
NAMED_A = {"type": "function", "function": {"name": "a"}}
ONLY_A = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED_A]}}
PATTERN = {"properties": {"x": {"pattern": "(["}}}
NOWHERE = {"properties": {"x": {"$ref": "#/nowhere"}}}
SECOND, TYPE_OF_X = "tools[1].function.parameters", "#/properties/x/type"
TOOL_ROWS = [
    with_tools(
        FUNCTION, PARAMETERS, TYPE_OF_X, tools=tools({"name": "a", "parameters": STRANGE}), tool_choice="required"
    ),
    with_tools(
        FUNCTION,
        PARAMETERS,
        "#/properties/x/pattern",
        tools=tools({"name": "a", "parameters": PATTERN}),
        tool_choice="required",
    ),
    *[with_tools(FUNCTION, SECOND, TYPE_OF_X, tools=B_AND_STRANGE, tool_choice=choice) for choice in (NAMED_A, ONLY_A)],
    with_tools(
        FUNCTION,
        PARAMETERS,
        "#/properties/x/$ref",
        tools=tools({"name": "a", "strict": True, "parameters": NOWHERE}),
    ),
    with_tools(MISSING, "response_format.json_schema", tools=A, response_format={"type": "json_schema"}),
    with_tools(SCHEMA, "guided_json", "#/type", tools=A, guided_json={"type": "strnig"}),
    with_tools(UNSUPPORTED, "skip_special_tokens", tools=A, skip_special_tokens=False),
]

# ---- structured output ----

FORMAT = "response_format.json_schema"
FORM = "structured_outputs"


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value, **more}}}


ITEMS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
MANY = {"type": "object", "properties": {f"p{index}": {} for index in range(5000)}}
REPEATED = "(((a{1,100}){1,100}){1,100}){1,100}"
FORM_FIELDS: list[tuple[str, str, str, dict[str, Any]]] = [
    (GRAMMAR, f"{FORM}.regex", "position 0", {FORM: {"regex": "[a"}}),
    (GRAMMAR, f"{FORM}.regex", "position 1", {FORM: {"regex": "a\0b"}}),
    (GRAMMAR, f"{FORM}.regex", "", {FORM: {"regex": "(?=a)b"}}),
    (SCHEMA, f"{FORM}.json", "", {FORM: {"json": "{not json"}}),
    *[(GRAMMAR, f"{FORM}.grammar", "", {FORM: {"grammar": value}}) for value in ("", "start: a")],
    (EMPTY, f"{FORM}.choice", "", {FORM: {"choice": []}}),
    (VALUE, FORM, "", {FORM: {"choice": ["a"], "regex": "b"}}),
    (VALUE, FORM, "", {FORM: {"choice": ["a"]}, "response_format": {"type": "json_object"}}),
    (VALUE, FORM, "", {FORM: {"disable_any_whitespace": True}, "response_format": {"type": "text"}}),
    (VALUE, FORM, "", {FORM: {}}),
    (VALUE, f"{FORM}.property_order", "", {FORM: {"property_order": "random"}, **schema({})}),
    (UNKNOWN, f"{FORM}.ebnf", "", {FORM: {"ebnf": True}, **schema({})}),
    (UNKNOWN, f"{FORM}.ebnf", "", {FORM: {"ebnf": "a"}}),
    (SCHEMA, f"{FORMAT}.schema", "#/type", schema({"type": "strnig"})),
    (SCHEMA, f"{FORMAT}.schema", "#/properties/a/type", schema({"properties": {"a": {"type": "strnig"}}})),
    (SCHEMA, f"{FORMAT}.schema", "#/$ref", schema({"$ref": "#/$defs/a"})),
    (SCHEMA, f"{FORMAT}.schema", "#/pattern", schema({"type": "string", "pattern": "(["})),
    ("unsupported_json_schema", f"{FORMAT}.schema", "refers to itself", schema({"$ref": "#"})),
    ("unsupported_json_schema", f"{FORMAT}.schema", "#/$ref", schema({"$ref": "http://169.254.169.254/"})),
    ("unsupported_json_schema", f"{FORMAT}.schema", "#/uniqueItems", schema({**ITEMS, "uniqueItems": True})),
    (COMPLEX, "response_format", "64", schema(nested(100))),
    (COMPLEX, f"{FORMAT}.schema", "#/maxItems", schema({**ITEMS, "maxItems": 10**9})),
    (COMPLEX, f"{FORMAT}.schema", "#", schema({"enum": list(range(100_000))})),
    (COMPLEX, f"{FORMAT}.schema", "", schema(MANY)),
    (TYPE, f"{FORMAT}.schema", "", schema("{}")),
    (MISSING, f"{FORMAT}.schema", "", schema(None)),
    (MISSING, f"{FORMAT}.name", "", schema({}, name=None)),
    (VALUE, f"{FORMAT}.name", "", schema({}, name="a b")),
    (TYPE, f"{FORMAT}.strict", "", schema({}, strict=1)),
    (MISSING, FORMAT, "", {"response_format": {"type": "json_schema"}}),
    (VALUE, "response_format.type", "xml", {"response_format": {"type": "xml"}}),
    (MISSING, "response_format.type", "", {"response_format": {}}),
    (TYPE, "response_format", "", {"response_format": "json"}),
    (UNKNOWN, "response_format.schema", "", {"response_format": {"type": "json_object", "schema": {}}}),
    (GRAMMAR, "response_format", "#/format", {"response_format": {"type": "structural_tag", "format": {"type": "no"}}}),
    (SCHEMA, "guided_json", "#/type", {"guided_json": {"type": "strnig"}}),
    (GRAMMAR, "guided_regex", "", {"guided_regex": "[a"}),
    (GRAMMAR, "guided_grammar", "", {"guided_grammar": "start: a"}),
    (EMPTY, "guided_choice", "", {"guided_choice": []}),
    (VALUE, "guided_choice", "", {"guided_choice": ["a"], "guided_regex": "a"}),
    (VALUE, "guided_whitespace_pattern", "", {"guided_whitespace_pattern": "a"}),
    (UNSUPPORTED, "guided_decoding_backend", "", {"guided_decoding_backend": "outlines"}),
]
FORM_ROWS = [
    *[make(code, param, words, **fields) for make in (bad, chat) for code, param, words, fields in FORM_FIELDS],
    bad(COMPLEX, FORM, **{FORM: {"regex": REPEATED}}),
    bad(COMPLEX, f"{FORMAT}.schema", **schema({"type": "array", "prefixItems": [{"enum": [1]}] * 500})),
]

# ---- tokens and vectors ----

tokenize, detokenize = table("server", TOKENIZE), table("server", DETOKENIZE)
embed, rerank = table("server", EMBED, model="fake", input="a"), table("server", "/rerank", model="fake", query="a")
score = table("server", "/score", model="fake", text_1="a", text_2=["b", "c"])
VECTOR_ROWS = [
    tokenize(MISSING, "prompt"),
    tokenize(VALUE, "prompt", prompt="\ud800"),
    tokenize("request_too_large", None, prompt="x" * 5_000_000, status=413),
    tokenize(TOO_LONG, "prompt", prompt="x" * 900_000),
    tokenize(TYPE, "prompt", prompt=5),
    tokenize(VALUE, "messages", prompt="a", messages=HI),
    tokenize(NO_MODEL, "model", prompt="a", model="nope", status=404),
    *[tokenize(VALUE, "documents", prompt="a", documents=value) for value in ({"a": 1}, [])],
    *[
        tokenize(VALUE, name, prompt="a", **{name: value})
        for name, value in {
            "tools": [],
            "chat_template_kwargs": {},
            "chat_template": "x",
            "add_generation_prompt": True,
            "continue_final_message": True,
            "reasoning_effort": "low",
        }.items()
    ],
    *[detokenize(VALUE, "tokens[0]", tokens=[value]) for value in (-1, 2**62)],
    detokenize(VALUE, "tokens[1]", f"{VOCAB}", tokens=[5, 10**6]),
    detokenize(TYPE, "tokens", tokens="ab"),
    detokenize(TYPE, "tokens[0]", tokens=["a"]),
    detokenize(MISSING, "tokens"),
    embed(MISSING, "input", input=...),
    embed(EMPTY_TEXT, "input", input=""),
    embed(EMPTY, "input", input=[]),
    embed(EMPTY_TEXT, "input[1]", input=["a", ""]),
    embed(EMPTY, "input[1]", input=[[1], []]),
    embed(TYPE, "input[1]", input=["a", 1]),
    embed(TYPE, "input", input={"a": 1}),
    embed(TYPE, "input[0]", input=[True]),
    *[embed(VALUE, "input[0]", input=[value]) for value in (10**6, -1)],
    embed(VALUE, "input[1][0]", input=[[1], [VOCAB]]),
    *[embed(TOO_LONG, "input", input=value) for value in ("a b " * 200, "a" * 100_000)],
    embed(TOO_LONG, "input[0]", f"{CONTEXT + 1}", f"{CONTEXT} tokens", input=[[1] * (CONTEXT + 1)]),
    embed(LONG_LIST, "input", "2048", "5000", input=["a"] * 5000),
    embed(VALUE, "encoding_format", "base64", encoding_format="hex"),
    *[embed(BELOW, "dimensions", dimensions=value) for value in (0, -1)],
    embed(ABOVE, "dimensions", dimensions=10**9),
    embed(BELOW, "truncate_prompt_tokens", truncate_prompt_tokens=0),
    embed(UNKNOWN, "inptu", inptu="b"),
    embed(UNSUPPORTED, "messages", messages=[]),
    embed(NO_MODEL, "model", model="nope", status=404),
    embed(MISSING, "model", model=...),
    table("server", "/pooling", model="fake", input="a")(VALUE, "task", task="dance"),
    table("server", "/classify", model="fake")(MISSING, "input"),
    rerank(MISSING, "query", query=..., documents=["a"]),
    rerank(MISSING, "documents"),
    rerank(TYPE, "query", query=["a"], documents=["a"]),
    rerank(TYPE, "documents", documents="b"),
    rerank(EMPTY, "documents", documents=[]),
    rerank(TYPE, "documents[1]", documents=["b", 1]),
    rerank(TYPE, "documents[0]", documents=[1]),
    rerank(MISSING, "documents[0].text", documents=[{"text": None}]),
    rerank(UNKNOWN, "documents[0].url", documents=[{"url": "b"}]),
    rerank(BELOW, "top_n", documents=["b"], top_n=0),
    rerank(LONG_LIST, "documents", documents=["b"] * 2049),
    score(MISSING, "text_2", text_2=...),
    score(VALUE, "text_1", text_1=["a", "b"], text_2=["c", "d", "e"]),
    score(VALUE, "queries", queries="a"),
    score(TYPE, "text_1[0]", text_1=[1]),
]

# A model that generates text says so, once there is nothing else to say about the request.
PAIR = {"query": "a", "documents": ["b", "c"]}
VECTOR_ROWS += [
    table("server", path, model="fake", **body)("unsupported_endpoint", "model", "'fake'", "/v1/chat/completions")
    for path, body in [
        (EMBED, {"input": "a"}),
        (EMBED, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "me"}),
        (EMBED, {"input": [1, 2]}),
        (EMBED, {"input": [[1, 2], [3]], "truncate_prompt_tokens": 1}),
        ("/pooling", {"input": "a", "task": "embed"}),
        ("/classify", {"input": ["a"]}),
        ("/rerank", PAIR),
        ("/v1/rerank", {**PAIR, "top_n": 1, "return_documents": False}),
        ("/v2/rerank", {"query": "a", "documents": [{"text": "b"}, "c"]}),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c", "d"]}),
    ]
]

# ---- /v1/responses ----

respond = table("family", RESPONSES, model="fake", input="hi", max_output_tokens=2)
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "dark"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": "x"}
FUNCTION_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CUSTOM_TOOL = {"type": "custom", "name": "n"}
SEALED = "input[0].encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def sealed(value: Any) -> list[Any]:
    return [{"type": "reasoning", "encrypted_content": value}]


def text_format(**fields: Any) -> dict[str, Any]:
    return {"format": {"type": "json_schema", **fields}}


def chosen(**fields: Any) -> dict[str, Any]:
    return {"tools": [FUNCTION_TOOL], "tool_choice": fields}


RESPONSE_ROWS = [
    respond(MISSING, "model", model=...),
    respond(NO_MODEL, "model", stream=True, model="nope", status=404),
    *[respond(MISSING, "input", input=value) for value in (..., None)],
    respond(EMPTY, "input", input=[]),
    respond(TYPE, "input", input=5),
    respond(TYPE, "input[0]", input=["a"]),
    respond(MISSING, "input[0].type", input=[{}]),
    respond(UNSUPPORTED, "input[0].type", input=[{"type": "mcp_call"}]),
    respond(VALUE, "input[0].type", "message", input=[{"type": "what"}]),
    respond(VALUE, "input[0].role", input=[{"role": "tool", "content": "a"}]),
    respond(MISSING, "input[0].content", input=[{"role": "user"}]),
    respond(EMPTY, "input[0].content", input=user()),
    respond(UNKNOWN, "input[0].naem", input=user("a", naem="b")),
    respond(VALUE, "input[0].phase", input=[{"role": "assistant", "content": "a", "phase": "other"}]),
    respond(VALUE, "input[0].phase", input=user("a", phase="commentary")),
    respond(
        MEDIA, "input[0].content[1].type", input=user({"type": "input_text", "text": "a"}, {"type": "input_image"})
    ),
    respond(VALUE, "input[0].content[0].type", input=user({"type": "output_text", "text": "a"})),
    respond(VALUE, "input[1].call_id", input=[*user("a"), OUTPUT]),
    respond(VALUE, "input[1].call_id", input=[CALL, CALL]),
    respond(VALUE, "input[1].call_id", input=[CUSTOM_CALL, OUTPUT]),
    respond(VALUE, "input[1].call_id", input=[CALL, {**OUTPUT, "type": "custom_tool_call_output"}]),
    respond(MISSING, "input[0].input", input=[{"type": "custom_tool_call", "call_id": "c", "name": "n"}]),
    respond(VALUE, "input[0].name", input=[{**CALL, "name": "a b"}]),
    respond(UNSUPPORTED, "input[0].namespace", input=[{**CALL, "namespace": "x"}]),
    respond(MEDIA, "input[1].output[0].type", input=[CALL, {**OUTPUT, "output": [{"type": "input_file"}]}]),
    *[
        respond(VALUE, SEALED, input=sealed(value))
        for value in ("x", seal("x")[:-1], seal("x") + ".", seal("x").replace("1", "2", 1))
    ],
    respond(TYPE, SEALED, input=sealed(5)),
    respond(VALUE, "input[0].content[0].type", input=[{"type": "reasoning", "content": [{"type": "a", "text": ""}]}]),
    respond("item_not_found", "input[0].id", input=[{"id": "msg_nobody"}]),
    respond(TOO_LONG, "input", f"{MAX_MODEL_LEN}", input="x y " * 4 * MAX_MODEL_LEN),
    respond(LONG_LIST, "input", input=user("") * 8193),
    respond("previous_response_not_found", "previous_response_id", previous_response_id="resp_nope", status=404),
    respond(MISSING, "text.format.name", text=text_format(schema={})),
    respond(SCHEMA, "text.format.schema", "#/properties/x/type", text=text_format(name="a", schema=STRANGE)),
    respond(VALUE, "text.format.type", text={"format": {"type": "grammar"}}),
    respond(VALUE, "text.verbosity", text={"verbosity": "lower"}),
    respond(UNSUPPORTED, "tools[0].type", tools=[{"type": "web_search"}]),
    respond(MISSING, "tools[1].name", tools=[FUNCTION_TOOL, {"type": "function"}]),
    respond(VALUE, "tools[1].name", tools=[FUNCTION_TOOL, FUNCTION_TOOL]),
    respond(VALUE, "tools[1].name", tools=[FUNCTION_TOOL, {**CUSTOM_TOOL, "name": "look"}]),
    respond(UNSUPPORTED, "tools[0].output_schema", tools=[{**FUNCTION_TOOL, "output_schema": {}}]),
    respond(
        FUNCTION,
        "tools[1].parameters",
        tools=[{**FUNCTION_TOOL, "name": "b"}, {**FUNCTION_TOOL, "strict": True, "parameters": STRANGE}],
    ),
    respond(MISSING, "tools[0].name", tools=[{"type": "custom"}]),
    respond(VALUE, "tools[0].name", tools=[{**CUSTOM_TOOL, "name": "a b"}]),
    respond(UNKNOWN, "tools[0].parameters", tools=[{**CUSTOM_TOOL, "parameters": {}}]),
    respond(TYPE, "tools[0].format", tools=[{**CUSTOM_TOOL, "format": "text"}]),
    respond(UNSUPPORTED, "tools[0].format.type", tools=[{**CUSTOM_TOOL, "format": {"type": "grammar"}}]),
    respond(VALUE, "tool_choice", tool_choice="required"),
    respond(UNSUPPORTED, "tool_choice.type", **chosen(type="mcp")),
    respond(VALUE, "tool_choice.name", **chosen(type="function", name="x")),
    respond(VALUE, "tool_choice.name", **chosen(type="custom", name="look")),
    respond(VALUE, "tool_choice.name", tools=[CUSTOM_TOOL], tool_choice={"type": "function", "name": "n"}),
    respond(VALUE, "tool_choice.mode", **chosen(type="allowed_tools", mode="x", tools=[])),
    respond(VALUE, "tool_choice.tools[0].name", **chosen(type="allowed_tools", mode="auto", tools=[{"name": "x"}])),
    respond(BELOW, "max_output_tokens", max_output_tokens=0),
    respond(UNSUPPORTED, "max_tokens", max_tokens=5),
    respond(VALUE, "top_logprobs", top_logprobs=2),
    respond(ABOVE, "top_logprobs", top_logprobs=21, include=[LOGPROBS]),
    respond(UNSUPPORTED, "include[0]", include=["file_search_call.results"]),
    respond(UNSUPPORTED, "reasoning.summary", reasoning={"summary": "concise"}),
    respond(UNSUPPORTED, "reasoning.generate_summary", reasoning={"generate_summary": "detailed"}),
    respond("object_above_max_properties", "metadata", metadata={str(index): "" for index in range(17)}),
    *[respond(LONG_TEXT, "metadata", metadata=value) for value in ({"a" * 65: ""}, {"a": "b" * 513})],
    respond(TYPE, "metadata.a", metadata={"a": 1}),
    respond(VALUE, "stream_options", stream_options={}),
    respond(VALUE, "background", background=True, store=False),
    respond(DECIMAL_BELOW, "temperature", "0", temperature=-1),
    respond(UNKNOWN, "inputs", "did you mean input?", inputs=1),
]

# ---- /v1/messages ----

message = by_words("family", MESSAGES, model="fake", max_tokens=8, messages=HI)
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}


def said(*blocks: Any) -> list[Any]:
    return [*HI, {"role": "assistant", "content": list(blocks)}, *HI]


TEXT = {"type": "text", "text": "a"}
FIRST, ANSWER = "messages[0].content[0]", "messages[1].content[0]"
MESSAGE_ROWS = [
    *[message("model is required", model=value) for value in (..., None)],
    message("the model 'nope' does not exist", model="nope", status=404),
    message("the model 'nope' does not exist", model="nope", stream=True, status=404),
    message("max_tokens is required", max_tokens=...),
    message("max_tokens must be at least 1", max_tokens=0),
    message("max_tokens must be an integer", max_tokens="5"),
    *[message("messages is required", messages=value) for value in (..., None)],
    message("messages must not be empty", messages=[]),
    message("messages[0] must be an object", messages=["hi"]),
    message("messages[0].role is required", messages=[{"content": "hi"}]),
    message("messages[0].role must be one of user, assistant, system", messages=[{"role": "tool", "content": "hi"}]),
    message("messages[0].content is required", messages=[{"role": "user"}]),
    message("messages[0].content must be a string or a list of blocks", messages=user(5)),
    message("messages[0].content must not be empty", messages=user()),
    message(f"{FIRST} must be an object", messages=user(["hi"])),
    message(f"{FIRST}.type is required", messages=user({"text": "hi"})),
    message(f"{FIRST}.text is required", messages=user({"type": "text"})),
    message(f"unknown parameter {FIRST}.x", messages=user({**TEXT, "x": 1})),
    message(f"{FIRST}.citations is not supported", messages=user({**TEXT, "citations": [1]})),
    message(f"{FIRST}.cache_control.type must be", messages=user({**TEXT, "cache_control": {"type": "x"}})),
    *[
        message(f"{FIRST}.type: this model reads text only", messages=user({"type": kind}))
        for kind in ("image", "document")
    ],
    message(f"{FIRST}.type must be one of", messages=user({"type": "web_search_tool_result"})),
    message(f"{FIRST}.type must be one of text, tool_result", messages=user(USE)),
    message(f"{FIRST}.tool_use_id: no message before", messages=user({"type": "tool_result", "tool_use_id": "a"})),
    message(f"{ANSWER}.type: redacted", messages=said({"type": "redacted_thinking", "data": "x"})),
    message(f"{ANSWER}.signature is required", messages=said({"type": "thinking", "thinking": "x"})),
    message(f"{ANSWER}.input must be an object", messages=said({**USE, "input": "{}"})),
    message(f"{ANSWER}.name must be", messages=said({**USE, "name": "a b"})),
    message("messages[1].content[1].id: there are two calls", messages=said(USE, USE)),
    message(f"{ANSWER}.caller", messages=said({**USE, "caller": {"type": "code"}})),
    message("messages[1]: the last message has tool_use blocks", messages=said(USE)[:-1]),
    message("system must be a string or a list of blocks", system=5),
    message("system[0].type: this model reads text only", system=[{"type": "image"}]),
    message("messages has a lone surrogate", messages=user("a\ud800")),
    message("messages", messages=user("x" * 100_000)),
    message(f"the context length is {MAX_MODEL_LEN} tokens", messages=user("a b " * MAX_MODEL_LEN)),
    message("stop_sequences must be a list of strings", stop_sequences="x"),
    message("stop_sequences may have at most 128 items", stop_sequences=["a"] * 129),
    message("stop_sequences[0] must not be empty", stop_sequences=[""]),
    message("temperature must be at least 0", temperature=-1),
    message("top_p must be greater than 0", top_p=0),
    message("top_k must be at least 0", top_k=-1),
    message("stream must be true or false", stream=1),
    message("service_tier must be one of", service_tier="fast"),
    message("unknown parameter metadata.user", metadata={"user": "x"}),
    message("metadata.user_id may have at most 1024", metadata={"user_id": "x" * 1025}),
    message("tools must be a list", tools={}),
    message("tools[0] must be an object", tools=[5]),
    *[
        message("tools[0].type: only tools of the client's own", tools=[{"type": kind, "name": "a"}])
        for kind in ("web_search_20250305", "bash_20250124")
    ],
    message("tools[0].input_schema is required", tools=[{"name": "a"}]),
    message("tools[0].name must be", tools=[{**LOOK, "name": "a b"}]),
    message("tools[1].name: there are two tools called 'look'", tools=[LOOK, LOOK]),
    message("tools[0].defer_loading", tools=[{**LOOK, "defer_loading": True}]),
    message("tools[0].input_schema must be the schema of", tools=[{**LOOK, "input_schema": {"type": "string"}}]),
    message(
        "tools[0].input_schema",
        TYPE_OF_X,
        tools=[{**LOOK, "input_schema": STRANGE}],
        tool_choice={"type": "any"},
    ),
    message("tool_choice needs tools", tool_choice={"type": "auto"}),
    message("tool_choice must be an object", tools=[LOOK], tool_choice="any"),
    message("tool_choice.type must be auto, any, tool or none", tools=[LOOK], tool_choice={"type": "required"}),
    message("tool_choice.name is required", tools=[LOOK], tool_choice={"type": "tool"}),
    message("tool_choice.name: no tool is called 'b'", tools=[LOOK], tool_choice={"type": "tool", "name": "b"}),
    message("tool_choice.name needs", tools=[LOOK], tool_choice={"type": "auto", "name": "look"}),
    message("thinking.type must be enabled, disabled or adaptive", thinking={"type": "on"}),
    message("thinking.budget_tokens is required", thinking={"type": "enabled"}),
    message("thinking.budget_tokens must be at least 1024", thinking={"type": "enabled", "budget_tokens": 1023}),
    message("thinking.budget_tokens has no place", thinking={"type": "adaptive", "budget_tokens": 2000}),
    message("thinking.display must be", thinking={"type": "adaptive", "display": "loud"}),
    message("thinking.type: this model's reasoning cannot be disabled", thinking={"type": "disabled"}),
    message("less than max_tokens", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1024),
    message("output_config.effort must be one of", output_config={"effort": "huge"}),
    message("output_config.format.type must be json_schema", output_config={"format": {"type": "text"}}),
    message("output_config.format.schema is required", output_config={"format": {"type": "json_schema"}}),
    *[
        message("output_config.format.schema", output_config={"format": {"type": "json_schema", "schema": value}})
        for value in (5, {"type": "nope"})
    ],
    message("container is not supported", container="x"),
    message("mcp_servers is not supported", mcp_servers=[{}]),
    message("context_management is not supported", context_management={"edits": []}),
    message("speed is not supported", speed="fast"),
    message("unknown parameter max_token; did you mean max_tokens?", max_token=5),
    message("cache_control.type must be ephemeral", cache_control={"type": "forever"}),
]

# ---- Ollama's routes ----

ollama = by_words("family", OLLAMA_CHAT, model="fake", messages=HI)
generate, show = by_words("family", GENERATE, model="fake", prompt="a"), by_words("family", SHOW, model="fake")


def calls(*after: Any, **function: Any) -> list[Any]:
    return [*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, *(after or HI)]


OLLAMA_ROWS = [
    ollama("model is required", model=...),
    *[
        make("the model ", "does not exist", model=name, status=404)
        for make in (ollama, generate, show)
        for name in ("nope", ":latest")
    ],
    ollama("the model 'nope' does not exist", stream=True, model="nope:latest", status=404),
    ollama("messages must be a list of objects", messages="hi"),
    ollama("messages[0] must be an object", messages=["hi"]),
    ollama("messages[0].role is required", messages=[{"content": "hi"}]),
    ollama("messages[0].role must be one of", messages=[{"role": "king", "content": "hi"}]),
    ollama("messages[0].content must be a string", messages=user(["hi"])),
    ollama("messages[0].images is not supported", messages=user("a", images=["b"])),
    ollama("unknown parameter messages[0].name", messages=user("a", name="b")),
    ollama("messages[0].thinking has no place", messages=user("a", thinking="b")),
    ollama("messages[0]: a message with role tool must answer", messages=[{"role": "tool", "content": "a"}]),
    ollama("messages[2].tool_name", messages=calls({"role": "tool", "content": "", "tool_name": "b"}, name="a")),
    ollama(f"{CALLS}.function.arguments must be", messages=calls(name="a", arguments="{}")),
    ollama(f"{CALLS}.function.name is required", messages=calls(arguments={})),
    ollama("messages", messages=user("x y " * 4 * MAX_MODEL_LEN)),
    ollama("tools[0].function is required", tools=[{"type": "function"}]),
    ollama("tools must be a list", tools={}),
    ollama('format must be "json" or a JSON schema', format="yaml"),
    ollama("format", "#/type", format={"type": "strnig"}),
    ollama("options must be an object", options=[]),
    ollama("options.temperature must be at least 0", options={"temperature": -1}),
    ollama("options.repeat_penalty", options={"repeat_penalty": 0}),
    ollama("options.stop may have at most 128 items", options={"stop": ["a"] * 129}),
    ollama("options.num_ctx must be at most 4096", options={"num_ctx": 10**6}),
    ollama("options.num_predict must be at least 1", options={"num_predict": 0}),
    ollama("options.repeat_last_n", options={"repeat_last_n": 64, "repeat_penalty": 1.1}),
    ollama("options.num_gpu must be an integer", options={"num_gpu": "all"}),
    ollama("options.use_mmap must be true or false", options={"use_mmap": 1}),
    ollama("options.vocab_only is not supported", options={"vocab_only": True}),
    ollama("unknown parameter options.temprature; did you mean temperature", options={"temprature": 1}),
    ollama("think must be true, false or one of", think="hard"),
    ollama("think: this model's reasoning cannot be disabled", think=False),
    by_words("server", OLLAMA_CHAT, model="fake", messages=HI)("think: this model does not reason", think=True),
    ollama("keep_alive must be a number of seconds or a duration", keep_alive="soon"),
    *[ollama("keep_alive: clients cannot unload models", keep_alive=value) for value in (0, "0s")],
    ollama("logprobs is not supported", logprobs=True),
    ollama("stream must be true or false", stream=1),
    ollama("unknown parameter prompt", prompt="a"),
    generate("prompt must be a string", prompt=5),
    *[generate("prompt", prompt=value) for value in ("x" * 200_000, "a b " * 4000)],
    *[
        generate(f"{name} is not supported", **{name: value})
        for name, value in {"images": ["b"], "template": "b", "context": [1]}.items()
    ],
    generate("suffix: this model has no tokens", suffix="b"),
    generate("system has no place", raw=True, system="b"),
    generate("think has no place", raw=True, think=True),
    show("model is required", model=...),
    show("name is the older name of model", name="other"),
]

ROWS = [
    *(*BODIES, *COMPLETION_ROWS, *BEAM_ROWS, *CHAT_ROWS, *TOOL_ROWS, *FORM_ROWS, *VECTOR_ROWS),
    *(*RESPONSE_ROWS, *MESSAGE_ROWS, *OLLAMA_ROWS),
]
