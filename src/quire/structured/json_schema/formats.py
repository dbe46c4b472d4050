"""Which values of `format` are enforced, and as which regular languages.

Some validators take `format` as an annotation, others as an assertion. Generated strings satisfy both: where a schema
has `"type": "string"` beside a known format, strings have that format, without most of what validators disagree about
(quoted mail names, encoded Unicode in host names, leap seconds elsewhere than in UTC). Without that type the two
readings allow different values, so the schema is refused. Formats that no draft defines are annotations.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from quire.errors import echo
from quire.structured.json_schema.ecma import read_pattern
from quire.structured.json_schema.errors import unsupported
from quire.structured.json_schema.regular import Lang

# Defined by the drafts, but not regular, or too far between validators to be done exactly.
_REFUSED = frozenset(("idn-email", "idn-hostname", "regex", "uri-template", "color"))

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?!0000)(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,20})?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
    r"|23:59:60(?:\.\d{1,20})?[Zz])"
)
# No label with "--" in its third place: those are encoded Unicode, which has rules of its own.
_A, _X = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = rf"{_A}(?:{_A}|{_X}{_A}|{_X}{_X}{_A}|{_X}(?:{_A}{_X}|-{_A}){_X}{{0,58}}{_A})?"
_SHORT = rf"{_A}(?:{_A}|{_X}{_A}|{_X}{_X}{_A}|{_X}(?:{_A}{_X}|-{_A}){_X}{{0,25}}{_A})?"
# At most 253 characters: three labels of up to 63, or eight of up to 30. To count both would take too many states.
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|{_SHORT}(?:\.{_SHORT}){{0,7}})"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [rf"(?:{_H16}:){{6}}{_LS32}", rf"::(?:{_H16}:){{5}}{_LS32}"]
    + [
        rf"(?:(?:{_H16}:){{0,{before}}}{_H16})?::(?:{_H16}:){{{4 - before}}}{_LS32}"
        for before in range(5)
    ]
    + [rf"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}", rf"(?:(?:{_H16}:){{0,6}}{_H16})?::"]
) + ")"  # fmt: skip
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"


def _address(extra: str, private: str, scheme: bool) -> str:
    """Return the pattern of RFC 3986 addresses, or with `extra` characters those of RFC 3987."""
    plain = rf"A-Za-z0-9._~!$&'()*+,;={extra}\-"
    escape = "%[0-9A-Fa-f]{2}"
    segment = rf"(?:[{plain}:@]|{escape})"
    first = rf"(?:[{plain}@]|{escape})"
    host = rf"(?:\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]|(?:[{plain}]|{escape})*)"
    authority = rf"(?:(?:[{plain}:]|{escape})*@)?{host}(?::\d*)?"
    tail = rf"(?:\?(?:[{plain}:@/?{private}]|{escape})*)?(?:#(?:[{plain}:@/?]|{escape})*)?"
    hierarchical = rf"(?://{authority}(?:/{segment}*)*|/(?:{segment}+(?:/{segment}*)*)?|{segment}+(?:/{segment}*)*|)"
    absolute = rf"[A-Za-z][A-Za-z0-9+.-]*:{hierarchical}{tail}"
    if scheme:
        return absolute
    relative = rf"(?://{authority}(?:/{segment}*)*|/(?:{segment}+(?:/{segment}*)*)?|{first}+(?:/{segment}*)*|)"
    return rf"(?:{absolute}|{relative}{tail})"


_WIDE = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF\u{10000}-\u{1FFFD}\u{20000}-\u{2FFFD}\u{30000}-\u{3FFFD}"
_PRIVATE = r"\uE000-\uF8FF\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}"

_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": (
        r"P(?:\d+W|(?:\d+D|\d+M(?:\d+D)?|\d+Y(?:\d+M(?:\d+D)?)?)(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?"
        r"|T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))"
    ),
    "email": rf"(?=.{{1,64}}@){_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _address("", "", scheme=True),
    "uri-reference": _address("", "", scheme=False),
    "iri": _address(_WIDE, _PRIVATE, scheme=True),
    "iri-reference": _address(_WIDE, _PRIVATE, scheme=False),
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{_POINTER})",
}


@lru_cache(maxsize=32)
def _language(name: str) -> Lang:
    return read_pattern(f"^(?:{_PATTERNS[name]})$")


def format_language(schema: dict[str, Any], pointer: str) -> Lang | None:
    """Return the strings of the schema's format, or None where it is an annotation."""
    name, kind = schema["format"], schema.get("type")
    if name not in _PATTERNS and name not in _REFUSED:
        return None
    if kind is None:
        raise unsupported(pointer, f'format {echo(name)} without "type": "string" beside it may be a note or a demand')
    if "string" not in ([kind] if isinstance(kind, str) else kind):
        return None
    if name in _REFUSED:
        raise unsupported(pointer, f"format {echo(name)} cannot be enforced exactly")
    return _language(name)
