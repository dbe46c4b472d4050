"""`SchemaError`: what is wrong with a JSON schema, and where. Nothing else is raised for a schema."""

from __future__ import annotations

from quire.errors import RequestError


class SchemaError(RequestError):
    """A schema that cannot be compiled.

    Attributes:
        pointer: the part at fault, as a JSON pointer in a fragment ("#/properties/a/not").
    """

    default_code = "invalid_json_schema"

    def __init__(self, pointer: str, message: str, *, code: str) -> None:
        super().__init__(f"JSON schema, at {pointer[:400]}: {message}", code=code)
        self.pointer = pointer


def invalid(pointer: str, message: str) -> SchemaError:
    """Return the error for something that is no JSON schema."""
    return SchemaError(pointer, message, code="invalid_json_schema")


def unsupported(pointer: str, message: str) -> SchemaError:
    """Return the error for something that a grammar cannot do exactly."""
    return SchemaError(pointer, message, code="unsupported_json_schema")


def too_complex(pointer: str, message: str) -> SchemaError:
    """Return the error for something beyond the limits of `limits`."""
    return SchemaError(pointer, message, code="grammar_too_complex")


def step(pointer: str, *keys: str | int) -> str:
    """Return the pointer to a part of the part at `pointer`."""
    return "/".join([pointer, *(str(key).replace("~", "~0").replace("/", "~1") for key in keys)])
