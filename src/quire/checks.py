"""Checks of single fields: each returns the value, or raises a `RequestError` that names field, value and bound.

`Fields` reads the fields of an object within a request.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import RequestError, UnsupportedError, echo

INT64_MAX = 2**63 - 1
FLOAT64_MAX = sys.float_info.max
MAX_TEXT_LENGTH = 1024

# Fields that are known but not honoured, each with the values that are accepted because they ask for nothing.
Refused = Mapping[str, Sequence[Any]]
NONE_REFUSED: Refused = {}


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` if it is an int (not a bool) within [low, high]; raise `RequestError` naming the field else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "an integer", value)
    if value < low:
        raise wrong_value(name, f"at least {low}", value, code="integer_below_min_value")
    if value > high:
        raise wrong_value(name, f"at most {high}", value, code="integer_above_max_value")
    return value


def check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """Return `value` as a finite float within [low, high] ((low, high] with `low_open`); raise `RequestError` else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    if isinstance(value, float) and math.isnan(value):  # huge integers are no floats
        raise RequestError(f"{name} must be a finite number, got nan", param=name, code="invalid_value")
    if value < low or (low_open and value == low):
        bound = "greater than" if low_open else "at least"
        raise wrong_value(name, f"{bound} {low:g}", value, code="decimal_below_min_value")
    if value > high:
        raise wrong_value(name, f"at most {high:g}", value, code="decimal_above_max_value")
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
    _check_num_items(name, value, most)
    return list(value)


def _check_num_items(where: str, items: Sequence[Any], most: int) -> None:
    if len(items) > most:
        raise RequestError(
            f"{where} may have at most {most} items, got {len(items)}", param=where, code="array_above_max_length"
        )


def check_strings(name: str, value: Any, most: int, longest: int = MAX_TEXT_LENGTH) -> list[str]:
    """Return a string, or a list of at most `most` of them, as a list; raise `RequestError` else.

    None may be empty, have more than `longest` characters, or lone surrogates.
    """
    strings = [value] if isinstance(value, str) else check_list(name, value, most)
    for index, item in enumerate(strings):
        where = name if isinstance(value, str) else f"{name}[{index}]"
        if not check_string(item, where):
            raise RequestError(f"{where} must not be empty", param=where, code="string_below_min_length")
        check_length(item, where, longest)
        check_unicode(item, where)
    return strings


def wrong_value(where: str, expected: str, value: Any, code: str = "invalid_value") -> RequestError:
    """Return the error for a value that is not what is expected of its field."""
    return RequestError(f"{where} must be {expected}, got {echo(value)}", param=where, code=code)


def wrong_type(where: str, expected: str, value: Any) -> RequestError:
    """Return the error for a value of another type than its field has."""
    return wrong_value(where, expected, value, code="invalid_type")


def check_string(value: Any, where: str) -> str:
    """Return `value` if it is a string; raise `RequestError` naming the field else."""
    if not isinstance(value, str):
        raise wrong_type(where, "a string", value)
    return value


def check_unicode(value: Any, where: str) -> None:
    """Raise `RequestError` unless a value is JSON data without lone surrogates, which UTF-8 cannot have."""
    _check_encodable(msgspec.json.encode, value, where)


def check_sendable(value: Any, where: str) -> None:
    """Raise `RequestError` unless a value is JSON data that can be sent to another process."""
    _check_encodable(msgspec.msgpack.encode, value, where)


def _check_encodable(encode: Callable[[Any], bytes], value: Any, where: str) -> None:
    try:
        if isinstance(value, str):
            value.encode()  # its error says at which character
        else:
            encode(value)
    except UnicodeEncodeError as error:
        place = f" at character {error.start}" if isinstance(value, str) else ""
        message = f"{where} has a lone surrogate{place}; it is not valid Unicode text"
        raise RequestError(message, param=where) from None
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply", param=where) from None
    except TypeError as error:
        raise RequestError(f"{where} must be JSON data: {error}", param=where, code="invalid_type") from None
    except OverflowError:
        raise RequestError(f"{where} may have no integers of more than 64 bits", param=where) from None


def missing(where: str) -> RequestError:
    """Return the error for a field that must be there."""
    return RequestError(f"{where} is required", param=where, code="missing_required_parameter")


def unknown_field(name: str, known: Sequence[str], where: str = "") -> RequestError:
    """Return the error for a field that does not exist, with the nearest one that does."""
    near = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = where + echo(name)[1:-1]
    return RequestError(f"unknown parameter {shown}{hint}", param=shown, code="unknown_parameter")


def check_refused(name: str, value: Any, accepted: Sequence[Any]) -> None:
    """Raise `UnsupportedError` unless a value is one of those that ask for nothing: no field is silently ignored."""
    if any(type(value) is type(item) and value == item for item in accepted):
        return
    hint = f"; the only values accepted are {', '.join(map(json.dumps, accepted))} and null" if accepted else ""
    raise UnsupportedError(f"{name} is not supported by this server{hint}", param=name)


def check_length(value: str, where: str, most: int) -> str:
    """Return `value` if it has at most `most` characters; raise `RequestError` naming the field else."""
    if len(value) > most:
        raise RequestError(
            f"{where} may have at most {most} characters, got {len(value)}", param=where, code="string_above_max_length"
        )
    return value


def list_items(
    value: Any, where: str, expected: str = "a list", *, most: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the items of a list, each with its place, such as `tools[0]`; raise `RequestError` if it is no list.

    Args:
        most: its greatest length.
    """
    if not isinstance(value, list):
        raise wrong_type(where, expected, value)
    if most is not None:
        _check_num_items(where, value, most)
    for index, item in enumerate(value):
        yield f"{where}[{index}]", item


def check_not_empty(value: Any, where: str) -> None:
    """Raise `RequestError` for an empty list."""
    if value == []:
        raise RequestError(f"{where} must not be empty", param=where, code="empty_array")


class Fields:
    """The fields of an object within a request. A null field is an absent one. Errors name the place of the field.

    Args:
        where: the object's place in the request, such as `messages[0]`; "" is the whole body.
        ignore_unknown: whether `only` lets unknown fields pass.

    Attributes:
        given: the object as it was sent, with null fields. values: its fields that are not null.

    Raises:
        RequestError: it is no object.
    """

    def __init__(self, value: Any, where: str, *, ignore_unknown: bool = False) -> None:
        if not isinstance(value, Mapping):
            raise wrong_type(where, "an object", value)
        self.given = value
        self.where = where
        self.values = {name: item for name, item in value.items() if item is not None}
        self._ignore_unknown = ignore_unknown

    def only(self, known: Collection[str], refused: Refused = NONE_REFUSED) -> Fields:
        """Return this; raise `RequestError` for an unknown field, `UnsupportedError` for one that is not honoured."""
        for name, value in self.values.items():
            if name in refused:
                check_refused(self.place(name), value, refused[name])
            elif name not in known and not self._ignore_unknown:
                raise unknown_field(name, [*known, *refused], self.place(""))
        return self

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def place(self, name: str) -> str:
        """Return the place of a field, such as `messages[0].role`."""
        return f"{self.where}.{name}" if self.where else name

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of any type, `default` if it is absent."""
        return self.values.get(name, default)

    def required(self, name: str) -> Any:
        """Return a field of any type. Raises `RequestError` if it is absent."""
        if name not in self.values:
            raise missing(self.place(name))
        return self.values[name]

    def string(self, name: str, default: str | None = None) -> str:
        """Return a string field; without a default it must be there."""
        return check_string(self.required(name) if default is None else self.get(name, default), self.place(name))

    def boolean(self, name: str, default: bool) -> bool:
        """Return a boolean field, `default` if it is absent."""
        return check_bool(self.place(name), self.get(name, default))

    def choice(self, name: str, choices: Collection[str], default: str | None = None, *, expected: str = "") -> str:
        """Return a field that is one of these strings; without a default it must be there.

        Args:
            expected: what errors say in place of the list of choices.
        """
        value = self.required(name) if default is None else self.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise wrong_value(self.place(name), expected or f"one of {', '.join(choices)}", value)
        return value

    def part(self, value: Any, where: str) -> Fields:
        """Return the fields of an object within this one, at a place that is named in full."""
        return Fields(value, where, ignore_unknown=self._ignore_unknown)

    def parts(self, name: str, expected: str = "a list", *, most: int | None = None) -> Iterator[Fields]:
        """Yield the objects of a list field, none if it is absent; arguments as for `list_items`."""
        for where, item in list_items(self.get(name, []), self.place(name), expected, most=most):
            yield self.part(item, where)

    def object(self, name: str, known: Collection[str] | None = None) -> Fields:
        """Return a field that is an object and must be there, with no other fields than `known`."""
        fields = self.part(self.required(name), self.place(name))
        return fields if known is None else fields.only(known)
