"""What an option is: its declaration, the flag it becomes, the check of its value. Which there are stands elsewhere.

Dataclasses of options are in `config.py` (an engine's), `server_config.py` (a server's) and beside CLI commands.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError, echo


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is known of an option beside its name, type and default.

    Attributes:
        help: one sentence. low, high: inclusive bounds. choices: allowed values. metavar: how help names the value.
        size: whether texts like "4GiB" are accepted. json: whether a text is parsed as a JSON object.
        gib: whether a small number without a unit is one of GiB; see `check_option`.
        secret: never shown in logs. short: another flag, such as "-tp". many: whether a flag takes several values.
        spellings: what other values mean that other programs have for it.
        no_effect: whether it changes nothing, because what it asks for is always so, as `help` says to whoever gives
            it. fixed: whether only its default is allowed.
    """

    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    size: bool = False
    gib: bool = False
    json: bool = False
    secret: bool = False
    short: str | None = None
    many: bool = False
    spellings: Mapping[Any, Any] = field(default_factory=dict)
    no_effect: bool = False
    fixed: bool = False


def option(default: Any, help: str, **details: Any) -> Any:
    """Declare a dataclass field that is an option; `details` are the other fields of `Option`."""
    metadata = {"option": Option(help=help, **details)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class OptionField:
    """One option as the CLI, YAML reader, or docs see it: its name, type, default, and details."""

    name: str
    type: Any
    default: Any
    option: Option
    group: type

    @property
    def flag(self) -> str:
        """The command-line spelling, `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")


def option_fields(groups: tuple[type, ...]) -> Iterator[OptionField]:
    """Yield every option of these config dataclasses, in order of declaration."""
    for group in groups:
        hints = typing.get_type_hints(group)
        for item in dataclasses.fields(group):
            default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
            yield OptionField(item.name, hints[item.name], default, item.metadata["option"], group)


SIZE_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12}
SIZE_UNITS |= {"tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


COUNT = re.compile(r"(\d+)(?:(\.\d+)?([kmgt])|([KMGT]))")


def parse_count(text: str) -> int:
    """Return the integer that "4096", "4k" (4000), "1.5k" or "4K" (4096) mean; raise ValueError for anything else."""
    found = COUNT.fullmatch(text.strip())
    if found is None:
        return int(text)
    whole, fraction, decimal, binary = found.groups()
    if binary is not None:
        return int(whole) * 2 ** (10 * ("KMGT".index(binary) + 1))
    return int(float(whole + (fraction or "")) * 10 ** (3 * ("kmgt".index(decimal) + 1)))


MIN_POOL = 2**20  # bytes; numbers below it cannot be meant as bytes where `Option.gib` is set


def parse_size(text: str) -> int:
    """Return the bytes that "4096", "512MiB" or "1.5GB" mean; raise ValueError for anything else."""
    number = text.strip().lower()
    unit = number.lstrip("0123456789.")
    number = number[: len(number) - len(unit)]
    if not number or unit.strip() not in SIZE_UNITS:
        raise ValueError(text)
    return int(float(number) * SIZE_UNITS[unit.strip()])


def pool_size(value: str | int | float) -> int:
    """Return the bytes of a pool: a number without a unit is GiB if it is below 2**20, as vLLM has it, else bytes.

    So a checked value means the same when it is checked again. Raises ValueError for what is neither 0 nor 1 MiB or
    more.
    """
    if isinstance(value, str):
        bare = value.strip().replace(".", "", 1).isdecimal()
        value, small = (float(value), 2**30) if bare else (parse_size(value), 1)
    else:
        small = 2**30
    size = int(value * small) if value < MIN_POOL else int(value)
    if 0 != size < MIN_POOL:
        raise ValueError(value)
    return size


def base_type(annotation: Any) -> tuple[type, bool]:
    """Reduce a field's annotation to (element type, repeated): `list[str] | None` is (str, True)."""
    if isinstance(annotation, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        lists = [part for part in parts if typing.get_origin(part) is list]
        return base_type((lists or parts)[0])
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    return typing.get_origin(annotation) or annotation, False


def check_option(known: OptionField, value: Any) -> Any:
    """Return `value` in the option's type, or raise `ConfigError` naming option, value, and what is allowed."""
    if isinstance(value, str | None) and value in known.option.spellings:
        value = known.option.spellings[value]
    if value is None and types.NoneType in typing.get_args(known.type):
        return None
    kind, repeat = base_type(known.type)
    if repeat:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
            raise _bad(known, value, "one or more non-empty texts")
        for item in items:
            _check_encodable(known, item)
        return list(items)
    if kind is dict:
        if not isinstance(value, dict):
            raise _bad(known, value, "a JSON object")
        return dict(value)
    return _check_scalar(known, kind, value)


def _check_scalar(known: OptionField, kind: Any, value: Any) -> Any:
    details = known.option
    if details.gib and isinstance(value, str | int | float) and not isinstance(value, bool):
        value = _checked_pool(known, value)
    elif details.size and isinstance(value, str):
        try:
            value = parse_size(value)
        except ValueError:
            raise _bad(known, value, "a size such as 4096, 512MiB or 2GB") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
        raise _bad(known, value, names[kind])
    if details.fixed and value != known.default:
        raise _bad(known, value, f"{str(known.default).lower()}: {details.help}")
    if details.choices is not None and value not in details.choices:
        raise _bad(known, value, "one of " + ", ".join(details.choices))
    if details.low is not None and not value >= details.low:
        raise _bad(known, value, f"at least {details.low:g}")
    if details.high is not None and not value <= details.high:
        raise _bad(known, value, f"at most {details.high:g}")
    if kind is str:
        if value == "":
            raise _bad(known, value, "a non-empty text")
        _check_encodable(known, value)
    return value


def _check_encodable(known: OptionField, value: str) -> None:
    """Raise `ConfigError` for a text that no command line and no path can have: one with lone surrogates."""
    try:
        os.fsencode(value)  # unlike `encode`, takes what stands for bytes of a path that are not UTF-8
    except UnicodeEncodeError:
        raise _bad(known, value, "valid Unicode text") from None


def _checked_pool(known: OptionField, value: str | int | float) -> int:
    try:
        return pool_size(value)
    except (ValueError, OverflowError):
        raise _bad(known, value, "0, or at least 1MiB: a size such as 4GiB or 512MiB, or a number of GiB") from None


def _bad(known: OptionField, value: Any, allowed: str) -> ConfigError:
    shown = "(hidden)" if known.option.secret else echo(value)
    return ConfigError(f"{known.name}: {shown} is not allowed; it must be {allowed}", param=known.name)


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the known word nearest to `word`, or nothing.

    Words of an option that differ must be alike one by one: data_parallel_size is no slip for tensor_parallel_size.
    """
    for found in difflib.get_close_matches(word, known, n=3):
        parts, others = (set(re.split("[-_]", name)) for name in (word, found))
        if all(difflib.get_close_matches(part, others - parts) for part in parts - others) or not others - parts:
            return f"; did you mean {found}?"
    return ""


def unknown_option(name: str, known: list[str]) -> ConfigError:
    """Return the error for an option that does not exist, with the nearest one that does."""
    return ConfigError(f"unknown option {name}{nearest(name, known)}", param=name, code="unknown_option")


def check_rules(rules: Mapping[str, object]) -> None:
    """Raise `ConfigError` for the first rule that is broken.

    Args:
        rules: whether each is broken, by what is said then, which begins with the option at fault.
    """
    for message, broken in rules.items():
        if broken:
            raise ConfigError(message, param=message.split()[0].rstrip(":"))
