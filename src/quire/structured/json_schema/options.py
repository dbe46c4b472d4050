"""`JsonOptions`: what callers choose about the JSON that a schema stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JsonOptions:
    """How instances may be written.

    Attributes:
        whitespace: between the parts of JSON: "flexible" (nothing, a blank, or a new line and its indentation; nothing
            before colons and commas), "none", or a regex for one gap, of which only blanks are kept.
        additional_properties: False forbids properties that no schema names, unless the schema says something about
            them. ordered: properties come in the order of the schema, others last.
    """

    whitespace: str = "flexible"
    additional_properties: bool = True
    ordered: bool = False
