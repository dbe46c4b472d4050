"""`Pattern`: a regular expression of an adapter's config, matched against the names of modules in bounded time.

Python's own matching may take longer than the age of the universe, and nothing else runs in the process meanwhile. This
one follows all alternatives at once: it computes the set of places that each part of the expression leads to (Thompson
1968), so that its time is bounded by the sizes of expression and name. What many expressions take for many names,
`Work` bounds. It knows what Python's expressions have but for references to groups, and tells whether they match, not
where. Python only compiles mere names: it would take 6 ms for a single range of characters.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_LENGTH = 2000  # of an expression
MAX_DEPTH = 40
NAME = re.compile(r"\^?(?:[\w-]|\\?\.)*\$?")
CHARACTER_WORK = 32  # steps to which compiling one character is equal; of a mere name it is one
FEW_PLACES = 8
ONE_CHARACTER = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN)
# Of a name and the places at which matches of a part may begin, those at which they end. Places are bits of a number.
Part = Callable[[str, int], int]

_IN_CATEGORY = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
}
_NOT_IN_CATEGORY = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}


class Work:
    """What expressions may take together, for being compiled and for all their matches.

    Args:
        left: the number of steps that are left, of about a microsecond each; others may take theirs from it, too.
        error: raised when there are no more.
    """

    def __init__(self, left: list[int], error: Exception) -> None:
        self._left = left
        self._error = error

    def spend(self, steps: int) -> None:
        """Note steps; raise the error if they are too many."""
        self._left[0] -= steps
        if self._left[0] < 0:
            raise self._error


class Pattern:
    """A compiled expression.

    Args:
        work: what it may take, with others that have the same. ending: a name matches, too, if what follows one of its
            dots does.

    Raises:
        ValueError: it is none, is too long, or has what is not supported.
    """

    def __init__(self, text: str, work: Work, *, ending: bool = False) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has more than {MAX_LENGTH} characters")
        self._work, self._ending = work, ending
        is_name = NAME.fullmatch(text) is not None  # nothing in it can be repeated: Python's own matching is bounded
        work.spend(len(text) if is_name else CHARACTER_WORK * len(text))
        self._name: re.Pattern[str] | None = None
        try:
            if is_name:
                self._name = re.compile(rf"(?:.*\.)?(?:{text})" if ending else text)
            else:
                parsed = _parser.parse(text)
                self._after = _Compiler(work).sequence(list(parsed), parsed.state.flags)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None

    def fullmatch(self, name: str) -> bool:
        """Whether the whole name matches."""
        self._work.spend(1)
        if self._name is not None:
            return self._name.fullmatch(name) is not None
        starts = _union(1 << at + 1 for at, char in enumerate(name) if char == ".") if self._ending else 0
        return bool(self._after(name, starts | 1) >> len(name) & 1)


class _Compiler:
    def __init__(self, work: Work) -> None:
        self._spend = work.spend
        self._depth = 0

    def sequence(self, parts: Sequence[tuple[Any, Any]], flags: int) -> Part:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        compiled = [self._part(op, value, flags) for op, value in parts]
        self._depth -= 1
        spend = self._spend

        def after(name: str, places: int) -> int:
            for part in compiled:
                if not places:
                    break
                spend(1)
                places = part(name, places)
            return places

        return after

    def _part(self, op: Any, value: Any, flags: int) -> Part:
        if op in ONE_CHARACTER:
            return _one(_test(op, value, flags), len(value) if op is ops.IN else 1, self._spend)
        if op is ops.BRANCH:
            branches = [self.sequence(list(branch), flags) for branch in value[1]]
            return lambda name, places: _union(branch(name, places) for branch in branches)
        if op is ops.SUBPATTERN:
            _, added, removed, inner = value
            return self.sequence(list(inner), (flags | added) & ~removed)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, inner = value
            repeated = self.sequence(list(inner), flags)
            if not (len(inner) == 1 and inner[0][0] in ONE_CHARACTER):
                repeated = _remembered(repeated, self._spend)
            return _repeated(repeated, least, most)
        if op in (ops.ASSERT, ops.ASSERT_NOT):
            direction, inner = value
            lengths = inner.getwidth()
            if direction < 0 and lengths[0] != lengths[1]:
                raise ValueError("look-behind requires fixed-width pattern")
            part = _remembered(self.sequence(list(inner), flags), self._spend)
            return _looked(part, lengths[0] if direction < 0 else 0, wanted=op is ops.ASSERT)
        if op is ops.AT:
            return lambda name, places: _union(1 << at for at in _each(places) if _is_at(value, name, at))
        raise ValueError(f"{str(op).lower()} is not supported")


def _each(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places -= lowest


def _union(places: Iterable[int]) -> int:
    return functools.reduce(operator.or_, places, 0)


def _remembered(part: Part, spend: Callable[[int], None]) -> Part:
    """Return the part for use in a loop: it computes once for each place of a name, however often it is asked."""
    known: dict[int, int] = {}
    last: list[str] = []

    def after(name: str, places: int) -> int:
        if last != [name]:
            last[:] = [name]
            known.clear()
        spend(places.bit_count())
        for at in _each(places):
            if at not in known:
                known[at] = part(name, 1 << at)
        return _union(known[at] for at in _each(places))

    return after


def _repeated(part: Part, least: int, most: int) -> Part:
    """A repetition leads forward, or nowhere: after as many as the name has characters nothing changes any more."""

    def after(name: str, places: int) -> int:
        for _ in range(min(least, len(name) + 1)):
            places = part(name, places)
        found = places
        for _ in range(min(most - least, len(name) + 1)):
            places = part(name, places) & ~found
            if not places:
                break
            found |= places
        return found

    return after


def _looked(part: Part, back: int, *, wanted: bool) -> Part:
    """Return a part that leads nowhere else; what it looks at begins `back` characters before."""

    def is_there(name: str, at: int) -> bool:
        if back:
            return at >= back and bool(part(name, 1 << at - back) >> at & 1)
        return bool(part(name, 1 << at))

    return lambda name, places: _union(1 << at for at in _each(places) if is_there(name, at) == wanted)


def _one(test: Callable[[str], bool], size: int, spend: Callable[[int], None]) -> Part:
    """Return a part that matches one character; a test takes `size` steps."""

    @functools.lru_cache(1)
    def matching(name: str) -> int:
        spend(len(name) * size)
        return _union(1 << at for at, char in enumerate(name) if test(char))

    def after(name: str, places: int) -> int:
        if places.bit_count() > FEW_PLACES:
            return (places & matching(name)) << 1
        spend(places.bit_count() * size)
        return _union(2 << at for at in _each(places) if at < len(name) and test(name[at]))

    return after


def _test(op: Any, value: Any, flags: int) -> Callable[[str], bool]:
    """Return whether a character matches."""
    if op is ops.ANY:
        return (lambda char: True) if flags & re.DOTALL else (lambda char: char != "\n")
    wanted = op is not ops.NOT_LITERAL
    items = value if op is ops.IN else [(ops.LITERAL, value)]
    if items[0][0] is ops.NEGATE:
        wanted, items = False, items[1:]

    def test(char: str) -> bool:
        spellings = {char, char.lower(), char.upper()} if flags & re.IGNORECASE else {char}
        spellings = {each for each in spellings if len(each) == 1}
        return any(_is_in(item, each) for each in spellings for item in items) == wanted

    return test


def _is_in(item: tuple[Any, Any], char: str) -> bool:
    kind, value = item
    if kind is ops.LITERAL:
        return ord(char) == value  # type: ignore[no-any-return]
    if kind is ops.RANGE:
        return value[0] <= ord(char) <= value[1]  # type: ignore[no-any-return]
    if value in _NOT_IN_CATEGORY:
        return not _IN_CATEGORY[_NOT_IN_CATEGORY[value]](char)
    return _IN_CATEGORY[value](char)


def _is_at(where: Any, name: str, place: int) -> bool:
    if where is ops.AT_BEGINNING or where is ops.AT_BEGINNING_STRING:
        return place == 0
    if where is ops.AT_END or where is ops.AT_END_STRING:
        return place == len(name)
    word = _IN_CATEGORY[ops.CATEGORY_WORD]
    sides = [0 <= at < len(name) and word(name[at]) for at in (place - 1, place)]
    return (sides[0] != sides[1]) == (where is ops.AT_BOUNDARY)
