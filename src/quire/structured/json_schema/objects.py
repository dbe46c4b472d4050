"""Objects as rules. A parametric rule carries one bit per named property: each occurs at most once, in any order.

Required bits are checked at the end. With `ordered`, a chain of rules needs no bits. Objects of at most two properties
are listed (`few_members`): that is how a `maxProperties` of 1 or 2 is combined with assertions that some property must
satisfy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from quire.structured.json_schema import regular
from quire.structured.json_schema.emit import Emitter
from quire.structured.json_schema.emptiness import FreeNames, ObjectPlan
from quire.structured.json_schema.errors import MAX_VARIANTS, too_complex, unsupported
from quire.structured.json_schema.presence import ALWAYS, Formula, all_of, any_of, assume, has, names_in, negation
from quire.structured.json_schema.shapes import Demand, ObjectShape, join

_BITS = 63
_BITS_BESIDE_COUNTS = 48
_COUNTER = "[48:63]"
_OTHER = 63


def choices(emitter: Emitter, shape: ObjectShape, pointer: str) -> list[str]:
    """Return expressions whose union is the objects of `shape`."""
    plan = emitter.emptiness.plan(shape, pointer)
    free = plan.free
    if not emitter.options.additional_properties and plan.names and not any(keys.explicit for keys in shape.keys):
        free = _named_by_patterns(emitter, shape, plan, pointer)
    least, most = shape.least, shape.most
    free_plan = replace(plan, free=free)
    unconditional = plan.clauses == [(frozenset(), frozenset())]
    if not plan.names and most is None and least <= 1 and unconditional and free:
        return [_plain(emitter, free, least)]
    formula = _formula(plan)
    kinds: list[Any] = [name for name in names_in(formula) if isinstance(name, tuple)]
    if most is not None and (most <= 1 or (most == 2 and kinds)):
        return few_members(emitter, free_plan, shape, pointer) or _nothing(pointer)
    _check_kinds(kinds, most, pointer)
    counted = most is not None or any(least > _fewest(must) for must, _ in plan.clauses)
    shared = bool(kinds) or (len(plan.clauses) > 1 and not emitter.options.ordered)
    if shared and not counted and assume(formula, dict.fromkeys(names_in(formula), ALWAYS)) == ALWAYS:
        return [_AnyOrder(_Members(emitter, plan.names, free, formula, (0, None), pointer)).expression()]
    if len(plan.clauses) > MAX_VARIANTS:
        raise too_complex(pointer, "too many combinations of properties that must and must not be there")
    found = []
    for must, never in plan.clauses:
        names = {name: demand for name, demand in plan.names.items() if name not in never}
        if not free and len(names) < least:
            continue
        demand = all_of(has(name) for name in [*names, *kinds] if name in must)
        counts = (least if least > _fewest(must) else 0, most)
        members = _Members(emitter, names, free, demand, counts, pointer)
        writer = _InOrder(members) if emitter.options.ordered and not kinds else _AnyOrder(members)
        found.append(writer.expression())
    return found or _nothing(pointer)


def _nothing(pointer: str) -> list[str]:
    raise unsupported(pointer, "it has no instances without additional properties")


def _fewest(must: frozenset[Any]) -> int:
    """Return how many properties there are at least where all of `must` are: kinds may be of one property."""
    named = sum(isinstance(name, str) for name in must)
    return named + (len(must) > named)


def _check_kinds(kinds: list[Any], most: int | None, pointer: str) -> None:
    for kind in kinds:
        if kind[0] == "value":
            raise unsupported(kind[3], "its negation, as names may repeat")
    if kinds and most is not None:
        raise unsupported(f"{pointer}/maxProperties", "beside a name that must not be of some form")


def _formula(plan: ObjectPlan) -> Formula:
    return any_of(
        all_of(
            [
                *(has(name) for name in sorted(must, key=str)),
                *(negation(has(name)) for name in sorted(never & plan.names.keys())),
            ]
        )
        for must, never in plan.clauses
    )


def _named_by_patterns(emitter: Emitter, shape: ObjectShape, plan: ObjectPlan, pointer: str) -> list[FreeNames]:
    patterns = [language for keys in shape.keys for language, _ in keys.patterns]
    if not patterns:
        return []
    kept = [replace(part, language=regular.both(part.language, regular.alt(*patterns))) for part in plan.free]
    return [part for part in kept if not emitter.emptiness.of_language(part.language, pointer)]


def _plain(emitter: Emitter, free: list[FreeNames], least: int) -> str:
    texts = emitter.texts
    member = _union([f"{texts.name(part.language)} {emitter.value(part.demand)}" for part in free])
    inner = f"{member} ({texts.comma} {member})*"
    return f"{texts.open_object} {inner if least else f'({inner})?'} {texts.close_object}"


def _union(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "(" + " | ".join(parts) + ")"


def _fold(operator: str, conditions: Sequence[str]) -> str:
    """Join conditions by "and" or "or", which take two each."""
    return reduce(lambda first, second: f"{operator}({first}, {second})", conditions)


def condition(formula: Formula, bits: Mapping[Any, int]) -> str:
    """Return `formula` as a condition on the bits of its names."""
    kind = formula[0]
    if kind == "has":
        return f"bit_set({bits[formula[1]]})"
    if kind == "not":
        return f"bit_clear({bits[formula[1][1]]})"
    if not formula[1]:
        return "true" if kind == "and" else "not(true)"
    return _fold(kind, [condition(part, bits) for part in formula[1]])


def _if(*conditions: str) -> str:
    given = [part for part in conditions if part and part != "true"]
    return f" %if {_fold('and', given)}" if given else ""


@dataclass
class _Counting:
    """How the properties beyond those that must be there are counted: at least `least` and at most `most` of them.

    `how` is "bits" (by those that are set), "counter" or "other" (one bit: is there any?); "" if they are not.
    """

    how: str
    least: int
    most: int | None
    must: int
    names: int

    @property
    def enough(self) -> str:
        if self.how == "bits" and self.least:
            return f"bit_count_ge([{self.must}:{self.names}], {self.least})"
        if self.how == "counter" and self.least:
            return f"ge({_COUNTER}, {self.least})"
        return f"bit_set({_OTHER})" if self.how == "other" else ""

    @property
    def room(self) -> str:
        if self.most is None or not self.how:
            return ""
        if self.how == "bits":
            return f"bit_count_lt([{self.must}:{self.names}], {self.most})"
        return f"lt({_COUNTER}, {self.most})"


class _Members:
    """The members of objects in any order or in that of the schema: which must be there, and how one is written.

    Args:
        names: properties with a name of their own, and the demands on their values. free: the other names.
        formula: which of them must be there. counts: least and most number of members.

    Attributes:
        simple: whether the formula only lists names that `must` be there. least, most: numbers of further members.
    """

    def __init__(
        self,
        emitter: Emitter,
        names: dict[str, Demand],
        free: list[FreeNames],
        formula: Formula,
        counts: tuple[int, int | None],
        pointer: str,
    ) -> None:
        self.emitter, self.texts, self.builder = emitter, emitter.texts, emitter.builder
        self.names, self.free, self.formula, self.pointer = names, free, formula, pointer
        flat = formula[1] if formula[0] == "and" else (formula,)
        self.simple = all(part[0] == "has" for part in flat)
        self.must = [part[1] for part in flat if part[0] == "has"] if self.simple else []
        least, most = counts
        self.least = max(least - len(self.must), 0)
        self.most = None if most is None else most - len(self.must)

    def named(self, name: str) -> tuple[str, str]:
        """Return the terminal of the name of a property, and the rule of its values."""
        return self.texts.name(regular.text(name)), self.emitter.value(self.names[name])

    def unnamed(self) -> list[tuple[str, str]]:
        """Return the same for the names that are not listed."""
        return [(self.texts.name(part.language), self.emitter.value(part.demand)) for part in self.free]

    def counting(self, closed: bool) -> str:
        """Return how to count; `closed`: every name has a bit, and there are no others."""
        if not self.least and self.most is None:
            return ""
        if closed:
            return "bits"
        if self.least > 1:
            # A name that is written twice is one property, so counting what is written proves no more than one.
            raise unsupported(f"{self.pointer}/minProperties", "more properties than are named; names may repeat")
        return "counter" if self.most is not None else "other"


class _AnyOrder:
    """Writes the rules of members in any order. A parametric rule has a bit for each name that the formula is about,
    and for as many others as there is room for.
    """

    def __init__(self, members: _Members) -> None:
        self.members, self.texts, self.builder = members, members.texts, members.builder
        tested = members.must if members.simple else list(names_in(members.formula))
        room = _BITS if not members.least and members.most is None else _BITS_BESIDE_COUNTS
        if len(tested) > room:
            raise too_complex(members.pointer, f"more than {room} properties that must be there or depend on others")
        others = [name for name in members.names if name not in set(tested)]
        self.bits: dict[Any, int] = {name: index for index, name in enumerate([*tested, *others][:room])}
        # Whether every name has a bit, and there are no others.
        self.closed = not members.free and all(name in self.bits for name in members.names)
        how = members.counting(self.closed)
        self.count = _Counting(how, members.least, members.most, len(members.must), len(self.bits))

    def expression(self) -> str:
        """Return the expression of the objects."""
        members, declare = self.members, self.builder.declare
        if not members.names and not members.free:
            return f"{self.texts.open_object} {self.texts.close_object}"
        self.item, self.more, self.start = declare("member"), declare("more"), declare("members")
        close = f"{self.texts.close_object}{_if(self._complete(), self.count.enough)}"
        counts = {"counter": [f"incr({_COUNTER})"], "other": [f"set_bit({_OTHER})"]}.get(self.count.how, [])
        choices = []
        for name in members.names:
            bit, must = self.bits.get(name), name in members.must
            steps = [] if must else counts
            conditions = [] if must else [self.count.room]
            if bit is not None:
                steps, conditions = [f"set_bit({bit})", *steps], [f"bit_clear({bit})", *conditions]
            choices.append(self._member(members.named(name), steps) + _if(*conditions))
        for part, written in zip(members.free, members.unnamed()):
            kinds = [("language", language) for language in sorted(part.kinds, key=str)]
            steps = [*(f"set_bit({self.bits[kind]})" for kind in kinds if kind in self.bits), *counts]
            # A rule of one unconditional choice that changes the parameter would be inlined, and lose the change.
            always = "ge([0:1], 0)" if steps else ""
            choices.append(self._member(written, steps) + _if(self.count.room or always))
        self.builder.define(self.item, " | ".join(choices), "::_")
        again = _if(self._goes_on())
        self.builder.define(self.more, f"{self.texts.comma} {self.item}::_{again} | {close}", "::_")
        self.builder.define(self.start, f"{self.item}::_{again} | {close}", "::_")
        return f"{self.texts.open_object} {self.start}::0x0"

    def _member(self, written: tuple[str, str], steps: list[str]) -> str:
        """Return one member and what follows; `steps` change the parameter, one at each symbol that can carry one."""
        name, value = written
        if len(steps) <= 1:
            return f"{name} {value} {self.more}::{steps[0] if steps else '_'}"
        if len(steps) > 2:
            raise too_complex(self.members.pointer, "too many conditions that one property fulfils")
        rest = self.builder.declare("rest")
        self.builder.define(rest, f"{value} {self.more}::{steps[1]} %if ge([0:1], 0)", "::_")
        return f"{name} {rest}::{steps[0]}"

    def _complete(self) -> str:
        if self.members.simple:
            return f"is_ones([0:{len(self.members.must)}])" if self.members.must else ""
        return condition(self.members.formula, self.bits)

    def _goes_on(self) -> str:
        """Return the condition under which there is another member to write: a comma must not lead nowhere."""
        num_must, num_bits = len(self.members.must), len(self.bits)
        some_must = [f"not(is_ones([0:{num_must}]))"] if num_must else []
        if not self.count.room:
            return f"bit_count_lt([0:{num_bits}], {num_bits})" if self.closed else ""
        if not self.closed:
            return _fold("or", [*some_must, self.count.room])
        if num_bits == num_must:
            return some_must[0] if some_must else "not(true)"
        unset = f"bit_count_lt([{num_must}:{num_bits}], {num_bits - num_must})"
        return _fold("or", [*some_must, _fold("and", [self.count.room, unset])])


class _InOrder:
    """Writes the rules of members in the order of the schema, those without a name last."""

    def __init__(self, members: _Members) -> None:
        self.members, self.texts, self.builder = members, members.texts, members.builder

    def expression(self) -> str:
        """Return the expression of the objects."""
        members = self.members
        if members.free:
            members.counting(closed=False)  # raises where members cannot be counted
        how = "counter" if members.least or members.most is not None else ""
        self.count = _Counting(how, members.least, members.most, 0, 0)
        self.mark = "::_" if how else ""
        end = self._end()
        rest = end
        for name in reversed(members.names):
            rest = self._prepend(name, rest)
        return f"{self.texts.open_object} {rest[0]}{'::0x0' if how else ''}"

    def _end(self) -> tuple[str, str]:
        """Return the rules behind the last name: where nothing has been written yet, and where something has."""
        # Parametric rules must look at their parameter, so where nothing is asked, it is not less than 0.
        enough = self.count.enough or (f"ge({_COUNTER}, 0)" if self.count.how else "")
        close = f"{self.texts.close_object}{_if(enough)}"
        empty, more = self.builder.declare("members"), self.builder.declare("more")
        step = f"::incr({_COUNTER})" if self.count.how else ""
        free = [f"{name} {value} {more}{step}{_if(self.count.room)}" for name, value in self.members.unnamed()]
        self.builder.define(empty, " | ".join([*free, close]), self.mark)
        again = [f"{self.texts.comma} {member}" for member in free]
        self.builder.define(more, " | ".join([*again, close]), self.mark)
        return empty, more

    def _prepend(self, name: str, rest: tuple[str, str]) -> tuple[str, str]:
        must = name in self.members.must
        written = " ".join(self.members.named(name))
        after = f"{rest[1]}{self.mark}"
        room = ""
        if not must and self.count.how:
            after, room = f"{rest[1]}::incr({_COUNTER})", _if(self.count.room)
        found = []
        for skip, lead in ((rest[0], ""), (rest[1], f"{self.texts.comma} ")):
            choices = [f"{lead}{written} {after}{room}"] + ([] if must else [f"{skip}{self.mark}"])
            rule = self.builder.declare("members")
            self.builder.define(rule, " | ".join(choices), self.mark)
            found.append(rule)
        return found[0], found[1]


_MAX_PARTS = 24


@dataclass(frozen=True)
class _Part:
    """One property: its terminal, the demand on its value, its name if that is listed, and what it is an example of."""

    terminal: str
    demand: Demand
    name: str | None
    kinds: frozenset[Any]


def few_members(emitter: Emitter, plan: ObjectPlan, shape: ObjectShape, pointer: str) -> list[str]:
    """Return expressions whose union is the objects of `shape`, which has at most two properties."""
    assert shape.most is not None and shape.most <= 2
    parts = list(_parts(emitter, plan))
    if len(parts) > _MAX_PARTS and shape.most == 2:
        raise too_complex(pointer, "too many pairs of properties")
    texts = emitter.texts
    found: dict[str, None] = {}
    for must, never in plan.clauses:
        demanded = [kind for kind in must if isinstance(kind, tuple) and kind[0] == "value"]
        if demanded and shape.most != 1:
            raise unsupported(demanded[0][3], "its negation, as names may repeat")
        if shape.least == 0 and not must:
            found[""] = None
        for part in parts if shape.most else ():
            if part.name in never or not must <= _proof(part, demanded):
                continue
            value = join(part.demand, *(kind[2] for kind in demanded))
            if shape.least <= 1 and not emitter.emptiness.of_demand(value):
                found[f"{part.terminal} {emitter.value(value)}"] = None
        if shape.most == 2:
            found |= dict.fromkeys(_pairs(emitter, parts, must, never, shape.least, pointer))
    return [f"{texts.open_object} {members} {texts.close_object}".replace("  ", " ") for members in found]


def _parts(emitter: Emitter, plan: ObjectPlan) -> Iterator[_Part]:
    for name, demand in plan.names.items():
        terminal = emitter.texts.name(regular.text(name))
        yield _Part(terminal, demand, name, frozenset((name,)))
    for part in plan.free:
        kinds = frozenset(("language", language) for language in part.kinds)
        yield _Part(emitter.texts.name(part.language), part.demand, None, kinds)


def _proof(part: _Part, demanded: list[Any]) -> frozenset[Any]:
    """Return what is there if `part` is, given that its value will be made to fulfil what is `demanded`."""
    own = {
        kind
        for kind in demanded
        if ("language", kind[1]) in part.kinds or (part.name is not None and regular.matches(kind[1], part.name))
    }
    return part.kinds | own


def _pairs(
    emitter: Emitter, parts: list[_Part], must: frozenset[Any], never: frozenset[Any], least: int, pointer: str
) -> Iterator[str]:
    for first in parts:
        for second in parts:
            if first.name in never or second.name in never or not must <= first.kinds | second.kinds:
                continue
            if first is second and first.name is not None:
                continue
            if first is second and least == 2:
                raise unsupported(f"{pointer}/minProperties", "more properties than are named; names may repeat")
            yield (
                f"{first.terminal} {emitter.value(first.demand)} {emitter.texts.comma} "
                f"{second.terminal} {emitter.value(second.demand)}"
            )
