"""Shapes: sets of values of one JSON type, and disjunctive normal forms of them.

A `Form` maps each type to alternative shapes; a value is an instance if it is in one of its type. Subschemas of arrays
and objects stay as they are: a `Demand` is a conjunction of nodes of the document, each of them possibly negated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from quire.structured.json_schema.document import FALSE, TRUE
from quire.structured.json_schema.presence import ALWAYS, Formula, all_of, any_of
from quire.structured.json_schema.regular import Lang, matches

Demand = frozenset[tuple[int, bool]]

EVERYTHING: Demand = frozenset()
NOTHING: Demand = frozenset(((FALSE, True),))


def node_demand(number: int, holds: bool = True) -> Demand:
    """Return the demand that the node holds, or that it does not."""
    if number in (TRUE, FALSE):
        return EVERYTHING if (number == TRUE) == holds else NOTHING
    return frozenset(((number, holds),))


def join(*demands: Demand) -> Demand:
    """Return the conjunction."""
    found = frozenset().union(*demands) if demands else EVERYTHING
    if (FALSE, True) in found or any((number, not holds) in found for number, holds in found):
        return NOTHING
    return found


@dataclass(frozen=True)
class NullShape:
    """null."""


@dataclass(frozen=True)
class BooleanShape:
    """The booleans in `values`."""

    values: frozenset[bool] = frozenset((False, True))


Bound = tuple[int | float, bool]


@dataclass(frozen=True)
class NumberShape:
    """Numbers: of which kind (whole: True, False, or None for both), between bounds (value, is it excluded), for each
    of `multiples` a multiple or (False) none, among `values` if that is not None, and none of `excluded`. All values
    are as in the schema.
    """

    whole: bool | None = None
    low: Bound | None = None
    high: Bound | None = None
    multiples: frozenset[tuple[int | float, bool]] = frozenset()
    values: tuple[int | float, ...] | None = None
    excluded: tuple[int | float, ...] = ()


@dataclass(frozen=True)
class StringShape:
    """Strings: `least` to `most` code points, in all of `languages`, among `values` if that is not None."""

    least: int = 0
    most: int | None = None
    languages: frozenset[Lang] = frozenset()
    values: frozenset[str] | None = None


@dataclass(frozen=True)
class Positions:
    """What `prefixItems` and `items` of one schema demand of the elements of an array.

    `explicit`: the schema says something about the rest. `marks`: unevaluatedItems does not apply to what this names.
    """

    prefix: tuple[Demand, ...]
    rest: Demand
    explicit: bool = False
    marks: bool = False

    def at(self, index: int) -> Demand:
        """Return the demand on the element at `index`."""
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True)
class ArrayShape:
    """Arrays: `least` to `most` elements, each as all `positions` demand; for every (demand, least, most) of `contains`
    so many elements that fulfil it; all different if `unique`.
    """

    least: int = 0
    most: int | None = None
    positions: tuple[Positions, ...] = ()
    contains: tuple[tuple[Demand, int, int | None], ...] = ()
    unique: bool = False


@dataclass(frozen=True)
class Keys:
    """What `properties`, `patternProperties` and `additionalProperties` of one schema demand of properties.

    `explicit`: the schema says something about the rest. `marks`: unevaluatedProperties does not apply to what this
    names.
    """

    names: tuple[tuple[str, Demand], ...]
    patterns: tuple[tuple[Lang, Demand], ...]
    rest: Demand
    explicit: bool = False
    marks: bool = False

    def at(self, name: str) -> Demand:
        """Return the demand on the value of the property `name`."""
        demands = [demand for known, demand in self.names if known == name]
        demands += [demand for language, demand in self.patterns if matches(language, name)]
        return join(*demands) if demands else self.rest


@dataclass(frozen=True)
class ObjectShape:
    """Objects: values of properties as all `keys` demand, names as `names` demand, presence as the formula says, and
    `least` to `most` properties.
    """

    keys: tuple[Keys, ...] = ()
    presence: Formula = ALWAYS
    least: int = 0
    most: int | None = None
    names: Demand = EVERYTHING


Shape = NullShape | BooleanShape | NumberShape | StringShape | ArrayShape | ObjectShape
Form = dict[str, tuple[Shape, ...]]

TOP: Form = {
    "null": (NullShape(),),
    "boolean": (BooleanShape(),),
    "number": (NumberShape(),),
    "string": (StringShape(),),
    "array": (ArrayShape(),),
    "object": (ObjectShape(),),
}
BOTTOM: Form = {}


def only(kind: str, *shapes: Shape) -> Form:
    """Return the form of all values of other types than `kind`, and of `shapes`."""
    return {**{key: value for key, value in TOP.items() if key != kind}, **({kind: shapes} if shapes else {})}


def just(kind: str, *shapes: Shape) -> Form:
    """Return the form of `shapes` and nothing else."""
    return {kind: shapes} if shapes else {}


def exact(value: int | float) -> Fraction:
    """Return the number a JSON text stands for: of floats, what they are written as."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _tighter(first: Bound | None, second: Bound | None, sign: int) -> Bound | None:
    if first is None or second is None:
        return first or second
    one_key = (sign * exact(first[0]), first[1])
    other_key = (sign * exact(second[0]), second[1])
    return first if one_key >= other_key else second


def _fewer(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else min(first, second)


def combine(first: Shape, second: Shape) -> Shape | None:
    """Return the shape of what is in both, which are of one type; None if there is obviously nothing."""
    if first == second:
        return first
    if isinstance(first, BooleanShape) and isinstance(second, BooleanShape):
        common = first.values & second.values
        return BooleanShape(common) if common else None
    if isinstance(first, NumberShape) and isinstance(second, NumberShape):
        return _combine_numbers(first, second)
    if isinstance(first, StringShape) and isinstance(second, StringShape):
        return _combine_strings(first, second)
    if isinstance(first, ArrayShape) and isinstance(second, ArrayShape):
        return ArrayShape(
            max(first.least, second.least),
            _fewer(first.most, second.most),
            _merge(first.positions, second.positions),
            _merge(first.contains, second.contains),
            first.unique or second.unique,
        )
    assert isinstance(first, ObjectShape) and isinstance(second, ObjectShape)
    return ObjectShape(
        _merge(first.keys, second.keys),
        all_of((first.presence, second.presence)),
        max(first.least, second.least),
        _fewer(first.most, second.most),
        join(first.names, second.names),
    )


def _merge(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*first, *second)))


def _combine_numbers(first: NumberShape, second: NumberShape) -> NumberShape | None:
    if first.whole is not None and second.whole is not None and first.whole != second.whole:
        return None
    values = first.values if second.values is None else second.values
    if first.values is not None and second.values is not None:
        wanted = {exact(value) for value in second.values}
        values = tuple(value for value in first.values if exact(value) in wanted)
    joined = NumberShape(
        first.whole if second.whole is None else second.whole,
        _tighter(first.low, second.low, 1),
        _tighter(first.high, second.high, -1),
        first.multiples | second.multiples,
        values,
        _merge(first.excluded, second.excluded),
    )
    if joined.values is None:
        return joined
    kept = tuple(value for value in joined.values if fits(joined, value))
    return NumberShape(values=kept) if kept else None


def fits(shape: NumberShape, value: int | float) -> bool:
    """Return whether the number is in the shape, `values` aside."""
    number = exact(value)
    if shape.whole is not None and (number.denominator == 1) != shape.whole:
        return False
    if shape.low is not None and (number, False) < (exact(shape.low[0]), shape.low[1]):
        return False
    if shape.high is not None and (-number, False) < (-exact(shape.high[0]), shape.high[1]):
        return False
    if any(((number / exact(multiple)).denominator == 1) != wanted for multiple, wanted in shape.multiples):
        return False
    return all(number != exact(other) for other in shape.excluded)


def _combine_strings(first: StringShape, second: StringShape) -> StringShape | None:
    values = first.values if second.values is None else second.values
    if first.values is not None and second.values is not None:
        values = first.values & second.values
    least, most = max(first.least, second.least), _fewer(first.most, second.most)
    languages = first.languages | second.languages
    if values is not None:
        kept = frozenset(
            value
            for value in values
            if least <= len(value) <= (len(value) if most is None else most)
            and all(matches(language, value) for language in languages)
        )
        return StringShape(values=kept) if kept else None
    return None if most is not None and least > most else StringShape(least, most, languages)


def unite(*forms: Form) -> Form:
    """Return the union of `forms`; what is covered by another alternative is left out where that is obvious."""
    result: dict[str, tuple[Shape, ...]] = {}
    for kind, top in TOP.items():
        shapes = list(dict.fromkeys(shape for form in forms for shape in form.get(kind, ())))
        if top[0] in shapes:
            shapes = [top[0]]
        if shapes:
            result[kind] = tuple(_unite_finite(shapes) if len(shapes) > 1 else shapes)
    return result


def _unite_finite(shapes: list[Any]) -> list[Shape]:
    """Make one of alternatives that only list values, or that only differ in the presence of properties."""
    kept: list[Any] = []
    groups: dict[Any, list[Any]] = {}
    for shape in shapes:
        key: Any = None
        if isinstance(shape, ObjectShape):
            key = replace(shape, presence=ALWAYS)
        elif isinstance(shape, BooleanShape) or (
            isinstance(shape, NumberShape | StringShape) and shape.values is not None
        ):
            key = type(shape)
        if key is None:
            kept.append(shape)
        else:
            groups.setdefault(key, []).append(shape)
    return [*kept, *(_unite_group(group) for group in groups.values())]


def _unite_group(group: list[Any]) -> Shape:
    first = group[0]
    if len(group) == 1:
        return first  # type: ignore[no-any-return]
    if isinstance(first, ObjectShape):
        return replace(first, presence=any_of(shape.presence for shape in group))
    if isinstance(first, BooleanShape):
        return BooleanShape(frozenset().union(*(shape.values for shape in group)))
    if isinstance(first, NumberShape):
        return NumberShape(values=tuple(dict.fromkeys(value for shape in group for value in shape.values)))
    return StringShape(values=frozenset().union(*(shape.values for shape in group)))


def intersect(first: Form, second: Form, spend: Callable[[int], None]) -> Form:
    """Return the intersection; `spend` is told how many pairs were made."""
    result: dict[str, tuple[Shape, ...]] = {}
    for kind in TOP:
        ours, theirs = first.get(kind, ()), second.get(kind, ())
        if not ours or not theirs:
            continue
        if theirs == TOP[kind] or ours == TOP[kind]:
            result[kind] = ours if theirs == TOP[kind] else theirs
            continue
        spend(len(ours) * len(theirs))
        pairs = (combine(mine, yours) for mine in ours for yours in theirs)
        shapes = list(dict.fromkeys(shape for shape in pairs if shape is not None))
        if shapes:
            result[kind] = tuple(_unite_finite(shapes) if len(shapes) > 1 else shapes)
    return result
