"""Which formats are enforced, and as which languages."""

from __future__ import annotations

from typing import Any

from quire.structured.json_schema.errors import unsupported
from quire.structured.json_schema.regular import Lang

KNOWN = frozenset(
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uri-template uuid json-pointer relative-json-pointer regex".split()
)


def format_language(schema: dict[str, Any], pointer: str) -> Lang | None:
    """Return the strings of the schema's format, or None for formats that are only annotations."""
    if schema["format"] in KNOWN:
        raise unsupported(pointer, f"format {schema['format']}")
    return None
