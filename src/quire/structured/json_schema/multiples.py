"""Numbers that are multiples of others, or are not, as rules.

Whole multiples of whole numbers are left to llguidance, whose regexes know remainders. Whether a number is a multiple
of 1/n only depends on the digits behind its point, which a regex describes. The rest is an automaton that reads digits
and keeps the remainder, as rules of single characters.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema import regular
from quire.structured.json_schema.errors import MAX_LISTED, too_complex, unsupported
from quire.structured.json_schema.numbers import large_scientific, next_whole, number_language
from quire.structured.json_schema.regular import EMPTY, Lang, both, cat, chars, derive, rep, text
from quire.structured.json_schema.shapes import NumberShape, exact, fits

if TYPE_CHECKING:
    from quire.structured.json_schema.emit import Texts

MAX_MODULUS = 100_000
MAX_STATES = 4000
_SAFE = 10**15
_D = chars("0123456789")
_SIGN = rep(text("-"), 0, 1)
_NATURAL = regular.alt(text("0"), cat(chars("123456789"), rep(_D, 0, None)))
_SHORT = regular.alt(text("0"), cat(chars("123456789"), rep(_D, 0, 14)))  # whole parts whose floats have fractions


def choices(texts: Texts, shape: NumberShape, *, whole_as_floats: bool, pointer: str) -> list[str]:
    """Return rules whose union is the numbers of `shape`, which has `multiples`.

    Args:
        whole_as_floats: whether a whole number may be written as a float, as 1.0, where no integer is asked for.
    """
    where = f"{pointer}/multipleOf"
    if shape.whole:
        whole_as_floats = False
        # A whole multiple of a/b in lowest terms is a multiple of a.
        reduced = frozenset((exact(value).numerator if holds else value, holds) for value, holds in shape.multiples)
        shape = replace(shape, multiples=reduced - {(1, True)})
        if not shape.multiples:
            return [texts.number(number_language(shape))]
    sizes = [exact(value) for value, _ in shape.multiples]
    whole = all(size.denominator == 1 for size in sizes)
    plain = whole and not shape.excluded and all(wanted for _, wanted in shape.multiples)
    if any(size.numerator > MAX_MODULUS for size in sizes):
        raise too_complex(where, f"more than {MAX_MODULUS}")
    if plain:
        return _by_remainder(
            texts.builder, shape, math.lcm(*(size.numerator for size in sizes)), whole_as_floats, where
        )
    found = []
    if whole and shape.whole is not True and not any(wanted for _, wanted in shape.multiples):
        found.append(texts.number(number_language(replace(shape, whole=False, multiples=frozenset()))))
        if shape.whole is False:
            return found
    elif whole:
        shape = replace(shape, whole=True)
    elif whole_as_floats and all(size.numerator == 1 for size in sizes):
        return [texts.number(_unit_fractions(shape, where))]
    return [*found, _Automaton(texts.builder, shape, where, whole_as_floats).rule()]


def listed_values(shape: NumberShape) -> tuple[int, ...] | None:
    """Return the values of a shape with multiples, if they are whole, between bounds, and few; else None."""
    wanted = [exact(value) for value, holds in shape.multiples if holds]
    whole = shape.whole or (wanted and all(size.denominator == 1 for size in wanted))
    if not shape.multiples or not whole or shape.low is None or shape.high is None:
        return None
    # A whole multiple of a/b in lowest terms is a multiple of a.
    size = math.lcm(*(part.numerator for part in wanted)) if wanted else 1
    low, high = next_whole(shape.low, 1), next_whole(shape.high, -1)
    first = -(-low // size) * size
    if abs(low) > _SAFE or abs(high) > _SAFE or (high - first) // size > MAX_LISTED:
        return None
    return tuple(value for value in range(first, high + 1, size) if fits(shape, value))


def has_none(shape: NumberShape) -> bool:
    """Return whether it is known that no multiple lies between the bounds of `shape`."""
    wanted = [exact(value) for value, wanted in shape.multiples if wanted]
    size = math.lcm(*(part.numerator for part in wanted))
    if wanted and any(size % part.numerator == 0 for part in _refused_sizes(shape)):
        return True
    if not wanted or (shape.whole is False and all(size.denominator == 1 for size in wanted)):
        return bool(wanted)
    if shape.low is None or shape.high is None:
        return False
    largest = max(wanted)
    first = math.ceil(exact(shape.low[0]) / largest) * largest
    if shape.low[1] and first == exact(shape.low[0]):
        first += largest
    return first > exact(shape.high[0]) or (shape.high[1] and first == exact(shape.high[0]))


def _refused_sizes(shape: NumberShape) -> list[Fraction]:
    sizes = [exact(value) for value, wanted in shape.multiples if not wanted]
    return [size for size in sizes if size.denominator == 1]


def _by_remainder(
    builder: GrammarBuilder, shape: NumberShape, size: int, whole_as_floats: bool, where: str
) -> list[str]:
    if size > MAX_MODULUS:
        raise too_complex(where, f"the least common multiple is more than {MAX_MODULUS}")
    low = None if shape.low is None else next_whole(shape.low, 1)
    high = None if shape.high is None else next_whole(shape.high, -1)
    if any(bound is not None and abs(bound) > _SAFE for bound in (low, high)):
        raise too_complex(where, f"beside bounds beyond {_SAFE}")
    first = None if low is None else -(-low // size) * size
    if first is not None and high is not None and first > high:
        raise unsupported(where, "there is no multiple between the bounds")
    found = [_whole_multiples(builder, size, low, high)]
    if whole_as_floats:
        least = max(low if low is not None else -_SAFE, -_SAFE)
        most = min(high if high is not None else _SAFE, _SAFE)
        if -(-least // size) * size <= most:
            zeros = builder.terminal(r"/\.0{1,40}/", "zeros")
            found.append(f"{_whole_multiples(builder, size, least, most)} {zeros}")
    return found


def _whole_multiples(builder: GrammarBuilder, size: int, low: int | None, high: int | None) -> str:
    schema = {"type": "integer", "multipleOf": size}
    if low is not None:
        schema["minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return builder.rule(f"%json {json.dumps(schema)}", "multiple")


def _unit_fractions(shape: NumberShape, where: str) -> Lang:
    """Return the numbers of `shape`, whose `multiples` are of 1/n.

    It is one language, as llguidance reads the longest lexeme: rules of single characters beside large numbers in
    scientific notation would not be tried once such a number might have begun.
    """
    places, steps = _in_units(shape)
    modulus = math.lcm(*(step for step, _ in steps))
    if modulus > MAX_STATES // 8:
        raise too_complex(where, "remainders of so large a number")

    def accepts(remainder: int) -> bool:
        return all((remainder % step == 0) == wanted for step, wanted in steps)

    @cache
    def rest(remainder: int, behind: int) -> Lang:
        """Return digits after `behind` ones of a fraction, which are `remainder` units."""
        if behind == places:
            return rep(text("0"), 0, None) if accepts(remainder) else EMPTY
        unit = 10 ** (places - behind - 1)
        targets: dict[Lang, str] = {}
        for digit in _DIGITS:
            after = rest((remainder + int(digit) * unit) % modulus, behind + 1)
            targets[after] = targets.get(after, "") + digit
        found = [cat(chars(digits), after) for after, digits in targets.items() if after != EMPTY]
        return regular.alt(*found, *([text("")] if accepts(remainder) else []))

    forms = cat(_SIGN, _SHORT, text("."), both(rest(0, 0), rep(_D, 1, None)))
    plain = replace(shape, multiples=frozenset())
    numbers = number_language(plain)
    if not accepts(0):  # which whole numbers are no part of
        return both(_unbounded(numbers), forms)
    # Floats from 2**53 on are whole.
    return regular.alt(
        both(_unbounded(numbers), regular.alt(cat(_SIGN, _NATURAL), forms)), both(numbers, large_scientific())
    )


def _in_units(shape: NumberShape) -> tuple[int, list[tuple[int, bool]]]:
    """Return the most digits behind the point of a multiple of `shape`, and its `multiples` in units of the last."""
    places = max(exact(value).denominator.bit_length() - 1 for value, _ in shape.multiples)
    return places, [(int(exact(value) * 10**places), wanted) for value, wanted in shape.multiples]


State = tuple[int, int, int]
_DIGITS = "0123456789"
_BEFORE_POINT = -1


class _Automaton:
    """States are (number of the language of the rest, remainder, digits behind the point; -1 for no point yet)."""

    def __init__(self, builder: GrammarBuilder, shape: NumberShape, where: str, whole_as_floats: bool) -> None:
        self.builder, self.where = builder, where
        self.places, self.sizes = _in_units(shape)
        self.modulus = math.lcm(*(size for size, _ in self.sizes))
        if self.modulus > MAX_STATES // 8:
            raise too_complex(where, "remainders of so large a number")
        forms = cat(_SIGN, _NATURAL)
        if whole_as_floats:
            behind = both(cat(rep(_D, 0, self.places), rep(text("0"), 0, None)), rep(_D, 1, None))
            forms = regular.alt(forms, cat(_SIGN, _SHORT, text("."), behind))
        plain = replace(shape, multiples=frozenset())
        if plain != NumberShape() and (plain != NumberShape(whole=True) or self.places):
            forms = both(_unbounded(number_language(plain)), forms)
        self._languages = [forms]
        self._numbers = {forms: 0}
        self._tables: list[dict[str, int]] = []

    def rule(self) -> str:
        """Write the rules and return the first."""
        start: State = (0, 0, _BEFORE_POINT)
        states: dict[State, dict[str, State]] = {}
        todo = [start]
        while todo:
            state = todo.pop()
            if state in states:
                continue
            if len(states) > MAX_STATES:
                raise too_complex(self.where, "too many remainders and bounds to tell apart")
            states[state] = self._steps(state)
            todo.extend(states[state].values())
        alive = self._alive(states)
        if start not in alive:
            raise unsupported(self.where, "there is no such number")
        names = {state: self.builder.declare("digits") for state in states if state in alive}
        for state, name in names.items():
            targets: dict[str, str] = {}
            for char, after in states[state].items():
                if after in names:
                    targets[names[after]] = targets.get(names[after], "") + char
            # The minus comes last in the class, where it means itself.
            parts = [f"/[{found}]/ {target}" for target, found in targets.items()]
            self.builder.define(name, " | ".join([*parts, '""'] if self._accepts(state) else parts))
        return names[start]

    def _table(self, number: int) -> dict[str, int]:
        """Return the numbers of the languages that are left of a language behind each character."""
        while len(self._tables) <= number:
            language, table = self._languages[len(self._tables)], {}
            for char in (*_DIGITS, ".", "-"):
                after = derive(language, ord(char))
                if after == EMPTY:
                    continue
                if after not in self._numbers:
                    self._numbers[after] = len(self._languages)
                    self._languages.append(after)
                table[char] = self._numbers[after]
            self._tables.append(table)
        return self._tables[number]

    def _steps(self, state: State) -> dict[str, State]:
        number, remainder, behind = state
        found: dict[str, State] = {}
        for char, after in self._table(number).items():
            if char == ".":
                found[char] = (after, remainder, 0)
            elif char == "-" or behind == self.places:
                found[char] = (after, remainder, behind)
            else:
                grown = (remainder * 10 + int(char)) % self.modulus
                found[char] = (after, grown, behind if behind == _BEFORE_POINT else behind + 1)
        return found

    def _accepts(self, state: State) -> bool:
        number, remainder, behind = state
        value = remainder * 10 ** (self.places - max(behind, 0))
        nullable = regular.nullable(self._languages[number])
        return nullable and all((value % size == 0) == wanted for size, wanted in self.sizes)

    def _alive(self, states: dict[State, dict[str, State]]) -> set[State]:
        """Return the states from which some number is reached."""
        before: dict[State, list[State]] = {}
        for state, steps in states.items():
            for after in steps.values():
                before.setdefault(after, []).append(state)
        todo = [state for state in states if self._accepts(state)]
        alive = set(todo)
        while todo:
            for state in before.get(todo.pop(), ()):
                if state not in alive:
                    alive.add(state)
                    todo.append(state)
        return alive


def _unbounded(language: Lang) -> Lang:
    """Return `language` without the limits on the number of digits, which would multiply states."""
    kind = language[0]
    if kind in ("cat", "alt", "and"):
        return (kind, tuple(_unbounded(part) for part in language[1]))
    if kind == "not":
        return ("not", _unbounded(language[1]))
    if kind == "rep" and language[3] is not None and language[3] >= 18:
        return ("rep", _unbounded(language[1]), language[2], None)
    return language
