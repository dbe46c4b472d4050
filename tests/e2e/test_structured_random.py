"""Random requests over all fields at once, against a real server: none fails, and each answer keeps what was asked.

Forms hold, what is streamed adds up to what is not, log-probabilities and usage count the same tokens, and nothing is
left behind.
"""

from __future__ import annotations

import gc
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from quire import LLM, SamplingParams
from quire.sampling_params import BeamSearchParams
from tests.frontend.conftest import train_byte_level, write_folder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.server import Server, serve
from tests.server.streams import add_up, stream_events
from tests.server.test_pairwise import TEMPLATE, TOOLS, without_ids

MODEL = "quire-demo"
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bee", "café", "日本"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number", "multipleOf": 0.5}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"const": 'é\n"\\'}, {"type": "boolean"}, {"type": "null"}]},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {
        "$defs": {
            "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}}}
        },
        "$ref": "#/$defs/node",
    },
]
REGEXES = ["(north|south) [0-9]{2}", "[a-zäé]{1,12}[.!?]", "( [a-z]+){2,5}", "[\\u{1F600}-\\u{1F64F}]{1,3}", "a?b?c?"]
CHOICES = [["yes", "no", "perhaps"], ["a", "ab", "abc"], ["naïve", "日本語"]]
GRAMMARS = [
    ('start: word ("," word)*\nword: /[a-z]{1,5}/\n', r"[a-z]{1,5}(,[a-z]{1,5})*"),
    ('root ::= "(" [0-9]+ ")" | "nil"\n', r"\([0-9]+\)|nil"),
]
OPTIONS: dict[str, list[Any]] = {
    "temperature": [0, 0, 0.7, 1.0, 2.0],
    "top_p": [0.3, 0.9, 1.0],
    "top_k": [1, 5, 50, -1],
    "min_p": [0.0, 0.05, 0.5],
    "typical_p": [0.5, 1.0],
    "top_n_sigma": [1.0, 2.0],
    "xtc_probability": [0.5],
    "dry_multiplier": [0.8],
    "dynatemp_range": [0.5],
    "mirostat": [2],
    "presence_penalty": [-1.0, 1.5],
    "frequency_penalty": [-0.5, 1.0],
    "repetition_penalty": [0.8, 1.3],
    "logit_bias": [{"5": -100, "17": 5, "300": 20.0}],
    "min_tokens": [0, 3, 10],
    "ignore_eos": [True],
    "stop": [["e"], ["the", "7"], [","]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[10, 40], [300]],
    "bad_words": [["the"], ["a", "n"]],
    "skip_special_tokens": [False],
    "n": [2, 3],
    "repetition_detection": [{"max_pattern_size": 4, "min_count": 4}],
    "thinking_token_budget": [0, 5],
    "include_reasoning": [False],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the built-in model and a chat template that has it reason first."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ("--chat-template", str(folder / "template.jinja"), "--tool-call-parser", "hermes")
    with serve(
        folder / "log.txt", *flags, "--reasoning-parser", "qwen3", "--num-gpu-blocks-override", "256"
    ) as running:
        yield running


def random_body(draw: random.Random, chat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request, and the form in it by its kind."""
    body: dict[str, Any] = {"model": MODEL, "seed": draw.randrange(1 << 20), "max_tokens": draw.choice([1, 8, 40, 120])}
    for name in draw.sample(list(OPTIONS), draw.randint(0, 6)):
        body[name] = draw.choice(OPTIONS[name])
    if chat:
        body["messages"] = [{"role": "user", "content": draw.choice(["Hello", "The king said", "日本 <think>"])}]
        if draw.random() < 0.4:
            body["tools"] = TOOLS
            named = {"type": "function", "function": {"name": "look"}}
            body["tool_choice"] = draw.choice(["auto", "required", "none", named])
            body["parallel_tool_calls"] = draw.random() < 0.5
        if draw.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": draw.choice([0, 3])}
        if draw.random() < 0.2:
            body["reasoning_effort"] = draw.choice(["none", "low", "high"])
    else:
        body["prompt"] = draw.choice(["Hello", "KING RICHARD III:\n", "日本"])
        body.pop("thinking_token_budget", None)
        body.pop("include_reasoning", None)
        if draw.random() < 0.4:
            body["logprobs"] = draw.choice([0, 2])
    form = random_form(draw)
    return body | form.pop("fields", {}), form


def random_form(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a form, and what its texts must be."""
    kind = draw.choice(["none", "json", "response_format", "json_object", "regex", "choice", "grammar"])
    if kind == "json":
        options = draw.choice([{}, {"disable_any_whitespace": True}, {"whitespace_pattern": "\\s?"}])
        schema = draw.choice(SCHEMAS)
        return {"fields": {"structured_outputs": {"json": schema, **options}}, "schema": schema}
    if kind == "response_format":
        schema = draw.choice(SCHEMAS)
        wanted = {"name": "x", "schema": schema, "strict": draw.random() < 0.5}
        return {"fields": {"response_format": {"type": "json_schema", "json_schema": wanted}}, "schema": schema}
    if kind == "json_object":
        return {"fields": {"response_format": {"type": "json_object"}}, "schema": {"type": "object"}}
    if kind == "regex":
        regex = draw.choice(REGEXES)
        return {
            "fields": {"structured_outputs": {"regex": regex}},
            "regex": re.sub(r"\\u\{(\w+)\}", r"\\U000\1", regex),
        }
    if kind == "choice":
        choice = draw.choice(CHOICES)
        return {"fields": {"structured_outputs": {"choice": choice}}, "choice": choice}
    if kind == "grammar":
        grammar, regex = draw.choice(GRAMMARS)
        return {"fields": {"structured_outputs": {"grammar": grammar}}, "regex": regex}
    return {}


def ask(server: Server, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return status and answer."""
    response = httpx.post(server.url + path, json=body, timeout=120, trust_env=False, verify=False)
    assert response.status_code in (200, 400), (response.status_code, response.text, body)
    return response.status_code, response.json()


def streamed(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a stream of the same request adds up to."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    if path.endswith("chat/completions"):
        return add_up(stream_events(server.url, body))
    response = httpx.post(server.url + path, json=body, timeout=120, trust_env=False, verify=False)
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], response.text[-2000:]
    answer: dict[str, Any] = {"usage": None}
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        if chunk.get("usage"):
            answer["usage"] = chunk["usage"]
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "tokens": [], "finish_reason": None})
            choice["text"] += part["text"]
            choice["tokens"] += (part.get("logprobs") or {}).get("tokens", [])
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


def check_text(form: dict[str, Any], text: str) -> None:
    """Check a whole text against the form."""
    if "schema" in form:
        jsonschema.validate(json.loads(text), form["schema"])
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text), text
    elif "choice" in form:
        assert text in form["choice"]


def complete(body: dict[str, Any], choice: dict[str, Any]) -> bool:
    """Whether a choice ended by itself, so that its text must have its form."""
    by_itself = choice["finish_reason"] in ("stop", "tool_calls") and choice["stop_reason"] is None
    return by_itself and body.get("skip_special_tokens", True)


def check_usage(body: dict[str, Any], answer: dict[str, Any]) -> None:
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)


def check_chat(server: Server, body: dict[str, Any], form: dict[str, Any], answer: dict[str, Any]) -> None:
    """Check a chat's answer, and that its stream adds up to the same."""
    check_usage(body, answer)
    if body.get("logprobs"):
        counts = [len(choice["logprobs"]["content"]) for choice in answer["choices"]]
        assert sum(counts) == answer["usage"]["completion_tokens"]
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls", [])
        if not complete(body, choice):
            continue
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "look":
                jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
        if not calls:
            assert body.get("tool_choice") != "required"
            check_text(form, message["content"])
    other = streamed(server, "/v1/chat/completions", body)
    assert other["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert [strip(choice) for choice in without_ids(other)] == [strip(choice) for choice in without_ids(answer)]


def strip(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without what streams have in pieces of their own."""
    return {key: value for key, value in choice.items() if key != "token_ids"}


def check_completion(server: Server, body: dict[str, Any], form: dict[str, Any], answer: dict[str, Any]) -> None:
    """The same for a plain completion."""
    check_usage(body, answer)
    other = streamed(server, "/v1/completions", body)
    assert other["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    count = 0
    for choice, pieces in zip(answer["choices"], other["choices"], strict=True):
        assert (pieces["text"], pieces["finish_reason"]) == (choice["text"], choice["finish_reason"])
        if body.get("logprobs") is not None:
            assert pieces["tokens"] == choice["logprobs"]["tokens"]
            count += len(pieces["tokens"])
        if complete(body, choice):
            check_text(form, choice["text"])
    assert count == (answer["usage"]["completion_tokens"] if body.get("logprobs") is not None else 0)


def check_random(server: Server, seed: int) -> bool:
    """Try one request; return whether it was served."""
    draw = random.Random(seed)
    chat = draw.random() < 0.6
    body, form = random_body(draw, chat)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, answer = ask(server, path, body)
    if status == 400:
        assert answer["error"]["param"], (answer, body)
        return False
    try:
        (check_chat if chat else check_completion)(server, body, form, answer)
    except (AssertionError, ValueError, jsonschema.ValidationError) as error:
        raise AssertionError(f"seed {seed}: {error}\n{json.dumps(body)}\n{json.dumps(answer)[:3000]}") from error
    return True


def test_random_requests(server: Server) -> None:
    served = sum(check_random(server, seed) for seed in range(12))
    assert served >= 6


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_many_random_requests(server: Server, part: int) -> None:
    served = sum(check_random(server, seed) for seed in range(1000 + 100 * part, 1100 + 100 * part))
    assert served >= 50


def outcome(output: Any) -> list[tuple[str, list[int], str | None]]:
    """Return what was generated."""
    return [(item.text, list(item.token_ids), item.finish_reason) for item in output.outputs]


@pytest.mark.slow
def test_pressure_on_memory_changes_nothing() -> None:
    """Requests with forms, preempted again and again, end as they do alone."""
    draw = random.Random(3)
    forms = [{"json": SCHEMAS[0]}, {"regex": "([a-z]{1,8} ){10,30}"}, {"grammar": "start: w{20,40}\nw: /[a-z]{1,5},/"}]
    prompts, params = [], []
    for index in range(6):
        hot = index % 2 == 1
        prompts.append(f"prompt {index} " * draw.randint(1, 8))
        options = {"temperature": 1.0, "n": draw.choice([1, 2, 3])} if hot else {"temperature": 0.0}
        form = draw.choice(forms)
        params.append(SamplingParams(seed=index, max_tokens=80, structured_outputs=form, **options))
    beams = BeamSearchParams(beam_width=3, max_tokens=40, structured_outputs=forms[0])
    with LLM(model=MODEL) as roomy:
        alone = [
            outcome(roomy.generate([prompt], [one], use_tqdm=False)[0])
            for prompt, one in zip(prompts, params, strict=True)
        ]
        best = [[item.tokens for item in found.sequences] for found in roomy.beam_search(prompts[:2], beams)]
    with LLM(model=MODEL, num_gpu_blocks_override=40, max_num_seqs=24) as tight:
        outputs = tight.generate(prompts, params, use_tqdm=False)
        assert [outcome(output) for output in outputs] == alone
        assert [[item.tokens for item in found.sequences] for found in tight.beam_search(prompts[:2], beams)] == best
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None) > 0


@pytest.mark.slow
def test_closing_ends_what_forms_have_started() -> None:
    def open_and_close() -> tuple[int, int, int]:
        with LLM(model=MODEL, num_gpu_blocks_override=64) as llm:
            llm.generate(["a"], [SamplingParams(max_tokens=5, structured_outputs={"regex": "a+b"})], use_tqdm=False)
        gc.collect()
        process = psutil.Process()
        return process.num_threads(), process.num_fds(), len(process.children(recursive=True))

    first = open_and_close()
    last = [open_and_close() for _ in range(4)][-1]
    assert last[0] <= first[0] + 2
    assert last[1:] == first[1:]


TEXTS_FORMS: list[dict[str, Any]] = [
    {"json": SCHEMAS[0]},
    {"json": SCHEMAS[3]},
    {
        "json": {
            "type": "array",
            "items": {"enum": ["日本語", "naïve ☕", "😀", " a  b "]},
            "minItems": 1,
            "maxItems": 3,
        }
    },
    {"regex": "[日本é😀ü]{3,9}"},
    {"regex": " +a +"},
    {"regex": "(a| b|  c){2,5}"},
    {"choice": [" yes", " no", "  perhaps"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte_level", "llama", "first"])
def test_hot_texts_of_every_tokenizer_have_their_form(tmp_path: Path, kind: str) -> None:
    """A model of random weights, characters of several tokens, blanks at the beginning."""
    end = train_byte_level().token_to_id("<|im_end|>") if kind == "byte_level" else 2
    write_checkpoint(tmp_path, "llama", num_key_value_heads=2, vocab_size=430, eos_token_id=end)
    write_folder(tmp_path, kind)
    forms = [form for form in TEXTS_FORMS for _ in range(4)]
    params = [
        SamplingParams(temperature=2.0, seed=index, max_tokens=120, structured_outputs=form)
        for index, form in enumerate(forms)
    ]
    num_ended = 0
    with LLM(model=str(tmp_path)) as llm:
        for form, output in zip(forms, llm.generate(["Hello"] * len(forms), params, use_tqdm=False), strict=True):
            [item] = output.outputs
            if item.finish_reason == "stop":
                num_ended += 1
                check_text({"schema" if key == "json" else key: value for key, value in form.items()}, item.text)
    assert num_ended > len(forms) // 2
