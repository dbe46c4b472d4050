"""Every exception a user of Quire can meet, and what each means over HTTP and on the command line.

    QuireError                  something went wrong inside                500  exit 1
      ConfigError               a bad option, flag, or YAML key            400  exit 2
        AddressInUseError       the address is taken                       400  exit 98
      ModelError                a bad model folder, file, or tensor        500  exit 2
      RequestError              the caller's fault; names the field        400  exit 2
        ContextLengthError      prompt (+ max_tokens) does not fit         400
        UnsupportedError        a known field this engine cannot honour    400
        NotFoundError           no such model, route, or object            404
        ConflictError           not as long as something else goes on      409
      GenerationError           the engine gave up one request             500  exit 1
      OverloadedError           queues are full; try again later           503
      EngineAsleepError         the engine was put to sleep                503
      EngineDeadError           the engine process is gone                 503  exit 70

Status codes and exit codes stand here and nowhere else, and so does the form in which an error crosses a process
boundary (`ErrorData`). Rendering to JSON lives in `server.errors`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

MAX_ECHO = 200


def echo(value: Any) -> str:
    """Return `value` as it may be repeated in an error message: at most 200 characters, control characters escaped.

    JSON data is spelled as in JSON, also where it came from Python, so that an error reads the same everywhere; but a
    text by itself stands in single quotes, as names do.
    """
    if isinstance(value, list | tuple | dict | set) and len(value) > 20:
        return f"{kind_of(value)} of {len(value)} items"
    if isinstance(value, str | bytes):
        return _cut(repr(value[: MAX_ECHO + 1]))
    if isinstance(value, int) and value.bit_length() >= 512:
        return "a very large integer"
    if value is None or isinstance(value, bool | list | tuple | dict):
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # it holds other objects
            text = repr(value)
        return _cut("".join([char if char.isprintable() else escaped(char) for char in text[: MAX_ECHO + 1]]))
    return _cut(repr(value))


def escaped(char: str) -> str:
    """Return a character as JSON may have it in a text, in ASCII."""
    return json.dumps(char)[1:-1]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ECHO else text[:MAX_ECHO] + "..."


def kind_of(value: Any) -> str:
    """Return what a value of JSON is, in JSON's words; of other types, the name."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", int: "a number", float: "a number", list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def listed(texts: Iterable[str], most: int = 20) -> str:
    """Join texts for an error message, the first `most` of them only."""
    found = list(texts)
    text = ", ".join(found[:most])
    return text if len(found) <= most else f"{text} and {len(found) - most} more"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters, or the name of its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


class QuireError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        message: one sentence for a human.
        param: the option or request field at fault, in the spelling the user wrote, or None.
        code: a stable machine-readable word, as in OpenAI's error objects.
    """

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    error_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class ConfigError(QuireError, ValueError):
    """An option has a bad value, is unknown, or contradicts another one."""

    http_status = 400
    exit_code = 2
    error_type = "invalid_request_error"
    default_code = "invalid_config"


class AddressInUseError(ConfigError):
    """Another process listens on the address; starting again later may succeed."""

    exit_code = 98
    default_code = "address_in_use"


class ModelError(QuireError, ValueError):
    """A model folder cannot be served: the message names the file and, where it applies, the tensor or field."""

    exit_code = 2
    default_code = "invalid_model"


class RequestError(QuireError, ValueError):
    """One request is malformed; the engine goes on serving everyone else."""

    http_status = 400
    exit_code = 2
    error_type = "invalid_request_error"
    default_code = "invalid_value"


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested tokens, exceeds the context length."""

    default_code = "context_length_exceeded"


class UnsupportedError(RequestError):
    """A field or value that exists elsewhere but that this engine or model cannot honour."""

    default_code = "unsupported_parameter"


class NotFoundError(RequestError):
    """The named model, route, or object does not exist."""

    http_status = 404
    default_code = "model_not_found"


class ConflictError(RequestError):
    """The named object is being used; once that has ended, the same request may be served."""

    http_status = 409
    default_code = "conflict"


class GenerationError(QuireError):
    """The engine could not go on with one request, such as for logits that are not finite; the message says why."""


class OverloadedError(QuireError):
    """The waiting queue is full. `retry_after` is the suggested wait in seconds."""

    http_status = 503
    default_code = "engine_overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineAsleepError(QuireError):
    """The engine has freed its memory and serves nothing until it is woken up."""

    http_status = 503
    default_code = "engine_asleep"


class EngineDeadError(QuireError):
    """The engine process ended or its loop failed.

    `suspects` are the ids of the requests that it was working on at that moment, as far as that is known.
    """

    http_status = 503
    exit_code = 70  # EX_SOFTWARE of sysexits.h
    default_code = "engine_unavailable"

    def __init__(self, message: str, *, suspects: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


@dataclass(frozen=True, slots=True)
class ErrorData:
    """A `QuireError` as it is sent between processes.

    Attributes:
        error_class: the name of a class of this module. message, param, code: as in `QuireError`.
    """

    error_class: str
    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: QuireError) -> ErrorData:
        """Return the data of an error. A class that is defined elsewhere is replaced by its nearest base here."""
        name = next(base.__name__ for base in type(error).__mro__ if base.__module__ == __name__)
        return cls(name, error.message, error.param, error.code)

    @property
    def kind(self) -> type[QuireError]:
        """The class of the error; `QuireError` for one that this module does not define."""
        found = globals().get(self.error_class)
        return found if isinstance(found, type) and issubclass(found, QuireError) else QuireError

    @property
    def refused(self) -> bool:
        """Whether the engine did not fail: it can never serve the request, or is asleep."""
        return issubclass(self.kind, RequestError | EngineAsleepError)

    def exception(self) -> QuireError:
        """Return the error, of the same class, to be raised."""
        error = self.kind(self.message)
        error.param, error.code = self.param, self.code or error.code
        return error


E = TypeVar("E", bound=QuireError)


def rename_field(error: E, name: str, new_name: str) -> E:
    """Return the error with `new_name` as its param, and in the place of the first field `name` of its message."""
    message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", lambda found: new_name, error.message, count=1)
    error.message, error.args, error.param = message, (message,), new_name
    return error
