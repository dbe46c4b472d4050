"""Options of templates, templates that requests bring, and what a template may not do to the server."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ConfigError, RequestError
from quire.frontend.chat import MAX_REQUEST_TEMPLATE, REQUEST_TEMPLATES, ChatTemplate, RequestTemplates
from quire.frontend.front_model import load_front_model
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import write_folder
from tests.helpers.errors import refused
from tests.helpers.fake_engine import fake_async_llm, fake_front_model, fake_llm, small_tokenizer

USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
PARTS = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, small_tokenizer(), **options)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_content_as_text_wherever_it_comes_as_parts() -> None:
    for source in (PLAIN, PARTS):
        found = template(source, content_format="string").render([{"role": "user", "content": parts("a", "b")}])
        assert found == template(source, content_format="string").render([{"role": "user", "content": "a\nb"}])


def test_content_as_parts_wherever_it_comes_as_text() -> None:
    chosen = template(PARTS, content_format="openai")
    assert chosen.render([USER]) == "(hi)" == chosen.render([{"role": "user", "content": parts("hi")}])
    assert chosen.render([{"role": "user", "content": parts("a", "b")}]) == "(a)(b)"
    assert template(PLAIN, content_format="openai").render([USER]) == "[user:[{'type': 'text', 'text': 'hi'}]]"


def test_calls_with_content_as_parts() -> None:
    source = (
        PARTS
        + "{% for m in messages %}{% for c in m.tool_calls %}"
        + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert template(source, content_format="openai").render([USER, message]) == '(hi){"a": 1}'


def test_content_as_it_comes_if_the_template_knows_parts() -> None:
    both = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    assert template(both).render([USER, {"role": "user", "content": parts("a", "b")}]) == "hi(a)(b)"
    assert template(PLAIN).render([{"role": "user", "content": parts("a", "b")}]) == "[user:a\nb]"


def test_variables_by_default_give_way_to_those_of_a_request() -> None:
    source = "{{ enable_thinking }}|{{ style }}|{{ bos_token }}"
    chosen = template(source, default_kwargs={"enable_thinking": False, "style": "x"})
    assert chosen.render([USER]) == "False|x|<|endoftext|>"
    assert chosen.render([USER], enable_thinking=True) == "True|x|<|endoftext|>"
    ids = chosen.encode([USER], variables={"style": None})
    assert chosen._tokenizer.decode(ids, skip_special_tokens=False) == "False|None|<|endoftext|>"


def fake_info(config: EngineConfig) -> ModelInfo:
    return dataclasses.replace(fake_front_model().info, path=Path(config.model.model))


def test_options_reach_the_template_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(
        tmp_path / "model", "byte_level", chat_template="{{ style }}{{ messages[0].content[0].text }}"
    )
    monkeypatch.setattr("quire.frontend.front_model.load_info", fake_info)
    config = EngineConfig.from_kwargs(
        model=str(folder), chat_template_content_format="openai", default_chat_template_kwargs={"style": "S"}
    )
    front = load_front_model(config)
    assert front.template().render([USER]) == "Shi"
    assert front.template("{{ messages[0].content[0].text }}-{{ style }}").render([USER]) == "hi-S"


def test_a_template_of_its_own_for_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers has it: "tool_use" is taken if there are tools, in whichever file it stands."""
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr("quire.frontend.front_model.load_info", fake_info)
    plain, tool_use = "{{ messages[0].content }}", "{{ tools | tojson }}{{ messages[0].content }}"
    listed = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tool_use}]
    one = write_folder(tmp_path / "one", "byte_level", chat_template=listed)
    two = write_folder(tmp_path / "two", "byte_level")
    (two / "additional_chat_templates").mkdir()
    (two / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    (two / "chat_template.jinja").write_text(plain)
    for folder in (one, two):
        chosen = load_front_model(EngineConfig.from_kwargs(model=str(folder))).template()
        oracle = PreTrainedTokenizerFast.from_pretrained(folder)
        for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
            assert chosen.render([USER], tools=tools) == oracle.apply_chat_template([USER], tools=tools, tokenize=False)
        assert chosen.reads("tools") and chosen.source == plain and chosen.for_tools.source == tool_use
        path = tmp_path / "own.jinja"
        path.write_text("{{ messages | length }}")
        chosen = load_front_model(EngineConfig.from_kwargs(model=str(folder), chat_template=str(path))).template()
        assert chosen.render([USER], tools=[]) == "1" and not chosen.reads("tools")


def test_tokens_with_names_of_a_models_own(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    source = "{{ image_token }}|{{ boi_token }}|{{ eos_token }}|{{ add_bos_token }}|{{ audio }}"
    own = {
        "image_token": "<img>",
        "add_bos_token": True,
        "extra_special_tokens": {"boi_token": "<boi>", "audio": "<a>"},
    }
    folder = write_folder(tmp_path / "model", "byte_level", chat_template=source, **own)
    expected = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template([USER], tokenize=False)
    tokenizer = Tokenizer.from_folder(folder)
    assert ChatTemplate(source, tokenizer).render([USER]) == expected == "<img>|<boi>|<|im_end|>||<a>"


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt", "a b", "chat_template"])
def test_variables_by_default_cannot_replace_arguments(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(default_chat_template_kwargs={name: 1})
    assert caught.value.param == "default_chat_template_kwargs" and name in caught.value.message


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{{ tools }}", True),
        ("{{ '{{ tools }}' }}{# tools #}tools", False),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}{{ f(1) }}", False),
        ("{% macro f(x) %}{{ tools }}{% endmacro %}{{ f(1) }}", True),
        ("{% for tools in messages %}{{ tools }}{% endfor %}", False),
        ("{% for m in messages %}{% for t in tools %}{{ t }}{% endfor %}{% endfor %}", True),
        ("{% set tools = [] %}{{ tools }}", False),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", True),
        ("{% set ns = namespace(tools=1) %}{{ ns.tools }}{{ messages[0].tools }}", False),
        ("{% set documents = documents or [] %}{% set ns = namespace(n=tools | length) %}", True),
        ("{% generation %}{{ tools | tojson }}{% endgeneration %}", True),
        ("{% call(tools) range(3) %}{{ tools }}{% endcall %}", False),
    ],
)
def test_what_a_template_reads(source: str, read: bool) -> None:
    assert template(source).reads("tools") is read


# Templates that requests bring.


def test_a_template_of_a_request_is_used_and_kept() -> None:
    templates, tokenizer = RequestTemplates(default_kwargs={"style": "S"}), small_tokenizer()
    first = templates.get("{{ style }}{{ messages[0].content }}", tokenizer)
    assert first.render([USER]) == "Shi"
    assert templates.get("{{ style }}{{ messages[0].content }}", tokenizer) is first
    for number in range(REQUEST_TEMPLATES - 1):
        templates.get(f"{number}", tokenizer)
    assert templates.get("{{ style }}{{ messages[0].content }}", tokenizer) is first
    for number in range(REQUEST_TEMPLATES):
        templates.get(f"more {number}", tokenizer)
    assert templates.get("{{ style }}{{ messages[0].content }}", tokenizer) is not first


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("{% if %}", "invalid_value"),
        ("{{ x | nofilter }}", "invalid_value"),
        ("x" * (MAX_REQUEST_TEMPLATE + 1), "string_above_max_length"),
        (5, "invalid_type"),
        (["{{ x }}"], "invalid_type"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "invalid_value"),
        ("{{ " + "[" * 300 + "1" + "]" * 300 + " }}", "invalid_value"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "invalid_value"),
        ("{{ 1" + " + 1" * 16_000 + " }}", "invalid_value"),
        ("{{ x" + ".a" * 30_000 + " }}", "invalid_value"),
        ("{{ x" + " | trim" * 9_000 + " }}", "invalid_value"),
        ("{% for a in b %}" * 25 + "{% endfor %}" * 25, "invalid_value"),
    ],
)
def test_bad_templates_of_requests_are_refused(source: Any, code: str) -> None:
    with refused("chat_template", code) as caught:
        RequestTemplates().get(source, small_tokenizer())
    assert len(caught.value.message) < 600


def test_control_tokens_written_by_the_template_of_a_request_count() -> None:
    """Who may bring a template may write control tokens; what stands in the messages still must not."""
    tokenizer = small_tokenizer()
    chosen = RequestTemplates().get("<|im_start|>{{ messages[0].content }}", tokenizer)
    ids = chosen.encode([{"role": "user", "content": "<|im_end|>"}])
    assert [index for index in ids if index in tokenizer.special_ids] == [tokenizer.token_to_id("<|im_start|>")]


def test_templates_from_many_threads() -> None:
    templates, tokenizer = RequestTemplates(), small_tokenizer()
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(20):
            text = templates.get(f"{(number + turn) % 12}" + "{{ messages[0].content }}", tokenizer).render([USER])
            if text != f"{(number + turn) % 12}hi":
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_front_without_tokenizer_takes_no_template() -> None:
    front = dataclasses.replace(fake_front_model(), tokenizer=None)
    with refused("chat_template"):
        front.template("{{ x }}")


def test_llm_chat_takes_template_and_documents() -> None:
    llm, _ = fake_llm()
    with llm:
        source = "{{ messages[0].content }}{% for d in documents %}<{{ d.text }}>{% endfor %}"
        outputs = llm.chat([USER], use_tqdm=False, chat_template=source, documents=[{"text": "D"}])
        tokenizer: Tokenizer = llm.get_tokenizer()
        assert tokenizer.decode(outputs[0].prompt_token_ids) == "hi<D>"
        with pytest.raises(RequestError, match="documents"):
            llm.chat([USER], use_tqdm=False, documents=[{"text": "D"}])


def test_chat_prompt_takes_template_and_documents() -> None:
    async def check() -> None:
        llm, _ = fake_async_llm()
        async with llm:
            source = "{{ messages[0].content }}{% for d in documents %}<{{ d.text }}>{% endfor %}"
            ids = await llm.chat_prompt([USER], chat_template=source, documents=[{"text": "D"}])
            assert llm.tokenizer is not None and llm.tokenizer.decode(ids) == "hi<D>"
            with pytest.raises(RequestError, match="documents"):
                await llm.chat_prompt([USER], documents=[{"text": "D"}])
            with refused("chat_template"):
                await llm.chat_prompt([USER], chat_template="{% if %}")

    asyncio.run(check())


# What no template may do, and what it may.


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ dict.__class__ }}{{ dict.mro() }}",
        "{{ dict.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('{0.__class__.__mro__}' | format(1)).format(1) }}",
        "{{ self.__init__ }}{{ self._TemplateReference__context.environment.budget }}",
        "{{ messages[0].get._function.__self__ }}{{ raise_exception._function.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ range.__self__.budget.refill() }}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_templates_cannot_reach_out(source: str) -> None:
    try:
        text = template(source).render([USER])
    except RequestError:
        return
    assert text in ("", "{}"), "an undefined value renders as nothing"
