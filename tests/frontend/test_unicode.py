"""Values that UTF-8 or JSON cannot have, such as lone surrogates, are refused by the name of their field."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import SERVER_GROUPS, EngineConfig
from quire.errors import ConfigError
from quire.sampling_params import BeamSearchParams
from tests.helpers.errors import refused
from tests.helpers.fake_engine import fake_async_llm, fake_front_model, fake_llm

BROKEN = "a\ud800b"
ESCAPED = r"a\ud800b"
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ messages[0].content }}{{ tools | tojson }}{{ documents | tojson }}{{ extra }}"
TAG = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "%s", "content": {"type": "any_text"}, "end": "x"}}'
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm, _ = fake_llm(front_model=fake_front_model(chat_template=TEMPLATE))
    yield llm
    llm.close()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def tool(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **fields}}]


@pytest.mark.parametrize(
    ("params", "where"),
    [
        ({"stop": BROKEN}, "stop"),
        ({"stop": ["x", BROKEN]}, "stop[1]"),
        ({"bad_words": [BROKEN]}, "bad_words[0]"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": [BROKEN]}, "dry_sequence_breakers[0]"),
        ({"extra_args": {"x": [BROKEN]}}, "extra_args"),
        ({"structured_outputs": {"json": {"enum": [object(), BROKEN]}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"enum": nested(3000)}}}, "structured_outputs.json"),
        ({"logits_processors": [{"name": "x", "args": {BROKEN: 1}}]}, "logits_processors"),
        ({"structured_outputs": {"json": {"const": BROKEN}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": f'{{"const": "{BROKEN}"}}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": BROKEN}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["x", BROKEN]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": f'start: "{BROKEN}"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": TAG % BROKEN}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": TAG % ESCAPED}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": BROKEN}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_in_sampling_parameters(llm: LLM, params: dict[str, Any], where: str) -> None:
    with refused(where):
        llm.generate("hi", SamplingParams(**params), use_tqdm=False)
    if "structured_outputs" in params:
        with refused(where):
            llm.beam_search("hi", BeamSearchParams(beam_width=2, max_tokens=2, **params))


@pytest.mark.parametrize(
    ("messages", "options", "where"),
    [
        ([{"role": "user", "content": BROKEN}], {}, "messages"),
        (MESSAGES, {"tools": tool(description=BROKEN)}, "tools"),
        (MESSAGES, {"tools": tool(parameters={"properties": {BROKEN: {}}})}, "tools"),
        (MESSAGES, {"documents": [{"text": BROKEN}]}, "documents"),
        (MESSAGES, {"chat_template_kwargs": {"extra": BROKEN}}, "chat_template_kwargs"),
        (MESSAGES, {"chat_template": BROKEN}, "chat_template"),
        (MESSAGES, {"tenant": BROKEN}, "tenant"),
    ],
)
def test_in_conversations(llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any], where: str) -> None:
    with refused(where):
        llm.chat(messages, use_tqdm=False, **options)


@pytest.mark.parametrize("where", ["request_id", "cache_salt", "tenant"])
def test_in_what_an_engine_knows_of_a_request(where: str) -> None:
    async def main() -> None:
        llm, client = fake_async_llm()
        async with llm:
            with refused(where):
                await llm.submit("hi", **{where: BROKEN})
            assert llm.num_unfinished == 0 and client.engine.added == []

    asyncio.run(main())


@pytest.mark.parametrize("option", ["model", "chat_template", "kv_disk_dir", "served_model_name"])
def test_in_options(option: str) -> None:
    with refused(option, kind=ConfigError):
        EngineConfig.from_kwargs(groups=SERVER_GROUPS, **{option: BROKEN})
