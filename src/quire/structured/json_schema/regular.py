"""Regular languages over code points as immutable trees: constructors, derivatives, emptiness, membership.

A language is a tuple: ("cls", ranges), ("cat", parts), ("alt", parts), ("and", parts), ("not", part) or
("rep", part, least, most). Derivatives are Brzozowski's (Derivatives of Regular Expressions, 1964). Surrogates are no
code points here. Reading patterns is in `ecma`; writing terminals in `spelling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

Lang = tuple[Any, ...]
Ranges = tuple[tuple[int, int], ...]

EVERY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return `pairs` sorted and merged, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    kept = []
    for low, high in merged:
        kept += [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    return tuple((low, high) for low, high in kept if low <= high)


def complement(ranges: Ranges) -> Ranges:
    """Return the code points that are not in `ranges`."""
    result, start = [], 0
    for low, high in ranges:
        if low > start:
            result.append((start, low - 1))
        start = high + 1
    if start <= 0x10FFFF:
        result.append((start, 0x10FFFF))
    return ranges_of(result)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the code points in both."""
    return complement(ranges_of([*complement(one), *complement(other)]))


def cls(ranges: Ranges) -> Lang:
    """Return the language of the single characters in `ranges`."""
    return ("cls", ranges) if ranges else EMPTY


def cat(*parts: Lang) -> Lang:
    """Return the concatenation of `parts`."""
    flat: list[Lang] = []
    for part in parts:
        if part == EMPTY:
            return EMPTY
        flat.extend(part[1] if part[0] == "cat" else (part,))
    return flat[0] if len(flat) == 1 else ("cat", tuple(flat))


def alt(*parts: Lang) -> Lang:
    """Return the union of `parts`."""
    flat: dict[Lang, None] = {}
    for part in parts:
        if part == ALL:
            return ALL
        flat.update(dict.fromkeys(part[1] if part[0] == "alt" else (part,)))
    classes = [part for part in flat if part[0] == "cls"]
    if len(classes) > 1:
        joined = cls(ranges_of(pair for part in classes for pair in part[1]))
        flat = dict.fromkeys([joined, *(part for part in flat if part[0] != "cls")])
    return next(iter(flat)) if len(flat) == 1 else ("alt", tuple(flat))


def both(*parts: Lang) -> Lang:
    """Return the intersection of `parts`."""
    flat: dict[Lang, None] = {}
    for part in parts:
        if part == EMPTY:
            return EMPTY
        flat.update(dict.fromkeys(part[1] if part[0] == "and" else (part,)))
    flat.pop(ALL, None)
    if not flat:
        return ALL
    return next(iter(flat)) if len(flat) == 1 else ("and", tuple(flat))


def neg(part: Lang) -> Lang:
    """Return the complement of `part`."""
    if part == EMPTY:
        return ALL
    if part == ALL:
        return EMPTY
    return part[1] if part[0] == "not" else ("not", part)


def rep(part: Lang, least: int, most: int | None) -> Lang:
    """Return `least` to `most` (None: any number of) times `part`."""
    if most == 0 or part == EPSILON:
        return EPSILON
    if part == EMPTY:
        return EPSILON if least == 0 else EMPTY
    if least == most == 1:
        return part
    if part[0] == "rep" and least == 0 and most is None and part[2] <= 1 and part[3] is None:
        return ("rep", part[1], 0, None)
    return ("rep", part, least, most)


EMPTY: Lang = ("alt", ())
EPSILON: Lang = ("cat", ())
ANY: Lang = ("cls", EVERY)
ALL: Lang = ("rep", ANY, 0, None)


def text(value: str) -> Lang:
    """Return the language of exactly `value`."""
    return cat(*(("cls", ((ord(char), ord(char)),)) for char in value))


def chars(allowed: str) -> Lang:
    """Return the language of the single characters of `allowed`."""
    return cls(ranges_of((ord(char), ord(char)) for char in allowed))


@lru_cache(maxsize=1 << 14)
def nullable(lang: Lang) -> bool:
    """Return whether `lang` has the empty text."""
    kind = lang[0]
    if kind in ("cat", "and"):
        return all(nullable(part) for part in lang[1])
    if kind == "alt":
        return any(nullable(part) for part in lang[1])
    if kind == "not":
        return not nullable(lang[1])
    return kind == "rep" and (lang[2] == 0 or nullable(lang[1]))


def derive(lang: Lang, point: int) -> Lang:
    """Return the language of what may follow the code point `point`."""
    kind = lang[0]
    if kind == "cls":
        return EPSILON if any(low <= point <= high for low, high in lang[1]) else EMPTY
    if kind == "cat":
        if not lang[1]:
            return EMPTY
        found = []
        for index, part in enumerate(lang[1]):
            found.append(cat(derive(part, point), *lang[1][index + 1 :]))
            if not nullable(part):
                break
        return alt(*found)
    if kind == "alt":
        return alt(*(derive(part, point) for part in lang[1]))
    if kind == "and":
        return both(*(derive(part, point) for part in lang[1]))
    if kind == "not":
        return neg(derive(lang[1], point))
    _, part, least, most = lang
    return cat(derive(part, point), rep(part, max(least - 1, 0), None if most is None else most - 1))


def first_cuts(lang: Lang, cuts: set[int]) -> None:
    """Put into `cuts` where the classes of possible first characters begin (or the next one does)."""
    kind = lang[0]
    if kind == "cls":
        for low, high in lang[1]:
            cuts.update((low, high + 1))
    elif kind == "cat":
        for part in lang[1]:
            first_cuts(part, cuts)
            if not nullable(part):
                return
    elif kind in ("alt", "and"):
        for part in lang[1]:
            first_cuts(part, cuts)
    else:
        first_cuts(lang[1], cuts)


def representatives(lang: Lang) -> list[int]:
    """Return one code point of every class of characters that `lang` may tell apart at the beginning."""
    cuts = {0, 0xE000}
    first_cuts(lang, cuts)
    return [point for point in sorted(cuts) if point <= 0x10FFFF and not 0xD800 <= point < 0xE000]


class TooLargeError(Exception):
    """A derivative has become so large that going on would take too long."""


def weight(lang: Lang, most: int) -> int:
    """Return how many parts `lang` has, or some number above `most` if there are more."""
    count, todo = 0, [lang]
    while todo and count <= most:
        part = todo.pop()
        count += 1
        if part[0] in ("cat", "alt", "and"):
            todo.extend(part[1])
        elif part[0] != "cls":
            todo.append(part[1])
    return count


def matches(lang: Lang, value: str) -> bool:
    """Return whether `value` is in `lang`; raises `TooLargeError`."""
    left = _MAX_WORK
    for char in value:
        if lang in (EMPTY, ALL):
            break
        left -= weight(lang, left)
        if left < 0:
            raise TooLargeError
        lang = derive(lang, ord(char))
    return nullable(lang)


_MAX_WORK = 300_000


def is_empty(lang: Lang, spend: Callable[[int], None], most: int = 60_000) -> bool:
    """Return whether `lang` is known to have no text; False, too, if that is unknown after work on `most` parts.

    `spend` is called with the number of parts of every derivative.
    """
    heaviest = max(600, 2 * weight(lang, most))
    seen, stack = {lang}, [lang]
    while stack:
        here = stack.pop()
        if nullable(here):
            return False
        heavy = weight(here, heaviest)
        if heavy > heaviest:
            return False
        for point in representatives(here):
            most -= heavy
            spend(heavy)
            if most < 0:
                return False
            after = derive(here, point)
            if after != EMPTY and after not in seen:
                seen.add(after)
                stack.append(after)
    return True
