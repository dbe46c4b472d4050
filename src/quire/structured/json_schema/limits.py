"""How large a schema may be, and the counter that stops the compiler where combinations multiply."""

from __future__ import annotations

from quire.structured.json_schema.errors import too_complex

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
        """Take `steps` off; `pointer` is where in the schema they were needed."""
        self.left -= steps
        if self.left < 0:
            raise too_complex(pointer, "its parts combine in too many ways")
