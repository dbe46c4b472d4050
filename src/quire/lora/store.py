"""`AdapterStore`: adapters in host memory, and which of them are in the model's slots.

Adapters are read, checked and packed in a thread of the store, beside the steps. An adapter with users stays loaded;
others stay while there is room, and the least recently used are unloaded first, from memory as from slots. An unloaded
adapter is read again when a request needs it.
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
from quire.step import AdapterResult

logger = logging.getLogger(__name__)


MAX_OVERTAKE_SECONDS = 5.0  # how long users of loaded adapters may overtake an adapter that waits for room


@dataclass(slots=True)
class _Loaded:
    """An adapter in host memory, the users that need it, and whether it is dropped with the last of them."""

    path: Path
    packed: PackedAdapter
    result: AdapterResult
    users: set[str]
    is_unloaded: bool = False


@dataclass(slots=True)
class _Waiting:
    """An adapter to be read, or a loaded one whose new users wait for their turn; since [monotonic seconds]."""

    request: LoRARequest
    since: float
    users: set[str]


class AdapterStore:
    """Adapters of one model.

    Args:
        slots: the model's. max_loaded: most adapters in host memory.
        clock: monotonic seconds.
    """

    def __init__(self, slots: LoRASlots, max_loaded: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots, self._max_loaded, self._clock = slots, max(max_loaded, slots.num_slots), clock
        self._loaded: OrderedDict[int, _Loaded] = OrderedDict()  # by number, least recently used first
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()  # by number, in order of arrival
        self._reading: tuple[LoRARequest, Future[tuple[Adapter, PackedAdapter]]] | None = None
        self._results: dict[str, AdapterResult] = {}  # by user, not yet polled
        self._in_slot: list[int | None] = [None] * slots.num_slots
        self._used_at = [0] * slots.num_slots  # number of the step
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-lora")

    # ---- in memory ----

    def prepare(self, request: LoRARequest, user: str) -> None:
        """Load an adapter for a user if necessary, and keep it until `release`; `poll` returns the result.

        While another adapter has waited for too long, loaded adapters get no more users, so that one can be unloaded.
        An adapter whose number is that of another one, with another path, is refused.
        """
        number = request.lora_int_id
        known = self._path_of(number)
        if known is not None and known != Path(request.lora_path):
            error = f"lora_int_id {number} is that of the adapter in {known}; another adapter must have another one"
            self._results[user] = AdapterResult(error=error)
            return
        first = next(iter(self._waiting.values()), None)
        may_overtake = first is None or self._clock() - first.since < MAX_OVERTAKE_SECONDS
        if number in self._loaded and number not in self._waiting and may_overtake:
            self._add_users(number, {user})
            return
        waiting = self._waiting.setdefault(number, _Waiting(request, self._clock(), set()))
        waiting.users.add(user)
        self._advance()

    def poll(self, wait: float = 0.0) -> dict[str, AdapterResult]:
        """Return the results of finished loads by user; with none, wait up to `wait` seconds for one."""
        if wait and not self._results and self._reading is not None:
            wait_for([self._reading[1]], timeout=wait)
        self._advance()
        results, self._results = self._results, {}
        return results

    def release(self, number: int, user: str) -> None:
        """End a use of an adapter, or the wait for it."""
        self._results.pop(user, None)
        for place in (self._loaded, self._waiting):
            if number in place:
                place[number].users.discard(user)
        if number in self._loaded and self._loaded[number].is_unloaded:
            self.unload(number)
        self._advance()

    def unload(self, number: int) -> None:
        """Unload an adapter as soon as it has no users."""
        loaded = self._loaded.get(number)
        if loaded is not None:
            loaded.is_unloaded = True
            if not loaded.users:
                self._drop(number)

    def _path_of(self, number: int) -> Path | None:
        """Return the path of an adapter that is loaded, or is to be."""
        if number in self._waiting:
            return Path(self._waiting[number].request.lora_path)
        loaded = self._loaded.get(number)
        return None if loaded is None else loaded.path

    def _add_users(self, number: int, users: set[str]) -> None:
        loaded = self._loaded[number]
        loaded.users |= users
        self._loaded.move_to_end(number)
        self._results.update(dict.fromkeys(users, loaded.result))

    def _advance(self) -> None:
        """Take over the adapter that was read; serve waiting users in order, and read the next adapter if it fits."""
        if self._reading is not None:
            request, future = self._reading
            if not future.done():
                return
            self._reading = None
            self._finish_read(self._waiting.pop(request.lora_int_id), future)
        while self._waiting:
            number, waiting = next(iter(self._waiting.items()))
            if not waiting.users:
                del self._waiting[number]
            elif number in self._loaded:
                del self._waiting[number]
                self._add_users(number, waiting.users)
            elif self._make_room():
                self._reading = waiting.request, self._thread.submit(self._read, waiting.request)
                return
            else:
                return

    def _make_room(self) -> bool:
        while len(self._loaded) >= self._max_loaded:
            unused = next((number for number, loaded in self._loaded.items() if not loaded.users), None)
            if unused is None:
                return False
            self._drop(unused)
        return True

    def _drop(self, number: int) -> None:
        del self._loaded[number]
        for slot, in_slot in enumerate(self._in_slot):
            if in_slot == number:
                self._in_slot[slot] = None
                self.slots.fill(slot, {}, self.slots.base_vocab)

    def _read(self, request: LoRARequest) -> tuple[Adapter, PackedAdapter]:
        """Read, check and pack one adapter, in the store's thread."""
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

    def _finish_read(self, waiting: _Waiting, future: Future[tuple[Adapter, PackedAdapter]]) -> None:
        try:
            adapter, packed = future.result()
        except QuireError as error:
            failure = error.message
        except Exception as error:  # boundary: whatever a folder holds ends its own requests only
            failure = f"{waiting.request.lora_path}: {type(error).__name__}: {error}"
        else:
            number = waiting.request.lora_int_id
            result = AdapterResult(adapter.digest, adapter.vocab_size, adapter.num_logits)
            self._loaded[number] = _Loaded(Path(waiting.request.lora_path), packed, result, set())
            self._add_users(number, waiting.users)
            return
        self._results.update(dict.fromkeys(waiting.users, AdapterResult(error=failure)))

    # ---- in slots ----

    def place(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the slots of the loaded adapters of a step; those without one get the least recently used slots."""
        self._num_steps += 1
        needed = set(numbers)
        found = {number: slot for slot, number in enumerate(self._in_slot) if number is not None and number in needed}
        for slot in found.values():
            self._used_at[slot] = self._num_steps
        for number in sorted(needed - found.keys()):
            slot = min(
                (slot for slot in range(len(self._in_slot)) if self._used_at[slot] < self._num_steps),
                key=lambda slot: (self._in_slot[slot] is not None, self._used_at[slot]),
            )
            loaded = self._loaded[number]
            self.slots.fill(slot, loaded.packed, loaded.result.num_logits)
            self._in_slot[slot], self._used_at[slot] = number, self._num_steps
            found[number] = slot
        return found

    def slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slot of each row of a step whose adapters are `numbers`, int64 [S], 0 for none; -1 for none."""
        needed = np.unique(numbers[numbers > 0])
        slots = np.full(len(numbers), -1, np.int64)
        for number, slot in self.place(needed.tolist()).items() if len(needed) else ():
            slots[numbers == number] = slot
        return slots

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
