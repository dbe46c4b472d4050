"""`AdapterStore`: adapters in host memory, and which of them lie in the model's slots.

Reading, checking and packing happen in a thread of its own, beside the steps. An adapter that some request needs stays;
others are kept while there is room for so many, and those that were used longest ago go first, from memory as from
slots. One that went is read again when a request needs it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.errors import QuireError
from quire.layers.lora import LoRASlots, PackedAdapter
from quire.lora.adapter import Adapter, read_adapter
from quire.lora.request import LoRARequest
from quire.step import AdapterNews

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """An adapter in memory. users: requests that need it."""

    request: LoRARequest
    packed: PackedAdapter
    news: AdapterNews
    users: int = 0


class AdapterStore:
    """Adapters of one model.

    Args:
        slots: the model's. max_held: most adapters in host memory.
    """

    def __init__(self, slots: LoRASlots, max_held: int) -> None:
        self.slots, self._max_held = slots, max(max_held, slots.num_slots)
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by id, used longest ago first
        self._wanted: deque[LoRARequest] = deque()  # in the order in which they are to be read
        self._users: dict[int, int] = {}  # of adapters that are not there yet
        self._reading: tuple[LoRARequest, Future[tuple[Adapter, PackedAdapter]]] | None = None
        self._news: dict[int, AdapterNews] = {}
        self._in_slot: list[int | None] = [None] * slots.num_slots
        self._used_at = [0] * slots.num_slots  # number of the step
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-lora")

    # ---- in memory ----

    def prepare(self, request: LoRARequest) -> None:
        """See that an adapter is there, and stays until as many `release` have been called."""
        number = request.lora_int_id
        held = self._held.get(number)
        if held is not None:
            held.users += 1
            self._held.move_to_end(number)
            self._news[number] = held.news
            return
        if number not in self._users:
            self._wanted.append(request)
        self._users[number] = self._users.get(number, 0) + 1
        self._advance()

    def poll(self, wait: float = 0.0) -> dict[int, AdapterNews]:
        """Return, by id, what became of adapters that were asked for; with nothing to tell wait so many seconds."""
        if wait and not self._news and self._reading is not None:
            wait_for([self._reading[1]], timeout=wait)
        self._advance()
        news, self._news = self._news, {}
        return news

    def release(self, number: int) -> None:
        """Say that one of those who asked for it needs it no more."""
        held = self._held.get(number)
        if held is not None:
            held.users -= 1
            assert held.users >= 0, "released more often than asked for"
        elif number in self._users:
            self._users[number] -= 1
        self._advance()

    def forget(self, number: int) -> None:
        """Let an adapter go as soon as nobody needs it."""
        held = self._held.get(number)
        if held is not None:
            self._held.move_to_end(number, last=False)
            if not held.users:
                self._drop(number)

    def _advance(self) -> None:
        """Take in what was read, and begin to read the next one if there is room for it."""
        if self._reading is not None and self._reading[1].done():
            request, future = self._reading
            self._reading = None
            self._take(request, future)
        while self._reading is None and self._wanted and self._make_room():
            request = self._wanted.popleft()
            if self._users[request.lora_int_id] == 0:  # nobody waits for it any more
                del self._users[request.lora_int_id]
                continue
            self._reading = request, self._thread.submit(self._read, request)

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

    def _take(self, request: LoRARequest, future: Future[tuple[Adapter, PackedAdapter]]) -> None:
        number, users = request.lora_int_id, self._users.pop(request.lora_int_id)
        try:
            adapter, packed = future.result()
        except QuireError as error:
            self._news[number] = AdapterNews(error=error.message)
            return
        except (OSError, MemoryError) as error:
            message = f"{request.lora_path}: {type(error).__name__}: {error}"
            self._news[number] = AdapterNews(error=message)
            return
        news = AdapterNews(adapter.digest, adapter.vocab_size, adapter.num_logits)
        self._held[number] = _Held(request, packed, news, users)
        self._news[number] = news

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
