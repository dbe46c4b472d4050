"""Arrays as rules. Elements are counted by repetition; where `contains` or `uniqueItems` is about, by the bits of a
parametric rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.structured.json_schema import regular
from quire.structured.json_schema.assertions import negated
from quire.structured.json_schema.errors import too_complex, unsupported
from quire.structured.json_schema.numbers import number_language
from quire.structured.json_schema.shapes import (
    All,
    ArrayShape,
    BooleanShape,
    Form,
    NullShape,
    NumberShape,
    StringShape,
    join,
)

if TYPE_CHECKING:
    from quire.structured.json_schema.emit import Emitter

_MAX_DIFFERENT = 48


def choices(emitter: Emitter, shape: ArrayShape, pointer: str) -> list[str]:
    """Return expressions whose union is the arrays of `shape`."""
    most = emitter.emptiness.longest(shape, pointer)
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
    contains: list[tuple[All, int, int | None]],
    pointer: str,
) -> str:
    """Return arrays in which so many elements fulfil a demand; counters in the bits of a parameter."""
    if len(contains) > 1 or _prefix_length(shape) or (most is not None and shape.least):
        return _counting(emitter, shape, most, contains, pointer)
    demand, least, high = contains[0]
    texts = emitter.texts
    element = emitter.emptiness.element(shape, 0)
    if high is None and least == 1 and most is None and shape.least <= 1:
        item, found = emitter.value(element), emitter.value(join(element, demand))
        before, behind = f"({item} {texts.comma})*", f"({texts.comma} {item})*"
        return f"{texts.open_array} {before} {found} {behind} {texts.close_array}"
    return _counting(emitter, shape, most, contains, pointer)


def _counting(
    emitter: Emitter,
    shape: ArrayShape,
    most: int | None,
    contains: list[tuple[All, int, int | None]],
    pointer: str,
) -> str:
    fields, at = [], 0
    for _, least, high in contains:
        width = max(least if high is None else high, 1).bit_length()
        fields.append(f"[{at}:{at + width}]")
        at += width
    limit = shape.least if most is None else most
    count = f"[{at}:{at + max(limit, 1).bit_length()}]" if limit else ""
    if at + (limit.bit_length() if limit else 0) > 64:
        raise too_complex(f"{pointer}/contains", "too much to count")
    room = f"lt({count}, {most})" if most is not None else ""
    step_rule = _Steps(emitter, contains, fields, count, room)
    length = _prefix_length(shape)
    loop = step_rule.loop(emitter.emptiness.element(shape, length), shape.least, pointer)
    for index in reversed(range(length if most is None else min(length, most))):
        loop = step_rule.chain(emitter.emptiness.element(shape, index), loop, shape.least, pointer, first=index == 0)
    if length == 0:
        loop = step_rule.first(loop, shape.least)
    return f"{emitter.texts.open_array} {loop}::0x0"


class _Steps:
    """The rules of arrays that count: each reads one element, counts it, and goes on."""

    def __init__(
        self,
        emitter: Emitter,
        contains: list[tuple[All, int, int | None]],
        fields: list[str],
        count: str,
        room: str,
    ) -> None:
        self.emitter, self.contains, self.fields, self.count, self.room = emitter, contains, fields, count, room
        self.next = f"incr({count})" if count else "_"

    def _close(self, least: int) -> str:
        conditions = [f"ge({field}, {low})" for field, (_, low, _) in zip(self.fields, self.contains) if low]
        if least:
            conditions.append(f"ge({self.count}, {least})")
        return self.emitter.texts.close_array + _when(conditions)

    def _element(self, element: All, after: str, pointer: str) -> str:
        """Return a rule for one element, which goes on as `after`, whose parameter it has changed."""
        builder = self.emitter.builder
        kinds: list[tuple[All, list[str], list[str]]] = [(element, [], [])]
        for field, (demand, least, high) in zip(self.fields, self.contains):
            limit = least if high is None else high
            grown = []
            for wanted, steps, conditions in kinds:
                inside = (join(wanted, demand), [*steps, field], [*conditions, f"lt({field}, {limit})"])
                outside = (wanted if high is None else join(wanted, negated(demand)), steps, conditions)
                grown += [inside, outside]
            kinds = grown
        choices = []
        for wanted, steps, conditions in kinds:
            if self.emitter.emptiness.of_demand(wanted, pointer):
                continue
            if len(steps) > 1:
                raise too_complex(f"{pointer}/contains", "several counts of the same elements")
            step = f"incr({steps[0]})" if steps else "_"
            choices.append(f"{self.emitter.value(wanted)} {after}::{step}{_when(conditions)}")
        if not choices:
            raise unsupported(pointer, "no element is possible here")
        rule = builder.declare("element")
        builder.define(rule, " | ".join(choices), "::_")
        return rule

    def loop(self, element: All, least: int, pointer: str) -> str:
        """Return the rule behind an element, where all others are alike."""
        builder = self.emitter.builder
        rule = builder.declare("elements")
        close = self._close(least)
        self.element = ""
        if self.emitter.emptiness.of_demand(element, pointer):
            builder.define(rule, close, "::_")
        else:
            self.element = self._element(element, rule, pointer)
            room = _when([self.room] if self.room else [])
            builder.define(rule, f"{self.emitter.texts.comma} {self.element}::{self.next}{room} | {close}", "::_")
        return rule

    def chain(self, element: All, after: str, least: int, pointer: str, *, first: bool) -> str:
        """Return the rule before an element that goes on as `after`."""
        rule = self.emitter.builder.declare("elements")
        item = self._element(element, after, pointer)
        comma = "" if first else self.emitter.texts.comma + " "
        room = _when([self.room] if self.room else [])
        self.emitter.builder.define(rule, f"{comma}{item}::{self.next}{room} | {self._close(least)}", "::_")
        return rule

    def first(self, loop: str, least: int) -> str:
        """Return the rule at the beginning, where no comma comes first."""
        rule = self.emitter.builder.declare("elements")
        room = _when([self.room] if self.room else [])
        choices = [f"{self.element}::{self.next}{room}"] if self.element else []
        self.emitter.builder.define(rule, " | ".join([*choices, self._close(least)]), "::_")
        return rule


def _when(conditions: list[str]) -> str:
    if not conditions:
        return ""
    result = conditions[0]
    for part in conditions[1:]:
        result = f"and({result}, {part})"
    return f" %if {result}"


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
