"""Checks of single fields: each returns the value, or raises a `RequestError` that names field, value and bound."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.errors import RequestError, echo

INT64_MAX = 2**63 - 1
MAX_TEXT_LENGTH = 1024


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` if it is an int (not a bool) within [low, high]; raise `RequestError` naming the field else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    if value < low:
        raise wrong_value(name, f"at least {low}", value, "integer_below_min_value")
    if value > high:
        raise wrong_value(name, f"at most {high}", value, "integer_above_max_value")
    return value


def check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """Return `value` as a finite float within [low, high] ((low, high] with `low_open`); raise `RequestError` else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    if isinstance(value, float) and math.isnan(value):  # huge integers are no floats
        raise RequestError(f"{name} must be a finite number, got nan", param=name, code="invalid_value")
    if value < low or (low_open and value == low):
        bound = "greater than" if low_open else "at least"
        raise wrong_value(name, f"{bound} {low:g}", value, "decimal_below_min_value")
    if value > high:
        raise wrong_value(name, f"at most {high:g}", value, "decimal_above_max_value")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is a bool; raise `RequestError` naming the field otherwise."""
    if not isinstance(value, bool):
        raise wrong_type(name, "true or false", value)
    return value


def check_list(name: str, value: Any, most: int) -> list[Any]:
    """Return `value` if it is a list of at most `most` items; raise `RequestError` naming the field otherwise."""
    if not isinstance(value, list | tuple):
        raise wrong_type(name, "a list", value)
    if len(value) > most:
        raise RequestError(
            f"{name} may have at most {most} items, got {len(value)}", param=name, code="array_above_max_length"
        )
    return list(value)


def check_strings(name: str, value: Any, most: int, longest: int = MAX_TEXT_LENGTH) -> list[str]:
    """Return a string, or a list of at most `most` of them, as a list; raise `RequestError` else.

    None may be empty, or have more than `longest` characters.
    """
    strings = [value] if isinstance(value, str) else check_list(name, value, most)
    for index, item in enumerate(strings):
        where = name if isinstance(value, str) else f"{name}[{index}]"
        if not isinstance(item, str):
            raise wrong_type(where, "a string", item)
        if not item:
            raise RequestError(f"{where} must not be empty", param=where, code="string_below_min_length")
        if len(item) > longest:
            raise RequestError(
                f"{where} may have at most {longest} characters, got {len(item)}",
                param=where,
                code="string_above_max_length",
            )
    return strings


def wrong_value(where: str, expected: str, value: Any, code: str = "invalid_value") -> RequestError:
    """Return the error for a value that is not what is expected of its field."""
    return RequestError(f"{where} must be {expected}, got {echo(value)}", param=where, code=code)


def wrong_type(where: str, expected: str, value: Any) -> RequestError:
    """Return the error for a value of another type than its field has."""
    return wrong_value(where, expected, value, "invalid_type")


def check_string(value: Any, where: str) -> str:
    """Return `value` if it is a string; raise `RequestError` naming the field else."""
    if not isinstance(value, str):
        raise wrong_type(where, "a string", value)
    return value


def check_choice(value: Any, where: str, choices: Collection[str]) -> str:
    """Return `value` if it is one of these strings; raise `RequestError` naming the field else."""
    if not isinstance(value, str) or value not in choices:
        raise wrong_value(where, f"one of {', '.join(choices)}", value)
    return value


def missing(where: str) -> RequestError:
    """Return the error for a field that must be there."""
    return RequestError(f"{where} is required", param=where, code="missing_required_parameter")


def required(value: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a field of an object; raise `RequestError` if it is absent or null."""
    if value.get(name) is None:
        raise missing(f"{where}.{name}")
    return value[name]


def string_field(value: Mapping[str, Any], name: str, where: str) -> str:
    """Return a string field of an object; raise `RequestError` if it is absent, null or no string."""
    return check_string(required(value, name, where), f"{where}.{name}")


def choice_field(value: Mapping[str, Any], name: str, where: str, choices: Collection[str]) -> str:
    """Return a field of an object that is one of these strings; raise `RequestError` else."""
    return check_choice(required(value, name, where), f"{where}.{name}", choices)


def unknown_field(name: str, known: Sequence[str], where: str = "") -> RequestError:
    """Return the error for a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = where + echo(name)[1:-1]
    return RequestError(f"unknown parameter {shown}{hint}", param=shown, code="unknown_parameter")


def check_object(value: Any, where: str, known: Sequence[str], ignore_unknown: bool = False) -> Mapping[str, Any]:
    """Return `value` if it is an object of no other fields than `known`; raise `RequestError` naming the place else."""
    if not isinstance(value, Mapping):
        raise wrong_type(where, "an object", value)
    for name in value:
        if name not in known and not ignore_unknown:
            raise unknown_field(name, known, f"{where}.")
    return value
