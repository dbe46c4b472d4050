"""Typed reading of JSON objects such as config.json: every wrong value becomes one line naming field and constraint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelError, echo

_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys of one JSON object of a model folder.

    A key that is absent or null gives the default; without a default it is an error. `within` names the enclosing
    key in messages ("rope_parameters"), empty at the top level.
    """

    values: Mapping[str, Any]
    path: Path
    within: str = ""

    def error(self, key: str, expected: str) -> ModelError:
        """Return the error that the value of `key` is not `expected`."""
        name = self._name(key)
        if self.values.get(key) is None:
            return ModelError(f"{self.path}: {name} is missing (expected {expected})")
        return ModelError(f"{self.path}: {name} is {echo(self.values[key])} (expected {expected})")

    def integer(self, key: str, default: Any = _REQUIRED, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer within [low, high]."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, above: float = 0.0) -> float:
        """A finite number larger than `above`."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        expected = f"a number above {above:g}" if above > -math.inf else "a number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, expected)
        if isinstance(value, int) and value.bit_length() > 1000:
            raise self.error(key, expected)
        if not math.isfinite(value) or value <= above:
            raise self.error(key, expected)
        return float(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above 0."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"a list of {length} numbers")
        items = Fields({str(index): item for index, item in enumerate(value)}, self.path, self._name(key))
        return tuple(items.number(str(index)) for index in range(length))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def inner(self, key: str) -> Fields | None:
        """The JSON object under `key`, or None if absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, self.path, self._name(key))

    def _name(self, key: str) -> str:
        return f"{self.within}.{key}" if self.within else key
