"""Arrays as rules. Elements are counted by repetition; bits of a parametric rule mark those of `uniqueItems`.

Arrays with `contains` (`Containing`) get one rule for each number of matching elements that must be told apart; where
the number of elements is bounded too, a parameter's bits count them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from quire.structured.json_schema import regular
from quire.structured.json_schema.assertions import negated
from quire.structured.json_schema.emit import Emitter
from quire.structured.json_schema.errors import MAX_CONTAINS_STATES, too_complex, unsupported
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.shapes import (
    ArrayShape,
    BooleanShape,
    Demand,
    Form,
    NullShape,
    NumberShape,
    StringShape,
    join,
)

_MAX_DIFFERENT = 48


def choices(emitter: Emitter, shape: ArrayShape, pointer: str) -> list[str]:
    """Return expressions whose union is the arrays of `shape`."""
    most = emitter.emptiness.longest(shape)
    contains = [part for part in shape.contains if part[1] or part[2] is not None]
    if contains and most == 0:
        contains = []
    unique = shape.unique and (most is None or most > 1)
    if unique and contains:
        raise unsupported(f"{pointer}/uniqueItems", "beside contains")
    if unique:
        return [_unique(emitter, shape, most, pointer)]
    if contains:
        return [_containing(emitter, shape, most, contains, pointer)]
    return [_plain(emitter, shape, most)]


def _prefix_length(shape: ArrayShape) -> int:
    return max((len(positions.prefix) for positions in shape.positions), default=0)


def _plain(emitter: Emitter, shape: ArrayShape, most: int | None) -> str:
    texts = emitter.texts
    length = _prefix_length(shape) if most is None else min(_prefix_length(shape), most)
    tail = ""
    if most is None or most > length:
        item = emitter.value(emitter.emptiness.element(shape, length))
        if length == 0:
            return f"{texts.open_array} {_list(item, texts.comma, shape.least, most)} {texts.close_array}"
        high = "" if most is None else str(most - length)
        low = max(shape.least - length, 0)
        tail = f"({texts.comma} {item})*" if (low, high) == (0, "") else f"({texts.comma} {item}){{{low},{high}}}"
    for index in reversed(range(length)):
        item = emitter.value(emitter.emptiness.element(shape, index))
        tail = f"{texts.comma + ' ' if index else ''}{item} {tail}".strip()
        if index >= shape.least:
            tail = f"({tail})?"
    return f"{texts.open_array} {tail} {texts.close_array}"


def _list(item: str, comma: str, least: int, most: int | None) -> str:
    """Return `least` to `most` items with commas between them; there is room for at least one."""
    high = "" if most is None else str(most - 1)
    low = max(least - 1, 0)
    rest = f"({comma} {item})*" if (low, high) == (0, "") else f"({comma} {item}){{{low},{high}}}"
    if high == "0":
        rest = ""
    return f"{item} {rest}".strip() if least else f"({item} {rest})?"


def _containing(
    emitter: Emitter,
    shape: ArrayShape,
    most: int | None,
    contains: list[tuple[Demand, int, int | None]],
    pointer: str,
) -> str:
    texts = emitter.texts
    demand, least, high = contains[0]
    element = emitter.emptiness.element(shape, 0)
    alike = len(contains) == 1 and not _prefix_length(shape)
    if alike and high is None and least == 1 and most is None and shape.least <= 1:
        item, found = emitter.value(element), emitter.value(join(element, demand))
        before, behind = f"({item} {texts.comma})*", f"({texts.comma} {item})*"
        return f"{texts.open_array} {before} {found} {behind} {texts.close_array}"
    return Containing(emitter, shape, most, _prefix_length(shape), pointer).expression()


def _unique(emitter: Emitter, shape: ArrayShape, most: int | None, pointer: str) -> str:
    where = f"{pointer}/uniqueItems"
    length = _prefix_length(shape) if most is None else min(_prefix_length(shape), most)
    demands = {emitter.emptiness.element(shape, index) for index in range(length)}
    if most is None or most > length:
        demands.add(emitter.emptiness.element(shape, length))
    if len(demands) != 1:
        raise unsupported(where, "where elements differ in what is demanded of them")
    values = _finite(emitter.expander.form(next(iter(demands))))
    if values is None:
        raise unsupported(where, "unless elements come from a short list (enum, const, boolean)")
    texts, builder = emitter.texts, emitter.builder
    limit = len(values) if most is None else min(most, len(values))
    if shape.least > limit:
        raise unsupported(where, f"there are not {shape.least} different elements")
    if len(values) > _MAX_DIFFERENT:
        raise too_complex(where, f"more than {_MAX_DIFFERENT} possible elements")
    first, item, more = builder.declare("elements"), builder.declare("element"), builder.declare("more")
    field = f"[0:{len(values)}]"
    choices = [f"{value} {more}::set_bit({i}) %if bit_clear({i})" for i, value in enumerate(_written(emitter, values))]
    builder.define(item, " | ".join(choices), "::_")
    close = texts.close_array + (f" %if bit_count_ge({field}, {shape.least})" if shape.least else "")
    builder.define(more, f"{texts.comma} {item}::_ %if bit_count_lt({field}, {limit}) | {close}", "::_")
    builder.define(first, f"{item}::_ | {close}", "::_")
    return f"{texts.open_array} {first}::0x0"


def _finite(form: Form) -> list[object] | None:
    """Return the values of a form of few scalars, or None."""
    found: list[object] = []
    for shapes in form.values():
        for shape in shapes:
            if isinstance(shape, NullShape):
                found.append(None)
            elif isinstance(shape, BooleanShape):
                found += sorted(shape.values)
            elif isinstance(shape, NumberShape | StringShape) and shape.values is not None:
                found += sorted(shape.values)  # type: ignore[type-var]
            else:
                return None
    return found


def _written(emitter: Emitter, values: list[object]) -> list[str]:
    found = []
    for value in values:
        if value is None or isinstance(value, bool):
            found.append({None: '"null"', True: '"true"', False: '"false"'}[value])
        elif isinstance(value, str):
            found.append(emitter.texts.string(regular.text(value)))
        else:
            assert isinstance(value, int | float)
            found.append(emitter.texts.number(number_language(NumberShape(values=(value,)))))
    return found


State = tuple[int, ...]


class Containing:
    """Writes the rules of one array shape. A state says how many elements fulfilled each of the demands so far.

    Args:
        most: how many elements there may be, None for any number. length: how many positions have demands of their own.
    """

    def __init__(self, emitter: Emitter, shape: ArrayShape, most: int | None, length: int, pointer: str) -> None:
        self.emitter, self.shape, self.most, self.length, self.pointer = emitter, shape, most, length, pointer
        self.contains = [part for part in shape.contains if part[1] or part[2] is not None]
        self.limits = [least if high is None else high for _, least, high in self.contains]
        if math.prod(limit + 1 for limit in self.limits) * (length + 1) > MAX_CONTAINS_STATES:
            raise too_complex(f"{pointer}/contains", "too many numbers of elements to tell apart")
        limit = max(shape.least, most or 0)
        self.count = f"[0:{limit.bit_length()}]" if limit else ""
        self._rules: dict[tuple[int, State], str] = {}
        self._elements: dict[tuple[int, State], str] = {}
        self._viable: dict[tuple[int, State], bool] = {}

    def expression(self) -> str:
        """Return the expression of the arrays."""
        texts = self.emitter.texts
        zero = (0,) * len(self.contains)
        choices = []
        if self._goes_on(0, zero):
            # The first element counts already: rules that only change the parameter of another lose the change.
            choices.append(f"{self._element(0, zero)}::{'0x1' if self.count else '0x0'}")
        if self.shape.least == 0 and self._enough(zero):
            choices.append(texts.close_array)
        if not choices:
            raise unsupported(f"{self.pointer}/contains", "no array has such elements")
        return f"{texts.open_array} ({' | '.join(choices)})"

    def _full(self, index: int) -> bool:
        return self.most is not None and index >= self.most

    def _counted(self) -> str:
        return f"::incr({self.count})" if self.count else "::_"

    def _enough(self, state: State) -> bool:
        return all(number >= least for number, (_, least, _) in zip(state, self.contains))

    def _element(self, index: int, state: State) -> str:
        """Return the rule of the element at `index` (or later, if all are alike) and what follows."""
        if (index, state) not in self._elements:
            builder = self.emitter.builder
            name = self._elements[index, state] = builder.declare("element")
            choices = []
            for demand, after in self._after(index, state):
                follow = self._follow(min(index + 1, self.length), after)
                choices.append(f"{self.emitter.value(demand)} {follow}::_{self._room_for(after)}")
            builder.define(name, " | ".join(choices), "::_")
        return self._elements[index, state]

    def _room_for(self, state: State) -> str:
        """Return the condition that enough elements may still follow to reach all minima."""
        missing = max(max(least - number, 0) for number, (_, least, _) in zip(state, self.contains))
        return f" %if le({self.count}, {self.most - missing})" if self.most is not None and missing else ""

    def _demand(self, base: Demand, state: State, fitting: tuple[bool, ...]) -> Demand | None:
        """Return the demand on an element that fulfils exactly the demands in `fitting`; None if no array needs it."""
        demand = base
        for number, limit, fits, (wanted, _, high) in zip(state, self.limits, fitting, self.contains):
            if fits and number == limit:
                # Beyond the upper limit, or (without one) no longer of interest.
                return None
            if fits:
                demand = join(demand, wanted)
            elif high is not None:
                demand = join(demand, negated(wanted))
        return demand

    def _follow(self, index: int, state: State) -> str:
        """Return the rule behind an element."""
        if (index, state) not in self._rules:
            texts, builder = self.emitter.texts, self.emitter.builder
            name = self._rules[index, state] = builder.declare("elements")
            choices = []
            if self._goes_on(index, state):
                # A rule of one unconditional choice that changes the parameter would be inlined, and lose the change.
                room = f" %if lt({self.count}, {self.most})" if self.most is not None else " %if ge([0:1], 0)"
                choices.append(f"{texts.comma} {self._element(index, state)}{self._counted()}{room}")
            if self._enough(state):
                # Parametric rules must look at their parameter, so where nothing is asked, it is not less than 0.
                choices.append(f"{texts.close_array} %if ge({self.count or '[0:1]'}, {self.shape.least})")
            builder.define(name, " | ".join(choices), "::_")
        return self._rules[index, state]

    def _goes_on(self, index: int, state: State) -> bool:
        """Return whether there may be an element at `index`."""
        if self._full(index) or self._over(index):
            return False
        key = (index, state)
        if key not in self._viable:
            self._viable[key] = False
            self._viable[key] = any(self._after(index, state))
        return self._viable[key]

    def _after(self, index: int, state: State) -> Iterator[tuple[Demand, State]]:
        """Yield the demands that an element at `index` may fulfil, and the states behind it, if these lead anywhere."""
        base = self.emitter.emptiness.element(self.shape, index)
        for fitting in itertools.product((True, False), repeat=len(self.contains)):
            demand = self._demand(base, state, fitting)
            if demand is None or self.emitter.emptiness.of_demand(demand):
                continue
            after = tuple(min(n + fits, limit) for n, fits, limit in zip(state, fitting, self.limits))
            if self._enough(after) or self._goes_on(min(index + 1, self.length), after):
                yield demand, after

    def _over(self, index: int) -> bool:
        demand = self.emitter.emptiness.element(self.shape, index)
        return self.emitter.emptiness.of_demand(demand)
