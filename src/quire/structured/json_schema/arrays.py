"""Arrays as rules. Elements are counted by repetition; those of `uniqueItems` are ticked off in the bits of a
parametric rule. Arrays with `contains` are in `containing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.structured.json_schema import regular
from quire.structured.json_schema.containing import Containing
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
