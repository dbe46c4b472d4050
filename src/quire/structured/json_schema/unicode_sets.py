"""The character properties that patterns may name as \\p{...}: general categories, and a few binary properties."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from quire.structured.json_schema.regular import Ranges, ranges_of

_CATEGORIES = {
    "L": "Letter", "LC": "Cased_Letter", "Lu": "Uppercase_Letter", "Ll": "Lowercase_Letter", "Lt": "Titlecase_Letter",
    "Lm": "Modifier_Letter", "Lo": "Other_Letter", "M": "Mark", "Mn": "Nonspacing_Mark", "Mc": "Spacing_Mark",
    "Me": "Enclosing_Mark", "N": "Number", "Nd": "Decimal_Number", "Nl": "Letter_Number", "No": "Other_Number",
    "P": "Punctuation", "Pc": "Connector_Punctuation", "Pd": "Dash_Punctuation", "Ps": "Open_Punctuation",
    "Pe": "Close_Punctuation", "Pi": "Initial_Punctuation", "Pf": "Final_Punctuation", "Po": "Other_Punctuation",
    "S": "Symbol", "Sm": "Math_Symbol", "Sc": "Currency_Symbol", "Sk": "Modifier_Symbol", "So": "Other_Symbol",
    "Z": "Separator", "Zs": "Space_Separator", "Zl": "Line_Separator", "Zp": "Paragraph_Separator",
}  # fmt: skip
_ALIASES = {**{long: short for short, long in _CATEGORIES.items()}, "digit": "Nd", "punct": "P", "Combining_Mark": "M"}


def property_ranges(name: str) -> Ranges | None:
    """Return the characters of the property `name` ("Lu", "Letter", "gc=L", "ASCII"), or None if it is not known."""
    if name == "ASCII":
        return ((0, 0x7F),)
    if name == "Any":
        return ((0, 0xD7FF), (0xE000, 0x10FFFF))
    for prefix in ("General_Category=", "gc="):
        name = name.removeprefix(prefix)
    short = _ALIASES.get(name, name)
    return _category(short) if short in _CATEGORIES else None


@lru_cache(maxsize=40)
def _category(short: str) -> Ranges:
    wanted = ("Lu", "Ll", "Lt") if short == "LC" else (short,)
    points = [point for point in range(0x110000) if unicodedata.category(chr(point)).startswith(wanted)]
    return ranges_of((point, point) for point in points)
