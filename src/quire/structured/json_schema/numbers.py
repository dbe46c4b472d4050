"""The texts of the numbers of a `NumberShape`, as a regular language.

Three kinds of text: whole numbers ("-12"), decimals ("1.50"), and normalised scientific notation ("1.5e-07", one digit
that is not 0 before the point). Readers make floats of the last two, so bounds hold for the float that is read: the
decimal that is written is compared with the shortest decimal of the last float that is inside. Other spellings of
JSON ("10e2") are left out, except where any number will do. Integers have the first kind only, though 1.0 is an integer
for JSON Schema: a model that may write it as "1.000" or "1E00" sometimes does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from quire.structured.json_schema.regular import EMPTY, EPSILON, Lang, alt, both, cat, chars, neg, rep, text
from quire.structured.json_schema.shapes import Bound, NumberShape, exact

_D = chars("0123456789")
_NONZERO = chars("123456789")
_SIGN = rep(text("-"), 0, 1)
_POINT = text(".")
_E = chars("eE")
_LONG = 999
_FRACTION = 40
_INTEGER_PART = 40
_LARGEST = 1.7976931348623157e308
_SMALLEST = Decimal("5e-324")

_ZEROS = rep(text("0"), 0, _FRACTION)
_SOME_ZEROS = rep(text("0"), 1, _FRACTION)


@lru_cache(maxsize=256)
def number_language(shape: NumberShape) -> Lang:
    """Return the texts of the numbers in `shape`, its `multiples` aside."""
    if shape.values is not None:
        return alt(*(_spellings(value) for value in shape.values))
    if shape == NumberShape():
        return alt(_any_whole(), _any_float())
    whole = EMPTY if shape.whole is False else _without(_whole_between, shape)
    if shape.whole:
        return whole
    floats = _without(_floats_between, shape)
    if shape.whole is False and floats != EMPTY:
        floats = both(floats, _broken_floats())
    return alt(whole, floats)


def _any_whole() -> Lang:
    return cat(_SIGN, alt(text("0"), cat(_NONZERO, rep(_D, 0, _LONG))))


@lru_cache(maxsize=1)
def _any_float() -> Lang:
    short = cat(_SIGN, alt(text("0"), cat(_NONZERO, rep(_D, 0, 19))), rep(cat(_POINT, rep(_D, 1, _FRACTION)), 0, 1))
    exponent = cat(_E, rep(chars("+-"), 0, 1), rep(_D, 1, 2))
    return alt(_floats_between(None, None), cat(short, exponent))


def _without(between: Callable[[Bound | None, Bound | None], Lang], shape: NumberShape) -> Lang:
    """Return the texts between the bounds of `shape` that are none of its excluded values."""
    found = between(shape.low, shape.high)
    for value in shape.excluded:
        found = both(found, alt(between(None, (value, True)), between((value, True), None)))
    return found


def _whole_between(low: Bound | None, high: Bound | None) -> Lang:
    """Return the whole numbers between the bounds, written as such."""
    least = None if low is None else next_whole(low, 1)
    most = None if high is None else next_whole(high, -1)
    return _signed(least, most, _naturals_between)


def next_whole(bound: Bound, direction: int) -> int:
    """Return the whole number nearest to `bound` that is inside it: above (1) or below (-1)."""
    value = Fraction(bound[0])
    whole = math.ceil(value) if direction > 0 else math.floor(value)
    return whole + direction if bound[1] and whole == value else whole


def _signed(least: Decimal | int | None, most: Decimal | int | None, between: Callable[[Any, Any], Lang]) -> Lang:
    """Return the texts from `least` to `most`, made of the texts of magnitudes by `between`."""
    found = EMPTY
    if most is None or most >= 0:
        found = between(max(least, 0) if least is not None else 0, most)
    if least is None or least <= 0:
        low = max(-most, 0) if most is not None else 0
        found = alt(found, cat(text("-"), between(low, None if least is None else -least)))
    return found


def _naturals_between(low: int, high: int | None, longest: int = _LONG + 1) -> Lang:
    if high is not None and high < low:
        return EMPTY
    above = _naturals_from(low, longest)
    return above if high is None else both(above, _naturals_to(high)) if low else _naturals_to(high)


def _naturals_from(low: int, longest: int) -> Lang:
    if low == 0:
        return alt(text("0"), cat(_NONZERO, rep(_D, 0, longest - 1)))
    digits = str(low)
    longer = cat(_NONZERO, rep(_D, len(digits), longest - 1)) if longest > len(digits) else EMPTY
    return alt(longer, _same_length(digits, 1)) if longest >= len(digits) else EMPTY


def _naturals_to(high: int) -> Lang:
    digits = str(high)
    found = [text("0")]
    if high > 0:
        if len(digits) > 1:
            found.append(cat(_NONZERO, rep(_D, 0, len(digits) - 2)))
        found.append(both(_same_length(digits, -1), cat(_NONZERO, rep(_D, 0, None))))
    return alt(*found)


def _departures(digits: str, direction: int) -> Iterator[tuple[int, Lang]]:
    """Yield each index of `digits` and the strings up to it that are larger there (direction 1) or smaller (-1)."""
    for index, digit in enumerate(digits):
        others = "0123456789"[int(digit) + 1 :] if direction > 0 else "0123456789"[: int(digit)]
        if others:
            yield index, cat(text(digits[:index]), chars(others))


def _same_length(digits: str, direction: int) -> Lang:
    """Return the digit strings of the length of `digits` that are no less (direction 1) or no more (-1)."""
    found = [text(digits)]
    for index, begin in _departures(digits, direction):
        rest = len(digits) - index - 1
        found.append(cat(begin, rep(_D, rest, rest)))
    return alt(*found)


def _floats_between(low: Bound | None, high: Bound | None) -> Lang:
    """Return the decimals and the scientific texts that are read as floats between the bounds."""
    if not _reaches(low, high):
        return EMPTY
    least = None if low is None else _last_float(low, -1)
    most = None if high is None else _last_float(high, 1)
    if not _finite(least) or not _finite(most) or (least is not None and most is not None and least > most):
        return EMPTY
    # The float next to 0 is far smaller than any of these decimals, which is why rounding to 40 digits is harmless.
    decimals = _signed(least, most, _decimals_between)
    return alt(decimals, _signed(least, most, _scientific_between))


def _finite(value: Decimal | None) -> bool:
    return value is None or value.is_finite()


def _reaches(low: Bound | None, high: Bound | None) -> bool:
    return not (low is not None and low[0] > _LARGEST) and not (high is not None and high[0] < -_LARGEST)


def _last_float(bound: Bound, direction: int) -> Decimal:
    """Return the shortest decimal of the largest (direction 1) or smallest (-1) float that is inside `bound`."""
    value, excluded = bound
    clipped = max(min(value, _LARGEST), -_LARGEST) if abs(value) > _LARGEST else value
    number = float(clipped)
    while (number - value if isinstance(value, float) else Fraction(number) - value) * direction > 0 or (
        excluded and number == value
    ):
        number = math.nextafter(number, -math.inf * direction)
    return Decimal(repr(number))


def _decimals_between(low: Decimal | int, high: Decimal | None) -> Lang:
    """Return the decimals from `low` to `high` with up to 40 digits on either side of the point."""
    context = Context(prec=800, rounding=ROUND_CEILING)
    unit = Decimal(1).scaleb(-_FRACTION)
    lowest = Decimal(low).quantize(unit, rounding=ROUND_CEILING, context=context)
    fraction = rep(_D, 1, _FRACTION)
    if lowest == 0:
        above = cat(_naturals_from(0, _INTEGER_PART), _POINT, fraction)
    else:
        whole, _, part = f"{lowest:f}".partition(".")
        larger = cat(_naturals_from(int(whole) + 1, _INTEGER_PART), _POINT, fraction)
        equal = cat(text(whole), _POINT, _fraction(part, 1)) if len(whole) <= _INTEGER_PART else EMPTY
        above = alt(larger, equal)
    if high is None:
        return above
    highest = high.quantize(unit, rounding=ROUND_FLOOR, context=context)
    if highest < lowest:
        return EMPTY
    whole, _, part = f"{highest:f}".partition(".")
    below = cat(text(whole), _POINT, _fraction(part, -1))
    if int(whole) > 0:
        below = alt(below, cat(_naturals_to(int(whole) - 1), _POINT, fraction))
    return both(above, below)


def _fraction(part: str, direction: int) -> Lang:
    """Return the digits behind a point that make no less (direction 1) or no more (-1) than `part` does."""
    part = part.rstrip("0")
    if not part:
        return rep(_D, 1, _FRACTION) if direction > 0 else _SOME_ZEROS
    found = [cat(text(part), rep(_D if direction > 0 else text("0"), 0, _FRACTION - len(part)))]
    if direction < 0:
        found += [text(part[:length]) for length in range(1, len(part))]
    for index, begin in _departures(part, direction):
        found.append(cat(begin, rep(_D, 0, _FRACTION - index - 1)))
    return alt(*found)


def _scientific_between(low: Decimal | int, high: Decimal | None) -> Lang:
    """Return the normalised scientific texts from `low` to `high`, within what floats can hold."""
    lowest = max(Decimal(low), _SMALLEST)
    highest = Decimal(repr(_LARGEST)) if high is None else high
    if highest < lowest:
        return EMPTY
    first, last = lowest.adjusted(), highest.adjusted()
    from_first = cat(_mantissa(lowest, 1), _exponent(first, first))
    to_last = cat(_mantissa(highest, -1), _exponent(last, last))
    if first == last:
        return both(from_first, to_last)
    between = cat(_NONZERO, rep(cat(_POINT, rep(_D, 1, _FRACTION)), 0, 1), _exponent(first + 1, last - 1))
    return alt(from_first, between if last - first > 1 else EMPTY, to_last)


def _mantissa(value: Decimal, direction: int) -> Lang:
    """Return the mantissas that are no less (direction 1) or no more (-1) than that of `value`."""
    digits = "".join(map(str, value.as_tuple().digits)).rstrip("0") or "0"
    head, tail = digits[0], digits[1:]
    others = "123456789"[int(head) :] if direction > 0 else "123456789"[: int(head) - 1]
    found = [cat(chars(others), rep(cat(_POINT, rep(_D, 1, _FRACTION)), 0, 1))] if others else []
    found.append(cat(text(head), _POINT, _fraction(tail, direction)))
    if direction < 0 or not tail:
        found.append(text(head))
    return alt(*found)


@lru_cache(maxsize=256)
def _exponent(first: int, last: int) -> Lang:
    """Return the ends of scientific texts with the exponents from `first` to `last`, with up to one 0 in front."""
    zero = rep(text("0"), 0, 1)
    found = []
    if last >= 0:
        found.append(cat(rep(text("+"), 0, 1), zero, _naturals_between(max(first, 0), last, 3)))
    if first < 0:
        found.append(cat(text("-"), zero, _naturals_between(max(-last, 1), -first, 3)))
    return cat(_E, alt(*found))


@lru_cache(maxsize=1)
def large_scientific() -> Lang:
    """Return scientific texts of numbers so large that floats of that size are whole."""
    return cat(_SIGN, _D, rep(cat(_POINT, rep(_D, 1, _FRACTION)), 0, 1), _exponent(16, 308))


@lru_cache(maxsize=1)
def _broken_floats() -> Lang:
    """Return the decimals and scientific texts that are read as numbers that are not whole.

    Decimals very near to a whole number are left out: they may be read as that.
    """
    found = []
    for length in range(1, 15):
        digits = alt(_NONZERO, text("0")) if length == 1 else cat(_NONZERO, rep(_D, length - 1, length - 1))
        near = 15 - length
        same = alt(rep(text("0"), near, near), rep(text("9"), near, near))
        clear = both(rep(_D, 1, _FRACTION), neg(cat(same, rep(_D, 0, None))), neg(rep(text("0"), 1, None)))
        found.append(cat(_SIGN, digits, _POINT, clear))
    found.append(cat(_SIGN, _NONZERO, rep(cat(_POINT, rep(_D, 1, _FRACTION)), 0, 1), _exponent(-323, -1)))
    return alt(*found)


def _spellings(value: int | float) -> Lang:
    """Return the texts of exactly this number."""
    if isinstance(value, int):
        return text(str(value))
    number = exact(value)
    sign = rep(text("-"), 0, 1) if number == 0 else text("-") if number < 0 else EPSILON
    decimal = abs(Decimal(repr(value)))
    whole, _, part = f"{decimal:f}".partition(".")
    part = part.rstrip("0")
    found = []
    if number.denominator == 1 and Fraction(value) == number:
        found.append(text(whole))
    if len(part) <= _FRACTION and len(whole) <= _INTEGER_PART:
        tail = cat(text(part), rep(text("0"), 0, _FRACTION - len(part))) if part else _SOME_ZEROS
        found.append(cat(text(whole), _POINT, tail))
    if number != 0:
        digits = "".join(map(str, decimal.as_tuple().digits)).rstrip("0")
        tail = cat(_POINT, text(digits[1:]), _ZEROS) if digits[1:] else rep(cat(_POINT, _SOME_ZEROS), 0, 1)
        found.append(cat(text(digits[0]), tail, _exponent(decimal.adjusted(), decimal.adjusted())))
    return cat(sign, alt(*found))
