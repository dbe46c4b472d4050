"""The way in: `add_schema`, `add_any_json` and `add_json_object` write rules into a `GrammarBuilder`."""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.document import Document
from quire.structured.json_schema.emit import Emitter, JsonOptions
from quire.structured.json_schema.errors import Budget, SchemaError, too_complex
from quire.structured.json_schema.expand import Expander
from quire.structured.json_schema.regular import TooLargeError
from quire.structured.json_schema.shapes import EVERYTHING, one

DEFAULT = JsonOptions()


def add_schema(builder: GrammarBuilder, schema: dict[str, Any] | bool, *, options: JsonOptions = DEFAULT) -> str:
    """Add rules for the instances of `schema`.

    Returns:
        The name of a rule that matches one JSON value, without blanks before or behind it.

    Raises:
        SchemaError: code invalid_json_schema, unsupported_json_schema or grammar_too_complex; `pointer` and the
            message say where.
    """
    document = Document(schema)
    emitter = Emitter(builder, Expander(document, Budget()), options)
    try:
        return emitter.value(one(document.root))
    except TooLargeError:
        raise too_complex("#", "its patterns take too many states") from None
    except RecursionError:
        raise too_complex("#", "its parts refer to one another through too many levels") from None
    except SchemaError:
        raise
    except RequestError as error:
        raise too_complex("#", error.message) from None


def add_any_json(builder: GrammarBuilder, options: JsonOptions = DEFAULT) -> str:
    """Add rules for any JSON value, and return the name of the first."""
    return Emitter(builder, Expander(Document(True), Budget()), options).value(EVERYTHING)


def add_json_object(builder: GrammarBuilder, options: JsonOptions = DEFAULT) -> str:
    """Add rules for any JSON object, and return the name of the first."""
    emitter = Emitter(builder, Expander(Document(True), Budget()), options)
    return builder.rule(emitter.any_object(), "object")


__all__ = ["JsonOptions", "SchemaError", "add_any_json", "add_json_object", "add_schema"]
