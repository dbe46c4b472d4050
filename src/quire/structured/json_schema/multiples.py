"""Numbers that are multiples of others, or are not, as rules.

Whole multiples of whole numbers are left to llguidance, whose regexes know remainders. The rest is an automaton that
reads digits and keeps the remainder, as rules of single characters.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema import regular
from quire.structured.json_schema.errors import too_complex, unsupported
from quire.structured.json_schema.numbers import next_whole, number_language
from quire.structured.json_schema.regular import EMPTY, Lang, both, cat, chars, derive, rep, text
from quire.structured.json_schema.shapes import NumberShape, exact
from quire.structured.json_schema.spelling import terminal

MAX_MODULUS = 100_000
MAX_STATES = 4000
_SAFE = 10**15
_D = chars("0123456789")
_SIGN = rep(text("-"), 0, 1)


def choices(builder: GrammarBuilder, shape: NumberShape, *, whole_as_floats: bool, pointer: str) -> list[str]:
    """Return rules whose union is the numbers of `shape`, which has `multiples`."""
    where = f"{pointer}/multipleOf"
    sizes = [exact(value) for value, _ in shape.multiples]
    whole = all(size.denominator == 1 for size in sizes)
    plain = whole and not shape.excluded and all(wanted for _, wanted in shape.multiples)
    if any(size.numerator > MAX_MODULUS for size in sizes):
        raise too_complex(where, f"more than {MAX_MODULUS}")
    if plain:
        return _by_remainder(builder, shape, math.lcm(*(size.numerator for size in sizes)), whole_as_floats, where)
    found = []
    if whole and shape.whole is not True and not any(wanted for _, wanted in shape.multiples):
        broken = number_language(replace(shape, whole=False, multiples=frozenset()))
        found.append(builder.terminal(terminal(broken, spelled=False), "number"))
        if shape.whole is False:
            return found
    elif whole:
        shape = replace(shape, whole=True)
    return [*found, _Automaton(builder, shape, where, whole_as_floats).rule()]


def has_none(shape: NumberShape) -> bool:
    """Tell whether it is plain that no multiple lies between the bounds of `shape`."""
    wanted = [exact(value) for value, wanted in shape.multiples if wanted]
    if not wanted or (shape.whole is False and all(size.denominator == 1 for size in wanted)):
        return bool(wanted)
    if shape.low is None or shape.high is None:
        return False
    size = max(wanted)
    first = math.ceil(exact(shape.low[0]) / size) * size
    if shape.low[1] and first == exact(shape.low[0]):
        first += size
    return first > exact(shape.high[0]) or (shape.high[1] and first == exact(shape.high[0]))


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


class _Automaton:
    """States are (language of the rest, remainder, digits behind the point); None for no point yet."""

    def __init__(self, builder: GrammarBuilder, shape: NumberShape, where: str, whole_as_floats: bool) -> None:
        self.builder, self.where = builder, where
        places = max(exact(value).denominator.bit_length() - 1 for value, _ in shape.multiples)
        self.places = places
        self.sizes = [(int(exact(value) * 10**places), wanted) for value, wanted in shape.multiples]
        self.modulus = math.lcm(*(size for size, _ in self.sizes))
        if self.modulus > MAX_STATES // 8:
            raise too_complex(where, "remainders of so large a number")
        floats = cat(_SIGN, rep(_D, 1, 15), text("."), rep(_D, 0, places), rep(text("0"), 0, None))
        forms = cat(_SIGN, rep(_D, 1, None))
        if whole_as_floats:
            forms = regular.alt(forms, both(floats, cat(_SIGN, rep(_D, 1, None), text("."), rep(_D, 1, None))))
        language = number_language(replace(shape, multiples=frozenset()), whole_as_floats=whole_as_floats)
        self.start = both(_unbounded(language), forms)
        self._derived: dict[tuple[Lang, str], Lang] = {}

    def rule(self) -> str:
        """Write the rules and return the first."""
        start = (self.start, 0, None)
        states: dict[tuple[Lang, int, int | None], dict[str, tuple[Lang, int, int | None]]] = {}
        todo: list[tuple[Lang, int, int | None]] = [start]
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
            parts = [f"/[{''.join(sorted(set(found) - {'-'}))}{'-' if '-' in found else ''}]/ {target}"
                     for target, found in targets.items()]  # fmt: skip
            self.builder.define(name, " | ".join([*parts, '""'] if self._accepts(state) else parts))
        return names[start]

    def _steps(self, state: tuple[Lang, int, int | None]) -> dict[str, tuple[Lang, int, int | None]]:
        language, remainder, behind = state
        found = {}
        for char in "0123456789.-":
            key = (language, char)
            if key not in self._derived:
                after = derive(language, ord(char))
                self._derived[key] = after
            rest = self._derived[key]
            if rest == EMPTY:
                continue
            if char == ".":
                found[char] = (rest, remainder, 0)
            elif char == "-" or behind == self.places:
                found[char] = (rest, remainder, behind)
            else:
                grown = (remainder * 10 + int(char)) % self.modulus
                found[char] = (rest, grown, None if behind is None else behind + 1)
        return found

    def _accepts(self, state: tuple[Lang, int, int | None]) -> bool:
        language, remainder, behind = state
        value = remainder * 10 ** (self.places - (behind or 0))
        return regular.nullable(language) and all((value % size == 0) == wanted for size, wanted in self.sizes)

    def _alive(
        self, states: dict[tuple[Lang, int, int | None], dict[str, tuple[Lang, int, int | None]]]
    ) -> set[tuple[Lang, int, int | None]]:
        before: dict[tuple[Lang, int, int | None], list[tuple[Lang, int, int | None]]] = {}
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
