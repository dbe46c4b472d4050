"""Chat templates run in the front if they are of the core, else where they can be stopped; the text is the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from jinja2 import TemplateSyntaxError

from quire.config import SERVER_GROUPS, EngineConfig
from quire.errors import ModelError, QuireError, RequestError
from quire.frontend import chat_core
from quire.frontend.chat import ChatTemplate, RequestTemplates
from quire.frontend.chat_bounds import FRONT_SECONDS, BeyondCoreError
from quire.frontend.chat_sandbox import TOO_COMPLEX, parse_template
from quire.frontend.chat_worker import CompiledTemplate, TemplateWorkers
from quire.frontend.front_model import load_front_model
from quire.frontend.worker_process import JobDiedError, WorkerPool
from tests.frontend.conftest import write_folder
from tests.frontend.families import FAMILIES
from tests.frontend.hostile_templates import ATTACKS
from tests.frontend.test_chat_families import random_conversation
from tests.frontend.test_chat_options import fake_info
from tests.helpers.errors import refused
from tests.helpers.fake_engine import CHAT_TEMPLATE, fake_async_llm, fake_front_model, small_tokenizer

USER = {"role": "user", "content": "hi"}
ROOT = Path(__file__).parents[2]
MAX_LOOP_SECONDS = 0.1  # of processor time, between two looks of the event loop
QUICK = (
    "format of nine digits",
    "product of bytes",
    "doubling by a macro",
    "lists in lists, compared",
    "loops",
    "stripping many",
)


@pytest.fixture(scope="module")
def workers() -> Iterator[TemplateWorkers]:
    workers = TemplateWorkers()
    yield workers
    workers.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "quire.frontend.chat_worker" in child.cmdline()]


def demo_template() -> str:
    return str(json.loads((ROOT / "src/quire/demo/tokenizer_config.json").read_text())["chat_template"])


# ---- which templates are of the core ----


@pytest.mark.parametrize("name", [*FAMILIES, "demo", "chatml"])
def test_the_templates_of_all_families_are_of_the_core(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.worker_process.start_module", None)  # no process is started
    sources = {"demo": demo_template(), "chatml": CHAT_TEMPLATE}
    source = sources[name] if name in sources else FAMILIES[name].template
    template = CompiledTemplate(source, TemplateWorkers())
    assert template.in_front and "messages" in template.variables
    with contextlib.suppress(RequestError):  # of one that needs more than this
        template.render({"messages": [USER], "tools": None, "bos_token": "", "eos_token": ""})


@pytest.mark.parametrize(
    "source",
    [
        # What else stands in templates of the hub: a line each.
        "{% set attrs = [('role', 'user')] %}{% for a in attrs + [('name', 'x')] %}{{ a[0] ~ '=' ~ a[1] }}{% endfor %}",
        "{% macro tag(a, attrs=[]) %}<{{ a }}{% for k, v in attrs %} {{ k }}{% endfor %}>{% endmacro %}{{ tag('a') }}",
        "{% for i in range(messages | length - 1, -1, -1) %}{{ messages[i].role }}{% endfor %}",
        "{{ ['a', 'b'] | map('upper') | list | join(' | ') }}{{ messages | map(attribute='role') | join(',') }}",
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
        "{{ (messages | rejectattr('role', 'in', ['system']) | list) | length }}",
        "{% for k, v in {'b': 1, 'a': [1, 2]} | dictsort %}{{ k }}:{{ v | tojson(separators=(',', ':')) }}{% endfor %}",
        "{% set body %}x{{ messages[0].content | trim }}{% endset %}{{ body }}{{ body | length }}",
        "{% set ns = namespace(seen=[]) %}{% for m in messages if m.role not in ns.seen %}"
        "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.seen | join }}",
        "{{ strftime_now('%Y') | length }}{{ '  ' * 3 }}{{ messages[0].get('x', 'd') }}{{ 7 % 4 + 7 // 2 + 1 / 4 }}",
        "{{ '~1/~0' | replace('~1', '/') | replace('~0', '~') }}{{ '12' | int + 1 }}{{ 'a' in messages[0] }}",
        "{% with x = messages[0] %}{{ x['content'][::-1] }}{{ x.content.split('i', 1)[0] }}{% endwith %}",
        "{% for m in messages | reverse %}{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}",
        "{% generation %}{{ dict(messages[0], role='x').role }}{% endgeneration %}{{ x | default('y', true) }}{{ x }}",
        "{{ messages[0].content.removeprefix('h').upper().title() }}{{ 'A' if messages is iterable }}{{ none }}",
        "{% if false %}{{ [].append(1) }}{{ raise_exception('no') }}{% endif %}{{ messages[-1] | tojson(indent=2) }}",
        "{{ messages }}{{ messages[0].items() | list }}{{ messages[0] == messages[-1] }}{{ [1, 'a', none, 2.5] }}",
    ],
)
def test_what_the_hubs_templates_use_is_of_the_core_and_the_same_in_both_places(
    source: str, workers: TemplateWorkers
) -> None:
    template = CompiledTemplate(source, workers)
    assert template.in_front
    context = {"messages": [USER, {"role": "assistant", "content": "é & <b>\n"}]}
    assert template.render(context) == workers.render(source, context)
    assert template.variables == workers.variables(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1.5 | round(3) }}",
        "{{ 'x' | center(80) }}",
        "{{ '{}'.format(1) }}",
        "{{ 2 ** 10 }}",
        "{{ [3, 1] | sort }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ messages | tojson(indent=100) }}",
        "{{ messages | map('center', 80) | list }}",
        "{% for a in messages recursive %}{% endfor %}",
        "{% block a %}{% endblock %}",
        "{{ cycler(1, 2) }}",
        "{% call(x) range(3) %}{% endcall %}",
        "{% filter upper %}x{% endfilter %}",
        "{% set f = messages[0].get %}{{ f('role') }}",
        "{{ messages[0]['content']['strip']() }}",
        "{{ messages.__class__ }}",
        "{{ {messages: 1} }}",
        "{{1}}" * 9000,
        "x" * 70_000,
    ],
)
def test_anything_else_is_not(source: str, workers: TemplateWorkers) -> None:
    assert not CompiledTemplate(source, workers).in_front


def test_a_template_of_a_request_is_never_rendered_in_the_front(workers: TemplateWorkers) -> None:
    template = RequestTemplates(workers=workers).get(CHAT_TEMPLATE, small_tokenizer())
    assert not template._template.in_front
    assert template.render([USER]) == ChatTemplate(CHAT_TEMPLATE, small_tokenizer()).render([USER])


@pytest.mark.parametrize("family", FAMILIES)
def test_random_conversations_are_the_same_in_both_places(family: str, workers: TemplateWorkers) -> None:
    source = FAMILIES[family].template
    here = CompiledTemplate(source, workers)
    draw = random.Random(7)
    for _ in range(20):
        messages, options = random_conversation(draw, as_text=draw.random() < 0.5)
        context = {"tools": None, "bos_token": "<s>", "eos_token": "</s>", **options, "messages": messages}
        texts = []
        for render in (here.render, lambda context: workers.render(source, context)):
            try:
                texts.append(render(context))
            except RequestError as error:
                texts.append(f"{error.param}: {error.message}")
        assert texts[0] == texts[1]


def test_values_arrive_as_they_are(workers: TemplateWorkers) -> None:
    source = "{{ x }}|{{ messages | tojson }}"
    values = [10**40, -0.0, 1e300, float("inf"), True, None, "\u2028\x00\U0001f600é\ud800", {"b": [], "a": {"": 1}}, ""]
    context = {"x": values, "messages": values}
    assert CompiledTemplate(source, workers).render(context) == workers.render(source, context)


@pytest.mark.parametrize("source", ["{{ raise_exception('\\ud800') }}", "{{ messages['\\ud800'].x }}"])
def test_errors_with_half_a_character_arrive_as_they_are(source: str, workers: TemplateWorkers) -> None:
    errors = []
    for render in (CompiledTemplate(source, workers).render, lambda context: workers.render(source, context)):
        with refused("messages") as caught:
            render({"messages": [USER]})
        errors.append(caught.value.message)
    assert errors[0] == errors[1] and "ud800" in repr(errors[0])


# ---- what is stopped ----


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("by_request", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hostile_templates_cost_their_own_request(
    name: str, by_request: bool, workers: TemplateWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.frontend.chat_worker.TIMEOUT", 0.5)
    check_stopped(name, by_request, workers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_request", [False, True])
def test_all_hostile_templates_cost_their_own_request(by_request: bool, workers: TemplateWorkers) -> None:
    for name in ATTACKS:
        check_stopped(name, by_request, workers)


def check_stopped(name: str, by_request: bool, workers: TemplateWorkers) -> None:
    """The request ends with an error that says what it was, and hardly any work is done in this process."""
    before = time.process_time()
    with pytest.raises((RequestError, ModelError)) as caught:
        if by_request:
            template = RequestTemplates(workers=workers).get(ATTACKS[name], small_tokenizer())
        else:
            template = ChatTemplate(ATTACKS[name], small_tokenizer(), origin="folder", workers=workers)
        template.render([USER])
    assert time.process_time() - before < 0.5, name
    error = caught.value
    if isinstance(error, ModelError):
        assert "folder: chat template, line 1: compiling it takes" in error.message
    elif error.code == TOO_COMPLEX:
        assert error.param == ("chat_template" if by_request else "messages")
        assert re.search("too much memory|more than [0-9.]+ seconds|more than 16777216 characters", error.message)
    else:
        assert error.param in ("messages", "chat_template") and len(error.message) < 600


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("by_request", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_event_loop_goes_on_meanwhile(name: str, by_request: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.chat_worker.TIMEOUT", 0.5)
    worst = 0.0

    async def look() -> None:
        nonlocal worst
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            worst = max(worst, time.thread_time() - before)

    async def check() -> None:
        front = fake_front_model(chat_template=CHAT_TEMPLATE if by_request else ATTACKS[name])
        llm, _ = fake_async_llm(front_model=front)
        async with llm:
            task = asyncio.create_task(look())
            with pytest.raises(QuireError):
                await llm.chat_prompt([USER], chat_template=ATTACKS[name] if by_request else None)
            assert await llm.chat_prompt([USER], chat_template="{{ messages[0].content }}")
            task.cancel()
        assert worst < MAX_LOOP_SECONDS

    asyncio.run(check())


# ---- what the core lets through is over at once ----

TEXTS = {
    "long": "a" * 2**20,
    "later": "a" * 2**19 + "b",
    "reversed": "b" + "a" * 2**19,
    "short": "a" * 60 + "b" + "a" * 60,
    "pairs": "ab" * 2**19,
    "blanks": " \n" * 2**19,
    "wide": "\u0390\U0001f469" * 2**19,
    "digits": "9" * 2**20,
    "marked": "<&" * 2**19,
}
LISTS = {
    "numbers": list(range(2**17)),
    "floats": [1 / (3 + number) for number in range(2**17)],
    "large": [9**1200] * 2**17,
    "texts": ["a" * 1000 + str(number) for number in range(2**10)],
    "same": ["a" * 2**20] * 2**17,
    "lists": [["a"] * 1000] * 2**17,
    "half": list(range(2**20)),
}
OBJECTS = {"names": {f"n{number}": number for number in range(2**16)}, "deep": {"a": {"b": ["x" * 2**19] * 16}}}
VALUES = {**TEXTS, **LISTS, **OBJECTS, "number": 9**1200, "one": 1, "half_a": "\ud800"}


def expressions() -> Iterator[str]:
    """All methods, filters, tests and operators on values as long as they may be, alone and with each other."""
    values = [*VALUES, "long | safe"]
    for left in values:
        for method in chat_core.METHODS:
            yield f"{left}.{method}()"
            for right in (*TEXTS, "'a'", "texts", "'a', 'b'", "'a', long", "sep=later", "chars=later"):
                yield f"{left}.{method}({right})"
        for name in (*chat_core.FILTERS, *chat_core.CONSTANT_FILTERS):
            yield f"{left} | {name}"
            for right in (*TEXTS, "'a'", "'a', later", "indent=8", "attribute='a'", "'tojson'", "'string'", "base=16"):
                yield f"{left} | {name}({right})"
            for lazy in ("map('string')", "map('tojson')", "select('eq', 'a')", "select", "list", "reverse", "items"):
                for end in ("first", "list", "reverse", "join", "string", "length", "last"):
                    yield f"{left} | {lazy} | {name} | {end}"
        for name in chat_core.TESTS:
            yield from (f"{left} is {name}", f"{left} is {name}('a')", f"{left} is {name}({left})")
        for right in values:
            for operator in ("+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", ">=", "in", "not in"):
                yield f"({left}) {operator} ({right})"
            yield f"({left})[{right}]"
        yield from (f"({left})[{part}]" for part in ("::-1", "1:", "::2", "'a'", "0"))


def check_expressions(found: Iterable[str]) -> None:
    for expression in found:
        for form in ("{% set z = EXPRESSION %}", "{{ EXPRESSION }}"):
            source = form.replace("EXPRESSION", expression)
            with contextlib.suppress(TemplateSyntaxError):
                if not chat_core.is_core(source, parse_template(source)):
                    continue
                template, _ = chat_core.compile_core(source)
                before = time.thread_time()
                with contextlib.suppress(RequestError, BeyondCoreError):
                    chat_core.render_core(template, VALUES, FRONT_SECONDS)
                assert time.thread_time() - before < 2 * MAX_LOOP_SECONDS, source


@pytest.mark.slow
def test_what_the_core_has_is_over_at_once() -> None:
    check_expressions(random.Random(5).sample(list(expressions()), 300))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_much_of_what_the_core_has_is_over_at_once() -> None:
    check_expressions(random.Random(6).sample(list(expressions()), 8000))


LONG_TO_COMPILE = ("looking for a constant",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG_TO_COMPILE)) for name in ATTACKS]
)
def test_the_front_gives_up_an_attack_at_once(name: str) -> None:
    source = ATTACKS[name]
    with contextlib.suppress(TemplateSyntaxError):
        if chat_core.is_core(source, parse_template(source)):
            template, _ = chat_core.compile_core(source)
            before = time.thread_time()
            with contextlib.suppress(RequestError, BeyondCoreError):
                chat_core.render_core(template, {"messages": [USER]}, FRONT_SECONDS)
            assert time.thread_time() - before < 2 * MAX_LOOP_SECONDS


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("name", ["splitting backwards, by name", "loops"])
def test_an_attack_can_be_interrupted(name: str, workers: TemplateWorkers) -> None:
    template = ChatTemplate(ATTACKS[name], small_tokenizer(), workers=workers)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        template.render([USER])
    timer.join()


def test_a_conversation_too_long_for_the_front_is_rendered_in_a_worker(workers: TemplateWorkers) -> None:
    source = (
        "{% for m in messages %}{% for n in messages[loop.index:] %}{{ 'x' if n.role == 'x' }}{% endfor %}{% endfor %}"
        "{{ messages[0].content }}"
    )
    template = ChatTemplate(source, small_tokenizer(), workers=workers)
    assert template._template.in_front
    assert template.render([USER] * 800) == "hi"
    long = "a b " * 400_000
    assert template.render([{"role": "user", "content": long}]) == long


def test_a_killed_worker_costs_no_request(workers: TemplateWorkers) -> None:
    assert workers.render("{{ x | center(3) }}", {"x": "a"}) == " a "
    for child in children():
        child.kill()
    assert workers.render("{{ x | center(3) }}", {"x": "b"}) == " b "


def test_a_frozen_worker_costs_no_request(workers: TemplateWorkers) -> None:
    assert workers.render("{{ x | center(3) }}", {"x": "a"}) == " a "
    for child in children():
        child.suspend()
    assert workers.render("{{ x | center(3) }}", {"x": "b"}) == " b "


def test_a_crash_is_said_to_be_one() -> None:
    pool = WorkerPool("quire.frontend.chat_worker", "chat templates")
    worker = pool._new()
    psutil.Process(worker.pid).send_signal(signal.SIGSEGV)
    with pytest.raises(JobDiedError, match="its process down"):
        worker.do(b"[]", 5.0)


def test_a_worker_imports_what_it_needs() -> None:
    code = "import sys, quire.frontend.MODULE; print(*{name.split('.')[0] for name in sys.modules})"
    unwanted = {
        "chat_worker": {"llguidance", "numpy", "tokenizers", "asyncio", "torch", "numba", "fastapi"},
        "grammars": {"jinja2", "tokenizers", "numpy", "asyncio", "torch", "numba", "fastapi"},
    }
    for module, names in unwanted.items():
        found = subprocess.run([sys.executable, "-c", code.replace("MODULE", module)], capture_output=True, text=True)
        assert found.returncode == 0 and not names & set(found.stdout.split()), module


def test_a_front_that_may_need_workers_starts_one_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "byte_level", chat_template=CHAT_TEMPLATE)
    monkeypatch.setattr("quire.frontend.front_model.load_info", fake_info)
    started: list[TemplateWorkers] = []
    monkeypatch.setattr(TemplateWorkers, "prestart", lambda self: started.append(self))
    for allowed in (False, True):
        options = {"model": str(folder), "trust_request_chat_template": allowed}
        config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **options)
        load_front_model(config).close()
        assert len(started) == allowed


# ---- addresses ----


@pytest.mark.parametrize(
    "printed",
    [
        "messages.append",
        "messages[0].get",
        "messages[0].items",
        "messages[0].items()",
        "'x'.join",
        "'x'.format",
        "[messages.append]",
        "(messages | map('upper'))",
        "messages | map(attribute='append')",
        "messages | map(attribute='append') | list",
        "messages | select",
        "messages | rejectattr('x')",
        "messages[0] | items",
        "messages | batch(2)",
        "messages | slice(2)",
        "messages | unique",
        "messages | reverse",
        "messages | attr('append')",
        "raise_exception",
        "strftime_now",
        "range",
        "range(3)",
        "dict",
        "namespace",
        "namespace(x=messages.append)",
        "cycler",
        "cycler(1)",
        "joiner()",
        "f",
        "self",
        "self.b",
        "nothing",
        "nothing.x is defined",
        "[nothing]",
        "messages.append ~ 'x'",
        "'%s' % messages.append",
        "'%r' | format(messages.append)",
        "'{}'.format(messages.append)",
        "messages.append | pprint",
        "messages.append | string | list | join('-')",
        "[messages.append] | join",
        "messages.append.__self__",
        "(messages | map('upper')) | string",
        "raise_exception(messages.append)",
        "messages.append | tojson",
        "messages.index(messages.append)",
        "messages[messages.append]",
        "{'a': 1}[raise_exception]",
        "1 + raise_exception",
        "f(1, 2, 3)",
        "loop_of_all",
    ],
)
def test_no_address_is_printed(printed: str, workers: TemplateWorkers) -> None:
    source = (
        "{% macro f() %}{% endmacro %}{% block b %}{% endblock %}{% set f2 = f %}{{ PRINTED }}"
        "{% for m in messages %}{{ loop }}{{ loop.cycle }}{{ loop.changed }}{% endfor %}"
    ).replace("PRINTED", printed)
    short = "{% macro f() %}{% endmacro %}{{ PRINTED }}".replace("PRINTED", printed)
    for text in (source, short):
        template = ChatTemplate(text, small_tokenizer(), workers=workers)
        try:
            found = template.render([USER])
        except RequestError as error:
            found = error.message
        assert not re.search("0x[0-9a-f]{3}|0-x-", found), found


def test_addresses_in_messages_are_kept(workers: TemplateWorkers) -> None:
    text = "<function f at 0x7f0011223344>"
    assert ChatTemplate("{{ messages[0].content }}", small_tokenizer()).render([{**USER, "content": text}]) == text
    with refused("messages") as caught:
        ChatTemplate("{{ raise_exception('no') }}", small_tokenizer(), workers=workers).render([USER])
    assert caught.value.message == "no"
