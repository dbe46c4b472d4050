"""Parts of `SamplingParams` that have fields of their own: repetition detection, and logits processors.

Plain structs with their checks; what they do stands in `scheduler.stop` and `sampling.processors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from quire.checks import check_int, check_list
from quire.errors import RequestError, echo

MAX_PATTERN_SIZE = 1024  # a step looks at each size
MAX_PATTERN_COUNT = 2**20
MAX_PROCESSORS = 16
MAX_NAME_LENGTH = 256

_S = TypeVar("_S", bound=msgspec.Struct)


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End an output that goes round in circles. Raises `RequestError` naming the field.

    The output ends as soon as its last `min_count` (at least 2) times s tokens are one pattern of s tokens over and
    over, for any s from `min_pattern_size` to `max_pattern_size`.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        name = "repetition_detection"
        check_int(f"{name}.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        check_int(f"{name}.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_int(f"{name}.min_count", self.min_count, 2, MAX_PATTERN_COUNT)


class LogitsProcessorParams(msgspec.Struct, omit_defaults=True):
    """One logits processor that a request wants: the name it is registered under, and its arguments."""

    name: str
    args: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Check both fields. Structs decoded from the wire pass through here too."""
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME_LENGTH:
            raise RequestError(
                f"logits_processors: a name must be a text of 1 to {MAX_NAME_LENGTH} characters, got {echo(self.name)}",
                param="logits_processors",
                code="invalid_type",
            )
        if not isinstance(self.args, dict):
            raise RequestError(
                f"logits_processors: args of {self.name} must be an object, got {echo(self.args)}",
                param="logits_processors",
                code="invalid_type",
            )


def as_struct(name: str, value: Any, kind: type[_S]) -> _S:
    """Return `value`, a struct of this kind or a mapping of its fields, as a struct; raise `RequestError` else."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, got {echo(value)}", param=name, code="invalid_type")
    unknown = [key for key in value if key not in kind.__struct_fields__]
    if unknown:
        raise RequestError(f"unknown parameter {name}.{echo(unknown[0])[1:-1]}", param=name, code="unknown_parameter")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in value:
            raise RequestError(f"{name}.{field.name} is missing", param=name, code="missing_required_parameter")
    return kind(**value)


def check_processors(value: Any) -> list[LogitsProcessorParams]:
    """Return names, or objects of name and args, as structs; raise `RequestError` else."""
    name = "logits_processors"
    items = check_list(name, value, MAX_PROCESSORS)
    return [
        LogitsProcessorParams(item) if isinstance(item, str) else as_struct(f"{name}[{i}]", item, LogitsProcessorParams)
        for i, item in enumerate(items)
    ]
