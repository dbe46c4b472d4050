"""Numbers that are multiples: an automaton that reads digits and keeps the remainder, as rules of single characters."""

from __future__ import annotations

from fractions import Fraction

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.errors import too_complex, unsupported
from quire.structured.json_schema.regular import Lang
from quire.structured.json_schema.shapes import exact


def rule(builder: GrammarBuilder, language: Lang, multiples: frozenset[int | float], pointer: str) -> str:
    """Return the rule of the numbers of `language` that are multiples of all of `multiples`."""
    raise unsupported(f"{pointer}/multipleOf", "not yet")


__all__ = ["Fraction", "exact", "rule", "too_complex"]
