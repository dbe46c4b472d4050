"""How much a chat template may do: a budget of steps, characters and processor time, and what operations cost.

Everything that could make something much larger than what it is made of is priced before it is done. What is not
priced is linear in its input, which the budget has bounded, and the clock ends what does too much of that.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError

MAX_OUTPUT_CHARS = 2**24
MAX_MADE_CHARS = 2**28  # over a whole rendering; templates that add to a text message by message copy it each time
MAX_STEPS = 4_000_000  # some templates look back over the conversation at each message: 2000 messages must do
MAX_SECONDS = 5.0  # of this thread's processor time
MAX_REPEAT = 2**16
MAX_WIDTH = 4096
MAX_INT_BITS = 2**12
STEPS_PER_LOOK = 64
WIDE_FIELD = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|:[^{}]*\{")  # wide as written, or as wide as an argument says
PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})


class TemplateRefusalError(TemplateError):
    """A template refuses the conversation, by `raise_exception`, or does more than it may."""


class Budget(threading.local):
    """What is left for the rendering that runs in this thread."""

    steps = 0
    chars = 0
    deadline = 0.0
    next_look = 0

    def refill(self) -> None:
        """Begin a rendering."""
        self.steps = MAX_STEPS
        self.chars = MAX_MADE_CHARS
        self.next_look = MAX_STEPS
        self.deadline = time.thread_time() + MAX_SECONDS

    def spend(self, steps: int = 1) -> None:
        """Take steps off; raise `TemplateRefusalError` when none, or no time, is left."""
        self.steps -= steps
        if self.steps < 0:
            raise TemplateRefusalError("the chat template takes too many steps for this conversation")
        if self.steps <= self.next_look:
            self.next_look = self.steps - STEPS_PER_LOOK
            if time.thread_time() > self.deadline:
                raise TemplateRefusalError("the chat template takes too long for this conversation")

    def make(self, chars: int) -> None:
        """Take the characters of a text off that is about to be made."""
        self.chars -= chars
        if chars > MAX_OUTPUT_CHARS or self.chars < 0:
            raise TemplateRefusalError("the chat template makes a text that is too long")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield from a collection at the price of a step each."""
        for item in items:
            self.spend()
            yield item

    def weigh(self, value: Any) -> None:
        """Pay for the text of a value, in which one long text may stand many times."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, Mapping):
            self.spend(len(value))
            for key, item in value.items():
                self.weigh(key)
                self.weigh(item)
        elif isinstance(value, list | tuple | set):
            self.spend(len(value))
            for item in value:
                self.weigh(item)

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Price `left operator right`, for + * ** and %."""
        if operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self.make(len(left) + len(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            if abs(right) > 64 or abs(left) > 2**32:
                raise TemplateRefusalError("the chat template makes a number that is too large")
        elif isinstance(left, str):
            self.check_format(left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        for first, second in ((left, right), (right, left)):
            if isinstance(first, str | list | tuple) and isinstance(second, int):
                if len(first) * second > MAX_REPEAT:
                    raise TemplateRefusalError("the chat template makes a text that is too long")
                self.make(max(0, len(first) * second))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise TemplateRefusalError("the chat template makes a number that is too large")

    def check_format(self, form: str, *values: Any) -> None:
        """Price the filling in of values: each field may hold all of them, but none may be widened by much."""
        if WIDE_FIELD.search(form):
            raise TemplateRefusalError("the chat template formats a text that is too long")
        before = self.chars
        for value in values:
            self.weigh(value)
        self.make(len(form) + (form.count("%") + form.count("{")) * (before - self.chars))

    def check_method(self, owner: str | bytes | int, name: str, args: tuple[Any, ...]) -> None:
        """Price a method of a text or number that could make much out of little."""
        if name in PADDING:
            width = next((arg for arg in args if isinstance(arg, int)), 8)
            self.check_width(width)
            self.make(
                (1 if isinstance(owner, int) else len(owner) + 1) * (width if name == "expandtabs" else 1) + width
            )
        elif isinstance(owner, int):
            return
        elif name == "replace" and len(args) > 1:
            self.check_replace(owner, args[0], args[1])
        elif name == "join" and args and isinstance(args[0], list | tuple):
            self.check_join(owner, args[0])
        elif name == "translate" and args and isinstance(args[0], Mapping):
            longest = max((len(item) for item in args[0].values() if isinstance(item, str)), default=1)
            self.make(len(owner) * max(1, longest))

    def check_width(self, width: Any) -> None:
        """Refuse to pad or indent by very much."""
        if isinstance(width, int) and width > MAX_WIDTH:
            raise TemplateRefusalError("the chat template makes a text that is too long")

    def check_replace(self, text: Any, old: Any, new: Any) -> None:
        """Price `text.replace(old, new)`."""
        hits = text.count(old) if isinstance(old, type(text)) else 0
        self.make(len(text) + hits * len(new if isinstance(new, type(text)) else str(new)))

    def check_join(self, separator: Any, items: list[Any] | tuple[Any, ...]) -> None:
        """Price `separator.join(items)`."""
        self.weigh(items)
        self.make(len(str(separator)) * len(items))
