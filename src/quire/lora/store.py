"""`AdapterStore`: adapters in host memory, and which of them lie in the model's slots.

Reading, checking and packing happen in a thread of its own, beside the steps. An adapter that some request needs stays;
others are kept while there is room for so many, and those that were used longest ago go first, from memory as from
slots. One that went is read again when a request needs it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.engine_request import LoRARequest
from quire.errors import QuireError
from quire.layers.lora import LoRASlots, PackedAdapter
from quire.lora.adapter import Adapter, read_adapter
from quire.step import AdapterNews

logger = logging.getLogger(__name__)


PATIENCE_SECONDS = 5.0  # so long may users of adapters that are there overtake one whose adapter finds no room


@dataclass(slots=True)
class _Held:
    """An adapter in memory. users: who needs it."""

    packed: PackedAdapter
    news: AdapterNews
    users: set[str]


@dataclass(slots=True)
class _Wanted:
    """An adapter that is to be read, or lent to further users when their turn has come; since [monotonic seconds]."""

    request: LoRARequest
    since: float
    users: set[str]


class AdapterStore:
    """Adapters of one model.

    Args:
        slots: the model's. max_held: most adapters in host memory.
        clock: monotonic seconds.
    """

    def __init__(self, slots: LoRASlots, max_held: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots, self._max_held, self._clock = slots, max(max_held, slots.num_slots), clock
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by number, used longest ago first
        self._wanted: OrderedDict[int, _Wanted] = OrderedDict()  # by number, in the order in which they were asked for
        self._reading: tuple[LoRARequest, Future[tuple[Adapter, PackedAdapter]]] | None = None
        self._news: dict[str, AdapterNews] = {}
        self._in_slot: list[int | None] = [None] * slots.num_slots
        self._used_at = [0] * slots.num_slots  # number of the step
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-lora")

    # ---- in memory ----

    def prepare(self, request: LoRARequest, user: str) -> None:
        """See that an adapter is there for a user, and stays until `release`; `poll` says when, or why not.

        Where one has waited for too long, adapters that are there get no more users, so that one of them can go.
        """
        number = request.lora_int_id
        first = next(iter(self._wanted.values()), None)
        overtakes = first is None or self._clock() - first.since < PATIENCE_SECONDS
        if number in self._held and number not in self._wanted and overtakes:
            self._lend(number, {user})
            return
        wanted = self._wanted.setdefault(number, _Wanted(request, self._clock(), set()))
        wanted.users.add(user)
        self._advance()

    def poll(self, wait: float = 0.0) -> dict[str, AdapterNews]:
        """Return, by user, what became of what was asked for; with nothing to tell wait so many seconds."""
        if wait and not self._news and self._reading is not None:
            wait_for([self._reading[1]], timeout=wait)
        self._advance()
        news, self._news = self._news, {}
        return news

    def release(self, number: int, user: str) -> None:
        """Say that one who asked for an adapter needs it no more, or waits for it no more."""
        self._news.pop(user, None)
        for place in (self._held, self._wanted):
            if number in place:
                place[number].users.discard(user)
        self._advance()

    def forget(self, number: int) -> None:
        """Let an adapter go as soon as nobody needs it."""
        held = self._held.get(number)
        if held is not None:
            self._held.move_to_end(number, last=False)
            if not held.users:
                self._drop(number)

    def _lend(self, number: int, users: set[str]) -> None:
        held = self._held[number]
        held.users |= users
        self._held.move_to_end(number)
        self._news.update(dict.fromkeys(users, held.news))

    def _advance(self) -> None:
        """Take in what was read; serve those who wait, in order, and read the next adapter if there is room for it."""
        if self._reading is not None:
            request, future = self._reading
            if not future.done():
                return
            self._reading = None
            self._take(self._wanted.pop(request.lora_int_id), future)
        while self._wanted:
            number, wanted = next(iter(self._wanted.items()))
            if not wanted.users:  # nobody waits for it any more
                del self._wanted[number]
            elif number in self._held:
                del self._wanted[number]
                self._lend(number, wanted.users)
            elif self._make_room():
                self._reading = wanted.request, self._thread.submit(self._read, wanted.request)
                return
            else:
                return

    def _make_room(self) -> bool:
        while len(self._held) >= self._max_held:
            idle = next((number for number, held in self._held.items() if not held.users), None)
            if idle is None:
                return False
            self._drop(idle)
        return True

    def _drop(self, number: int) -> None:
        del self._held[number]
        for slot, there in enumerate(self._in_slot):
            if there == number:
                self._in_slot[slot] = None
                self.slots.fill(slot, {}, self.slots.base_vocab)

    def _read(self, request: LoRARequest) -> tuple[Adapter, PackedAdapter]:
        """The thread: read, check and pack one adapter."""
        started, slots = time.perf_counter(), self.slots
        adapter = read_adapter(
            Path(request.lora_path).expanduser(),
            slots.targets,
            max_rank=slots.max_rank,
            vocab_size=slots.base_vocab,
            extra_vocab=slots.extra_vocab,
        )
        packed = slots.pack(adapter.changes)
        adapter.changes.clear()
        logger.info("adapter %s: loaded in %.2f s", request.lora_name, time.perf_counter() - started)
        return adapter, packed

    def _take(self, wanted: _Wanted, future: Future[tuple[Adapter, PackedAdapter]]) -> None:
        try:
            adapter, packed = future.result()
        except QuireError as error:
            self._news.update(dict.fromkeys(wanted.users, AdapterNews(error=error.message)))
            return
        except (OSError, MemoryError) as error:
            message = f"{wanted.request.lora_path}: {type(error).__name__}: {error}"
            self._news.update(dict.fromkeys(wanted.users, AdapterNews(error=message)))
            return
        news = AdapterNews(adapter.digest, adapter.vocab_size, adapter.num_logits)
        number = wanted.request.lora_int_id
        self._held[number] = _Held(packed, news, set())
        self._lend(number, wanted.users)

    # ---- in slots ----

    def place(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the slots of the adapters of a step, which are there; those that lack one get it from others."""
        self._num_steps += 1
        wanted = set(numbers)
        found = {there: slot for slot, there in enumerate(self._in_slot) if there in wanted and there is not None}
        for slot in found.values():
            self._used_at[slot] = self._num_steps
        for number in sorted(wanted - found.keys()):
            slot = min(
                (slot for slot in range(len(self._in_slot)) if self._used_at[slot] < self._num_steps),
                key=lambda slot: (self._in_slot[slot] is not None, self._used_at[slot]),
            )
            held = self._held[number]
            self.slots.fill(slot, held.packed, held.news.num_logits)
            self._in_slot[slot], self._used_at[slot] = number, self._num_steps
            found[number] = slot
        return found

    def slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slot of each row of a step whose adapters are `numbers`, int64 [S], 0 for none; -1 for none."""
        wanted = np.unique(numbers[numbers > 0])
        slots = np.full(len(numbers), -1, np.int64)
        for number, slot in self.place(wanted.tolist()).items() if len(wanted) else ():
            slots[numbers == number] = slot
        return slots

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
