"""What a program appends to its state: text, `gen`, `select` and turns. Plain data; nothing is generated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.checks import check_unicode
from quire.errors import RequestError, echo
from quire.sampling_params import OPTIONS, SamplingParams
from quire.structured_outputs import StructuredOutputParams

ROLES = ("system", "user", "assistant")
SELECT_METHODS = ("auto", "logprob", "constrained")
DEFAULT_MAX_TOKENS = 128
# Fields of SamplingParams that a gen may not set, because the state depends on them.
RESERVED = frozenset(name for name, field in OPTIONS.items() if field.affects != "text") | {
    "structured_outputs",
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
}


@dataclass(frozen=True, slots=True)
class Gen:
    """Text that the model writes.

    Attributes:
        name: under which it can be read, if any. options: fields of `SamplingParams`.
    """

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)
    structured_outputs: StructuredOutputParams | None = None


@dataclass(frozen=True, slots=True)
class Select:
    """One of several texts, the model's choice. `method` is one of `SELECT_METHODS`."""

    name: str | None
    choices: tuple[str, ...]
    method: str = "auto"


@dataclass(frozen=True, slots=True)
class Begin:
    """A turn begins."""

    role: str


@dataclass(frozen=True, slots=True)
class End:
    """The turn ends."""


Part = str | Gen | Select | Begin | End


class Expression:
    """Parts in a row; `+` joins expressions and texts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __add__(self, other: str | Expression) -> Expression:
        return Expression(self.parts + parts_of(other))

    def __radd__(self, other: str) -> Expression:
        return Expression(parts_of(other) + self.parts)


def parts_of(value: Any) -> tuple[Part, ...]:
    """Return the parts of an expression or a text. Raises `RequestError` for anything else."""
    if isinstance(value, Expression):
        return value.parts
    if not isinstance(value, str):
        raise RequestError(
            f"only texts, gen(), select() and turns can be appended, not {type(value).__name__}", code="invalid_type"
        )
    check_unicode(value, "text")
    return (value,) if value else ()


def gen(
    name: str | None = None,
    *,
    max_tokens: int | None = None,
    stop: str | list[str] | None = None,
    regex: str | None = None,
    schema: Any = None,
    structured_outputs: StructuredOutputParams | Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Expression:
    """Let the model write, from what the state holds so far.

    Args:
        name: read the text as `state[name]`.
        max_tokens: most tokens; None takes that of the run's `sampling`, or else 128.
        stop: texts that end it; they are not part of it.
        regex: the whole text must match. schema: the text is JSON of this JSON schema (a mapping, its JSON text, or a
            pydantic model). structured_outputs: any other form, as for `SamplingParams`. At most one of the three.
        sampling: other fields of `SamplingParams`, such as `temperature`. What is not given is taken from the run, and
            then from the model's recommendations.

    Raises:
        RequestError: an unknown or reserved option, or a bad value; param names it.
    """
    options = dict(sampling)
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if stop is not None:
        options["stop"] = stop
    check_options(options)
    return Expression((Gen(_name(name), options, _structured(regex, schema, structured_outputs)),))


def select(name: str | None, choices: Sequence[str], *, method: str = "auto") -> Expression:
    """Let the model choose one of several texts.

    Args:
        name: read the chosen text as `state[name]`.
        method: "logprob" takes the text whose tokens have the highest mean log-probability; "constrained" generates
            (with the run's sampling options) under the constraint that one of the texts comes out; "auto" is "logprob"
            where the backend can, and "constrained" elsewhere.

    Raises:
        RequestError: no choices, an empty or repeated one, or an unknown method.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise RequestError(f"choices must be a list of non-empty texts, got {echo(choices)}", param="choices")
    if len(set(choices)) < len(choices):
        raise RequestError(f"choices must differ from each other, got {echo(choices)}", param="choices")
    for item in choices:
        check_unicode(item, "choices")
    if method not in SELECT_METHODS:
        raise RequestError(f"method must be one of {', '.join(SELECT_METHODS)}, got {echo(method)}", param="method")
    return Expression((Select(_name(name), tuple(choices), method),))


def system(content: str | Expression) -> Expression:
    """Return a system turn."""
    return turn("system", content)


def user(content: str | Expression) -> Expression:
    """Return a user's turn."""
    return turn("user", content)


def assistant(content: str | Expression) -> Expression:
    """Return an assistant's turn."""
    return turn("assistant", content)


def turn(role: str, content: str | Expression) -> Expression:
    """Return a turn of a role, from its beginning to its end."""
    return Expression((Begin(role), *parts_of(content), End()))


def check_options(options: Mapping[str, Any], *, param: str = "gen") -> None:
    """Raise `RequestError` unless these are fields of `SamplingParams` that a program may set, with good values."""
    for name in options:
        if name not in SamplingParams.__struct_fields__ or name in RESERVED:
            raise RequestError(f"{param} has no option {echo(name)}", param=name, code="unknown_parameter")
    SamplingParams(**options)


def max_tokens_of(options: Mapping[str, Any]) -> int | None:
    """Return how many tokens a gen with these options may have; None is as many as fit."""
    return options.get("max_tokens", DEFAULT_MAX_TOKENS)


def _name(name: Any) -> str | None:
    if name is not None and (not isinstance(name, str) or not name):
        raise RequestError(f"name must be a non-empty text or None, got {echo(name)}", param="name")
    return name


def _structured(regex: str | None, schema: Any, other: Any) -> StructuredOutputParams | None:
    kinds = {"regex": regex, "schema": schema, "structured_outputs": other}
    given = [label for label, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise RequestError(f"give one of {' and '.join(given)}, not both", param=given[1])
    if regex is not None:
        return StructuredOutputParams(regex=regex)
    if schema is not None:
        of_model = getattr(schema, "model_json_schema", None)
        return StructuredOutputParams(json=schema if of_model is None else of_model())
    return SamplingParams(structured_outputs=other).structured_outputs
