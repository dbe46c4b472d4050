"""The Jinja environment that chat templates run in: sandboxed, without a loader, bounded in output, steps and time.

Filters, globals and whitespace rules are those that templates on the hub are written for. The bounds (`chat_bounds`)
are far beyond what a conversation needs; they keep a template that goes on for ever, by mistake, over hostile input, or
because somebody sent it, from taking the server with it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.errors import RequestError
from quire.frontend.chat_bounds import MAX_OUTPUT_CHARS, Budget, TemplateRefusalError

MAX_MESSAGE = 500
COUNTED, JOINED = "_counted", "_joined"

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


class _Generation(Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks training targets, and renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the inner statements in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` as templates have it: to be called, and nothing else of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` as templates have it: names with an underscore in front are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_public(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)


def _check_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have {name[:100]!r}: names must not begin with an underscore")


class _Metering(NodeTransformer):
    """Puts counters where the sandbox has no hooks: around what loops go over, and in the place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the rounds."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Price the text before it is made."""
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, JOINED, [], [], None, None, lineno=node.lineno)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        self.budget = Budget()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._finalize
        )
        self._set_filters()
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["range"] = self._range
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def _set_filters(self) -> None:
        budget = self.budget

        @pass_context
        def counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
            return budget.counted(items)

        @pass_context
        def joined(context: Context, parts: tuple[Any, ...]) -> str:
            budget.weigh(parts)
            return str_join(parts)

        def tojson(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            """Plain JSON: unlike Jinja's own filter, nothing is escaped for HTML."""
            budget.weigh(value)
            budget.check_width(indent)
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        self.filters.update({COUNTED: counted, JOINED: joined, "tojson": tojson})
        for name in ("join", "string", "format", "replace", "center", "indent", "batch", "slice", "wordwrap"):
            self.filters[name] = _priced(budget, name, FILTERS[name])

    def _finalize(self, value: Any) -> Any:
        """Price what is about to be printed, unless it is a text, whose length `render_bounded` sees."""
        if isinstance(value, dict | list | tuple | set):
            self.budget.weigh(value)
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        assert isinstance(tree, nodes.Template)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox, at the price of a step."""
        self.budget.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As the sandbox, at the price of a step."""
        self.budget.spend()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the sandbox, at the price of a step; the odd names leave all others to the template."""
        __self.budget.spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            __self.budget.check_method(owner, __obj.__name__, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As the sandbox, with a price."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        method = wrapped

        def priced(*args: Any, **kwargs: Any) -> str:
            self.budget.check_format(value.__self__, *args, *kwargs.values())
            return method(*args, **kwargs)

        return priced

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As the sandbox, with a price."""
        self.budget.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.budget.spend(len(numbers))
        return numbers


def _priced(budget: Budget, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter of Jinja's with a price put in front."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def check(value: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        rest = (*args, *given.values())
        if name in ("join", "string"):
            budget.weigh(value)
            if name == "join" and rest and isinstance(value, list | tuple):
                budget.check_join(rest[0], value)
        elif name == "format":
            budget.check_format(str(value), *rest)
        elif name == "replace":
            budget.check_replace(str(value), *(str(item) for item in rest[:2]))
        else:
            for item in rest:
                budget.check_width(item)
            if name == "indent":
                widest = max((item if isinstance(item, int) else len(str(item)) for item in rest), default=4)
                budget.make(len(str(value)) + str(value).count("\n") * widest)

    def priced(*args: Any, **kwargs: Any) -> Any:
        check(args[first], args[first + 1 :], kwargs)
        return function(*args, **kwargs)

    if first:
        priced.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return priced


def compile_template(source: str) -> Template:
    """Compile a template. Raises `jinja2.TemplateSyntaxError`."""
    try:
        return _ChatEnvironment().from_string(source)
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise TemplateSyntaxError(f"nested too deep, or too much of something ({type(error).__name__})", 1) from None


def variables_read(source: str) -> frozenset[str]:
    """Return the names that a template looks up in what it is given, wherever it does so."""
    environment = _ChatEnvironment()
    return frozenset(meta.find_undeclared_variables(environment.parse(source)))


def render_bounded(template: Template, context: Mapping[str, Any]) -> str:
    """Render a template from `compile_template`.

    Raises:
        RequestError: the template refuses the conversation, fails on it, or exceeds a bound; param is "messages".
    """
    environment: Environment = template.environment
    assert isinstance(environment, _ChatEnvironment)
    environment.budget.refill()
    chunks = []
    size = 0
    try:
        for chunk in template.generate(context):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_OUTPUT_CHARS:
                raise TemplateRefusalError(f"the chat template makes more than {MAX_OUTPUT_CHARS} characters")
    except TemplateRefusalError as error:
        raise RequestError(str(error)[:MAX_MESSAGE], param="messages") from None
    except _RUNTIME_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        raise RequestError(f"the chat template fails on these messages ({reason})", param="messages") from None
    return "".join(chunks)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
