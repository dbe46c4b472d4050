"""The Jinja environment that chat templates run in: sandboxed, without a loader, bounded in output and in steps.

Filters, globals and whitespace rules are those that templates on the hub are written for. The bounds are far beyond
what a conversation needs; they keep a template that loops (by mistake, or over hostile input) from taking the server
with it: characters of output, elements of `range`, and looks at attributes, items and calls.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import RequestError

MAX_OUTPUT_CHARS = 2**24
MAX_STEPS = 1_000_000
MAX_REPEAT = 2**20
MAX_MESSAGE = 500

_RUNTIME_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    MemoryError,
)


class _Refused(TemplateError):
    """Raised by a template through `raise_exception`."""


class _Budget(threading.local):
    """Steps left for the rendering that runs in this thread."""

    steps = 0

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise _Refused("the chat template takes too many steps for this conversation")


class _Generation(Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks training targets, and renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the inner statements in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, counting steps."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.budget = _Budget()
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["range"] = self._range

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox, at the price of a step."""
        self.budget.spend(1)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As the sandbox, at the price of a step."""
        self.budget.spend(1)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox, at the price of a step; the odd names leave all others to the template."""
        __self.budget.spend(1)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply, unless it would make something huge."""
        for first, second in ((left, right), (right, left)):
            if isinstance(first, str | list | tuple) and isinstance(second, int) and len(first) * second > MAX_REPEAT:
                raise _Refused("the chat template makes a text that is too long")
        if operator == "**" and (abs(right) > 64 or abs(left) > 2**32):
            raise _Refused("the chat template makes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.budget.spend(min(len(numbers), MAX_STEPS + 1))
        return numbers


def compile_template(source: str) -> Template:
    """Compile a template. Raises `jinja2.TemplateSyntaxError`."""
    return _ChatEnvironment().from_string(source)


def render_bounded(template: Template, context: Mapping[str, Any]) -> str:
    """Render a template from `compile_template`.

    Raises:
        RequestError: the template refuses the conversation, fails on it, or exceeds a bound; param is "messages".
    """
    environment: Environment = template.environment
    assert isinstance(environment, _ChatEnvironment)
    environment.budget.steps = MAX_STEPS
    chunks = []
    size = 0
    try:
        for chunk in template.generate(context):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_OUTPUT_CHARS:
                raise _Refused(f"the chat template makes more than {MAX_OUTPUT_CHARS} characters")
    except _Refused as error:
        raise RequestError(str(error)[:MAX_MESSAGE], param="messages") from None
    except _RUNTIME_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        raise RequestError(f"the chat template fails on these messages ({reason})", param="messages") from None
    return "".join(chunks)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
