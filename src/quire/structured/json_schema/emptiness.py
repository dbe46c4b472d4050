"""Whether a schema is known to have no instances.

The answer decides which branches of a oneOf exclude each other and which properties cannot be present, and keeps
generation out of parts that could never end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.structured.json_schema import regular
from quire.structured.json_schema.errors import MAX_CLAUSES, MAX_KEY_KINDS, too_complex
from quire.structured.json_schema.expand import Expander, SelfReference
from quire.structured.json_schema.multiples import has_none, listed_values
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.presence import NEVER, Clause, Formula, any_of, assume, clauses, has, names_in
from quire.structured.json_schema.regular import ALL, ANY, EMPTY, Lang
from quire.structured.json_schema.shapes import (
    EVERYTHING,
    NOTHING,
    ArrayShape,
    Demand,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
    fits,
    join,
)


@dataclass(frozen=True)
class FreeNames:
    """Names that a schema does not list.

    Attributes:
        language: the names. demand: on the values of properties with these. kinds: those of the languages that the
            presence formula asks about in which all the names are; they are in none of the others.
    """

    language: Lang
    demand: Demand
    kinds: frozenset[Lang]


@dataclass(frozen=True)
class ObjectPlan:
    """What an `ObjectShape` comes to.

    Attributes:
        names: the properties that have a name of their own and can be there, and what is demanded of their values.
        free: the other names.
        clauses: the object is as one of them says: names that must, and must not be there.
    """

    names: dict[str, Demand]
    free: list[FreeNames]
    clauses: list[Clause]


def string_language(shape: StringShape) -> Lang:
    """Return the strings of a shape."""
    if shape.values is not None:
        return regular.alt(*(regular.text(value) for value in sorted(shape.values)))
    lengths = [regular.rep(ANY, shape.least, shape.most)] if shape.least or shape.most is not None else []
    return regular.both(*sorted(shape.languages, key=str), *lengths)


def _some_number(shape: NumberShape) -> bool:
    """Return whether one of the numbers that are tried first is in the shape."""
    ends = [bound[0] for bound in (shape.low, shape.high) if bound is not None] or [0]
    tries = [end + more for end in ends if abs(end) < 1e15 for more in (0, 1, -1, 0.5, -0.5, 0.25)]
    return shape.values is not None or any(fits(shape, value) for value in tries)


class Emptiness:
    """Answers for the nodes of one document, each found out once."""

    def __init__(self, expander: Expander) -> None:
        self.expander = expander
        self._demands: dict[Demand, bool] = {}
        self._languages: dict[Lang, bool] = {}
        self._plans: dict[ObjectShape, ObjectPlan] = {}
        self._asked: set[Demand] = set()
        self._guesses = 0
        expander.is_empty = self.of_shape

    def of_demand(self, demand: Demand) -> bool:
        """Return whether it is known that no value fulfils `demand`."""
        if demand in (EVERYTHING, NOTHING):
            return demand == NOTHING
        known = self._demands.get(demand)
        if known is not None:
            return known
        if demand in self._asked:
            # Parts that contain it take it to have instances. What follows from that is not kept.
            self._guesses += 1
            return False
        self._asked.add(demand)
        guesses = self._guesses
        try:
            form = self.expander.form(demand)
            where = self.expander.document.nodes[min(demand)[0]].pointer
            result = all(self.of_shape(shape, where) for shapes in form.values() for shape in shapes)
        except SelfReference:
            self._guesses += 1
            return False
        finally:
            self._asked.discard(demand)
        if guesses == self._guesses or not self._asked:
            self._demands[demand] = result
        return result

    def of_language(self, language: Lang, pointer: str) -> bool:
        """Return whether it is known that the language has no texts."""
        if language not in self._languages:
            budget = self.expander.budget
            self._languages[language] = regular.is_empty(language, lambda parts: budget.spend(1 + parts // 25, pointer))
        return self._languages[language]

    def of_shape(self, shape: Shape, pointer: str) -> bool:
        """Return whether it is known that the shape has no values."""
        self.expander.budget.spend(1, pointer)
        if isinstance(shape, NumberShape):
            listed = listed_values(shape)
            if listed is not None:
                return not listed
            if has_none(shape):
                return True
            return not _some_number(shape) and self.of_language(number_language(shape), pointer)
        if isinstance(shape, StringShape):
            return shape.values is None and bool(shape.languages) and self.of_language(string_language(shape), pointer)
        if isinstance(shape, ArrayShape):
            return self._array(shape)
        return isinstance(shape, ObjectShape) and not self.plan(shape, pointer).clauses

    def _array(self, shape: ArrayShape) -> bool:
        most = self.longest(shape)
        if most is not None and most < shape.least:
            return True
        for demand, least, high in shape.contains:
            if (high is not None and high < least) or (most is not None and most < least):
                return True
            if least and self.of_demand(demand):
                return True
            if least and all(positions.prefix == () for positions in shape.positions):
                every = join(demand, *(positions.rest for positions in shape.positions))
                if self.of_demand(every):
                    return True
        return False

    def longest(self, shape: ArrayShape) -> int | None:
        """Return how many elements an array may have at most; None if there is no limit."""
        length = max((len(positions.prefix) for positions in shape.positions), default=0)
        for index in range(length + 1):
            if shape.most is not None and index >= shape.most:
                break
            if self.of_demand(self.element(shape, index)):
                return index
        return shape.most

    def element(self, shape: ArrayShape, index: int) -> Demand:
        """Return the demand on the element at `index`."""
        return join(*(positions.at(index) for positions in shape.positions))

    def plan(self, shape: ObjectShape, pointer: str) -> ObjectPlan:
        """Return what an object shape comes to; no clauses: it has no objects."""
        known = self._plans.get(shape)
        if known is None:
            guesses = self._guesses
            known = self._make_plan(shape, pointer)
            if guesses == self._guesses or not self._asked:
                self._plans[shape] = known
        return known

    def _make_plan(self, shape: ObjectShape, pointer: str) -> ObjectPlan:
        allowed = self._names(shape.names)
        asked = names_in(shape.presence)
        kinds = {name: self._kind(name) for name in asked if isinstance(name, tuple)}
        wanted = dict.fromkeys(name for keys in shape.keys for name, _ in keys.names)
        wanted |= {name: None for name in asked if name not in kinds}
        self.expander.budget.spend(len(wanted) * max(len(shape.keys), 1), pointer)
        names: dict[str, Demand] = {}
        for name in wanted:
            demand = join(*(keys.at(name) for keys in shape.keys))
            if regular.matches(allowed, name) and not self.of_demand(demand):
                names[name] = demand
        free = self._free(shape, allowed, list(wanted), set(kinds.values()), pointer)
        known: dict[Any, Formula] = {name: NEVER for name in wanted if name not in names}
        for kind, language in kinds.items():
            ways = [has(name) for name in names if regular.matches(language, name)]
            if any(language in part.kinds for part in free):
                ways.append(has(("language", language)))
            if kind[0] != "value":
                known[kind] = any_of(ways)
            elif not ways:
                known[kind] = NEVER
        found = clauses(assume(shape.presence, known), MAX_CLAUSES)
        if found is None:
            raise too_complex(pointer, "too many combinations of properties that must and must not be there")
        kept = []
        for must, never in found:
            short = not free and len(names) - len(never & names.keys()) < shape.least
            fewest = max(sum(isinstance(name, str) for name in must), min(len(must), 1))
            if not short and (shape.most is None or fewest <= shape.most):
                kept.append((must, never))
        return ObjectPlan(names, free, kept)

    def _kind(self, name: tuple[Any, ...]) -> Lang:
        """Return the names of properties that a formula asks for by ("language", ...) or ("name", ...)."""
        return self._names(name[1]) if name[0] == "name" else name[1]

    def _names(self, demand: Demand) -> Lang:
        if demand == EVERYTHING:
            return ALL
        strings = self.expander.form(demand).get("string", ())
        return regular.alt(*(string_language(part) for part in strings if isinstance(part, StringShape)))

    def _free(
        self, shape: ObjectShape, allowed: Lang, names: list[str], asked: set[Lang], pointer: str
    ) -> list[FreeNames]:
        patterns = dict.fromkeys(language for keys in shape.keys for language, _ in keys.patterns)
        parts: list[tuple[Lang, frozenset[Lang]]] = [(allowed, frozenset())]
        for pattern in [*patterns, *(language for language in asked if language not in patterns)]:
            split: list[tuple[Lang, frozenset[Lang]]] = []
            for language, matched in parts:
                split.append((regular.both(language, pattern), matched | {pattern}))
                split.append((regular.both(language, regular.neg(pattern)), matched))
            self.expander.budget.spend(10 * len(split), pointer)
            parts = [part for part in split if part[0] != EMPTY and not self.of_language(part[0], pointer)]
            if len(parts) > MAX_KEY_KINDS:
                raise too_complex(pointer, "patterns of property names overlap in too many ways")
        groups: dict[tuple[Demand, frozenset[Lang]], list[Lang]] = {}
        for language, matched in parts:
            demands = []
            for keys in shape.keys:
                mine = [demand for pattern, demand in keys.patterns if pattern in matched]
                demands.append(join(*mine) if mine else keys.rest)
            demand = join(*demands)
            if not self.of_demand(demand):
                groups.setdefault((demand, matched & asked), []).append(language)
        known = regular.neg(regular.alt(*(regular.text(name) for name in names))) if names else ALL
        result = []
        for (demand, kinds), languages in groups.items():
            whole = allowed if len(languages) == len(parts) else regular.alt(*languages)
            rest = regular.both(whole, known)
            if whole == ALL or not self.of_language(rest, pointer):
                result.append(FreeNames(rest, demand, kinds))
        return result
