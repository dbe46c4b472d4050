"""`SchemaError`, the only error raised for a schema; the limits on a schema's size; the budget of compiler steps."""

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
    """Return the error for something beyond the limits below."""
    return SchemaError(pointer, message, code="grammar_too_complex")


def step(pointer: str, *keys: str | int) -> str:
    """Return the pointer to a part of the part at `pointer`."""
    return "/".join([pointer, *(str(key).replace("~", "~0").replace("/", "~1") for key in keys)])


MAX_SCHEMA_CHARS = 1 << 17
MAX_DEPTH = 64
MAX_PROPERTIES = 2000
MAX_ENUM = 1000
MAX_MIN = 2000
MAX_ITEMS = 10_000
MAX_BOUND = 1e128  # its digits are written out, each with those that may follow
MAX_LENGTH = 1 << 20
MAX_PATTERN_CHARS = 4096
MAX_REPEATS = 10_000
MAX_STEPS = 60_000
MAX_ALTERNATIVES = 128
MAX_CLAUSES = 64
MAX_VARIANTS = 32
MAX_CONTAINS_STATES = 200
MAX_LISTED = 2000
MAX_KEY_KINDS = 64


class Budget:
    """Counts the compiler's steps; raises `SchemaError` (grammar_too_complex) when there were too many."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left = steps

    def spend(self, steps: int, pointer: str) -> None:
        """Subtract `steps`; `pointer` is the part of the schema that they were for."""
        self.left -= steps
        if self.left < 0:
            raise too_complex(pointer, "its parts combine in too many ways")
