"""The Jinja environment that chat templates run in: sandboxed, without a loader.

Filters, globals and whitespace rules are those that templates on the hub are written for. Nothing here bounds what a
template does: `chat_core` does that for templates that may run in the front, and a worker process for all others
(`chat_worker`). What a template prints never has the address of an object in it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import update_wrapper
from types import BuiltinMethodType, FunctionType, MethodType, NoneType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Cycler, Joiner, Namespace

from quire.errors import RequestError

MAX_MESSAGE = 500
MAX_OUTPUT_CHARS = 2**24
MAX_TIME_FORMAT = 256
TOO_COMPLEX = "template_too_complex"
ITERATORS = ("map", "select", "reject", "selectattr", "rejectattr", "items", "unique", "batch", "slice", "reverse")
PLAIN_TYPES = frozenset({str, dict, list, int, float, bool, NoneType, Undefined})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

_RUNTIME_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)


class TemplateRefusalError(TemplateError):
    """A template refuses the conversation, by `raise_exception`."""


class _Generation(Extension):
    """Accepts {% generation %} ... {% endgeneration %}, which marks training targets, and renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the inner statements in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Function:
    """A function, a method, or anything else to be called, as templates have it: printed without an address."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._function == other._function

    def __hash__(self) -> int:
        return hash(self._function)

    def __repr__(self) -> str:
        return without_addresses(repr(self._function))

    @staticmethod
    def inside(value: Function) -> Callable[..., Any]:
        """Return what is called; no attribute, since a template could read it."""
        return value._function


class _Iterator:
    """An iterator, which is printed without an address."""

    __slots__ = ("_iterator",)

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __next__(self) -> Any:
        return next(self._iterator)

    def __repr__(self) -> str:
        return without_addresses(repr(self._iterator))


class _Dict:
    """`dict` as templates have it: to be called, and nothing else of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(keys, value)

    def __repr__(self) -> str:
        return "<class 'dict'>"


class _Cycler(Cycler):
    __repr__ = _Dict.__repr__


class _Joiner(Joiner):
    __repr__ = _Dict.__repr__


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


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with the filters and globals of chat templates."""

    def __init__(self, finalize: Callable[[Any], Any] | None = None) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=finalize
        )
        self.filters["tojson"] = tojson
        for name in ("attr", *ITERATORS):
            self.filters[name] = _shown_result(self.filters[name])
        del self.globals["lipsum"]
        self.globals["raise_exception"] = Function(_raise_exception)
        self.globals["strftime_now"] = Function(_strftime_now)
        self.globals["range"] = range
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.globals["cycler"] = _Cycler
        self.globals["joiner"] = _Joiner

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox; methods are to be called, and printed without an address."""
        return _shown(super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As the sandbox; as for `getattr`."""
        return _shown(super().getitem(obj, argument))


def _shown(value: Any) -> Any:
    """Return a value, or if it would be printed with its address, something in its place that is not."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Iterator):
        return _Iterator(value)
    if isinstance(value, BuiltinMethodType | MethodType | FunctionType) or type(value).__repr__ is object.__repr__:
        return Function(value)
    return value


def _shown_result(function: Callable[..., Any]) -> Callable[..., Any]:
    def shown(*args: Any, **kwargs: Any) -> Any:
        return _shown(function(*args, **kwargs))

    return update_wrapper(shown, function)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja's own filter, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def without_addresses(text: str) -> str:
    """Return a text about objects without the addresses that Python puts in."""
    return _ADDRESS.sub("", text)


def compile_template(source: str, environment: ChatEnvironment | None = None) -> Template:
    """Compile a template. Raises `jinja2.TemplateSyntaxError`."""
    try:
        return (environment or ChatEnvironment()).from_string(source)
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise _too_deep(error) from None


def parse_template(source: str) -> nodes.Template:
    """Parse a template. Raises `jinja2.TemplateSyntaxError`."""
    try:
        return ChatEnvironment().parse(source)
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise _too_deep(error) from None


def _too_deep(error: BaseException) -> TemplateSyntaxError:
    return TemplateSyntaxError(f"nested too deep, or too much of something ({type(error).__name__})", 1)


def variables_read(tree: nodes.Template) -> frozenset[str]:
    """Return the names that a template looks up in what it is given, wherever it does so."""
    try:
        return frozenset(meta.find_undeclared_variables(tree))
    except RecursionError as error:
        raise _too_deep(error) from None


def render_bounded(template: Template, context: Mapping[str, Any]) -> str:
    """Render a template from `compile_template`, up to a number of characters.

    Raises:
        RequestError: the template refuses the conversation, fails on it, or makes too much of it (code
            "template_too_complex"); param is "messages".
    """
    chunks = []
    size = 0
    try:
        for chunk in template.generate(context):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_OUTPUT_CHARS:
                raise too_complex(f"makes more than {MAX_OUTPUT_CHARS} characters")
        return "".join(chunks)
    except TemplateRefusalError as error:
        raise RequestError(without_addresses(str(error))[:MAX_MESSAGE], param="messages") from None
    except RequestError:
        raise
    except MemoryError:
        raise too_complex("takes too much memory") from None
    except _RUNTIME_ERRORS as error:
        raise failed(error) from None


def failed(error: Exception) -> RequestError:
    """Return the error of a request on which the template fails."""
    reason = without_addresses(f"{type(error).__name__}: {error}")[:MAX_MESSAGE]
    return RequestError(f"the chat template fails on these messages ({reason})", param="messages")


def too_complex(what: str) -> RequestError:
    """Return the error of a request whose template "takes too much memory", or the like."""
    return RequestError(f"the chat template {what} for this conversation", param="messages", code=TOO_COMPLEX)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > MAX_TIME_FORMAT:
        raise TemplateRefusalError(f"strftime_now takes at most {MAX_TIME_FORMAT} characters")
    return datetime.datetime.now().strftime(form)
