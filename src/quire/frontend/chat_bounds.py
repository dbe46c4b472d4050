"""How much a chat template may do in the front: processor time, and characters of the texts that it makes.

Whatever could make something much larger than what it is made of is priced before it is done. All else that the core
(`chat_core`) has is linear in its input. A rendering that would need more is not refused; it goes to a worker process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any

from jinja2 import Undefined

FRONT_SECONDS = 0.05  # of this thread's processor time
MAX_TEXT = 2**20  # characters of one text
MAX_MADE_CHARS = 2**24  # of all; templates that add to a text message by message copy it each time
MAX_DEPTH = 100  # of lists in lists
MAX_INT_BITS = 2**12
MAX_REPEAT = 2**12
MAX_PRODUCT = 2**24  # of the lengths of two texts, where Python may compare all characters with all others
MAX_NEEDLE = 2**8  # characters of what is looked for in a collection
ITEM_CHARS = 8  # what an item of a list costs, in characters
FLOAT_CHARS = 24
STEPS_PER_LOOK = 32
CHARS_PER_STEP = 64


class BeyondCoreError(Exception):
    """A rendering does more than it may in the front, or something that the core does not have."""


class _Left:
    """What is left of a budget."""

    __slots__ = ("chars", "deadline", "steps")

    def __init__(self, chars: int = 0, deadline: float = 0.0) -> None:
        self.chars = chars
        self.deadline = deadline
        self.steps = 0  # until the next look at the clock


class _ThisThread(threading.local):
    left = _Left()


class Budget:
    """What is left for the rendering that runs in this thread. There is nothing outside a rendering."""

    def __init__(self) -> None:
        self._this_thread = _ThisThread()  # looked at once in each method: that is slow

    def refill(self, seconds: float) -> None:
        """Begin a rendering."""
        self._this_thread.left = _Left(MAX_MADE_CHARS, time.thread_time() + seconds)

    def spend(self, steps: int = 1) -> None:
        """Take steps; raise `BeyondCoreError` when no time is left."""
        left = self._this_thread.left
        left.steps -= steps
        if left.steps <= 0:
            left.steps = STEPS_PER_LOOK
            if time.thread_time() > left.deadline:
                raise BeyondCoreError

    def make(self, chars: int) -> None:
        """Take the characters of a text off that is about to be made, and the time to make it."""
        left = self._this_thread.left
        left.chars -= chars
        if chars > MAX_TEXT or left.chars < 0:
            raise BeyondCoreError
        if chars > CHARS_PER_STEP:
            self.spend(chars // CHARS_PER_STEP)

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield from a collection at the price of a step each."""
        for item in items:
            self.spend()
            yield item

    def read(self, value: Any) -> Any:
        """Return a value that is about to be read once, paid for; what is in a list is not looked at."""
        if isinstance(value, str | list | tuple | dict) and len(value) > CHARS_PER_STEP:
            if len(value) > MAX_TEXT:
                raise BeyondCoreError
            self.spend(len(value) // CHARS_PER_STEP)
        return value

    def weigh(self, value: Any, item_chars: int = ITEM_CHARS) -> Any:
        """Return a value, the text of which is paid for; one long text may stand in it many times."""
        if isinstance(value, str):
            self.make(len(value))
        else:
            left = self._this_thread.left
            self._weigh(value, left, left.chars - MAX_TEXT, item_chars, 0)
        return value

    def _weigh(self, value: Any, left: _Left, floor: int, item_chars: int, depth: int) -> None:
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, dict | list | tuple):
            if depth >= MAX_DEPTH:
                raise BeyondCoreError
            self.make(item_chars * len(value))
            for item in value:
                self.spend()
                self._weigh(item, left, floor, item_chars, depth + 1)
            if isinstance(value, dict):
                for item in value.values():
                    self._weigh(item, left, floor, item_chars, depth + 1)
        elif isinstance(value, int):
            if value.bit_length() > 64:
                self.make(value.bit_length() // 3)
        elif isinstance(value, float):
            self.make(FLOAT_CHARS)
        elif not isinstance(value, NoneType | Undefined):
            raise BeyondCoreError
        if left.chars < floor:
            raise BeyondCoreError

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Price `left operator right`, for arithmetic: of numbers, of texts and lists with +, of short texts with *."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            bits = [number.bit_length() for number in (left, right) if isinstance(number, int)]
            if (sum(bits) if operator == "*" else max(bits, default=0)) > MAX_INT_BITS:
                raise BeyondCoreError
        elif operator == "+":
            for kind, price in ((str, 1), (list, ITEM_CHARS), (tuple, ITEM_CHARS)):
                if isinstance(left, kind) and isinstance(right, kind):
                    self.make((len(left) + len(right)) * price)
                    return
            raise BeyondCoreError
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str) and isinstance(times, int) and len(text) * times <= MAX_REPEAT:
                    return
            raise BeyondCoreError
        else:
            raise BeyondCoreError

    def check_product(self, text: str, *others: Any) -> None:
        """Price an operation that may compare all characters of a text with all of another."""
        self.read(text)
        if any(isinstance(other, str) and len(text) * len(other) > MAX_PRODUCT for other in others):
            raise BeyondCoreError

    def needle(self, value: Any) -> Any:
        """Return what is about to be looked for in a collection; only what is soon known to differ from an item."""
        if isinstance(value, str) and len(value) <= MAX_NEEDLE:
            return value
        if isinstance(value, int | float | NoneType | Undefined):
            return value
        raise BeyondCoreError

    def check_replace(self, text: Any, old: Any, new: Any) -> None:
        """Price `text.replace(old, new)`."""
        if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
            raise BeyondCoreError
        self.make(len(text) + text.count(old) * len(new))
