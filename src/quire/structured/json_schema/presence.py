"""Formulas about which properties an object has: made by `required`, `dependentRequired`, `not`, `anyOf` of those.

A formula is ("has", name), ("not", formula), ("and", formulas) or ("or", formulas). Instead of the name of a property
stands ("language", language) or ("name", demand) for any property whose name is in a language, or fulfils a demand, or
("value", language, demand, pointer) for any whose name is in a language and whose value fulfils a demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Formula = tuple[Any, ...]
Name = str | tuple[Any, ...]
Clause = tuple[frozenset[Any], frozenset[Any]]

ALWAYS: Formula = ("and", ())
NEVER: Formula = ("or", ())


def has(name: Name) -> Formula:
    """Return the formula that the property is there."""
    return ("has", name)


def all_of(parts: Iterable[Formula]) -> Formula:
    """Return the conjunction."""
    return _join("and", "or", parts)


def any_of(parts: Iterable[Formula]) -> Formula:
    """Return the disjunction."""
    return _join("or", "and", parts)


def _join(kind: str, other: str, parts: Iterable[Formula]) -> Formula:
    flat: dict[Formula, None] = {}
    for part in parts:
        if part == (other, ()):
            return part
        flat.update(dict.fromkeys(part[1] if part[0] == kind else (part,)))
    return next(iter(flat)) if len(flat) == 1 else (kind, tuple(flat))


def negation(formula: Formula) -> Formula:
    """Return the negation, with "not" only before "has"."""
    kind = formula[0]
    if kind == "has":
        return ("not", formula)
    if kind == "not":
        return formula[1]  # type: ignore[no-any-return]
    parts = (negation(part) for part in formula[1])
    return any_of(parts) if kind == "and" else all_of(parts)


def names_in(formula: Formula) -> dict[Any, None]:
    """Return the names in `formula`, in order."""
    if formula[0] == "has":
        return {formula[1]: None}
    if formula[0] == "not":
        return names_in(formula[1])
    return {name: None for part in formula[1] for name in names_in(part)}


def assume(formula: Formula, known: Mapping[Any, Formula]) -> Formula:
    """Return `formula` with what is known of the presence of some properties put in for them."""
    kind = formula[0]
    if kind == "has":
        return known.get(formula[1], formula)
    if kind == "not":
        return negation(assume(formula[1], known))
    parts = (assume(part, known) for part in formula[1])
    return all_of(parts) if kind == "and" else any_of(parts)


def clauses(formula: Formula, most: int) -> list[Clause] | None:
    """Return `formula` as a disjunction of clauses: names that must, and must not be there. None if over `most`."""
    kind = formula[0]
    if kind == "has":
        return [(frozenset((formula[1],)), frozenset())]
    if kind == "not":
        return [(frozenset(), frozenset((formula[1][1],)))]
    if kind == "or":
        found: dict[Clause, None] = {}
        for part in formula[1]:
            inner = clauses(part, most)
            if inner is None or len(found) + len(inner) > 2 * most:
                return None
            found.update(dict.fromkeys(inner))
        return _prime(found, most)
    result: list[Clause] = [(frozenset(), frozenset())]
    for part in formula[1]:
        inner = clauses(part, most)
        if inner is None or len(inner) * len(result) > 4096:
            return None
        product: dict[Clause, None] = {}
        for must, never in result:
            for more, less in inner:
                if not (must | more) & (never | less):
                    product[must | more, never | less] = None
        reduced = _prime(product, most)
        if reduced is None:
            return None
        result = reduced
    return result


def _prime(found: Iterable[Clause], most: int) -> list[Clause] | None:
    kept: list[Clause] = []
    for must, never in sorted(found, key=lambda clause: len(clause[0]) + len(clause[1])):
        if not any(small <= must and less <= never for small, less in kept):
            kept.append((must, never))
    return kept if len(kept) <= most else None
