"""Measures what other ways to allocate KV slots would waste on the same run: the case for paging, in numbers.

Four schemes, for the sequences that run at once in a simulated replay (terms of Kwon et al. 2023, section 3.1):

- *contiguous*: one buffer of (max_num_seqs, max_model_len) slots; each sequence has a row to itself.
- *power of two*: each sequence has one piece of as many slots as the next power of two above its final length, from
  a buddy allocator (Knowlton 1965).
- *paged*: blocks of `block_size` slots, taken as the sequence grows; and *paged, shared*: as the engine really does it,
  with common prefixes stored once.

A slot is *used* if it holds a token, *reserved* if a later token of its sequence will be stored there, and *internal*
waste if it is allocated to a sequence that never fills it. It is *external* waste if it is allocated to no sequence and
cannot be: idle rows of the buffer, holes below the highest piece of the buddy allocator. A free block can always be
allocated. Where layers have several block tables, the first one is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.engine.messages import Ready
from quire.simulate.contents import StepContents
from quire.simulate.trace import TraceRequest
from quire.step import ContinuingSequenceData, NewSequenceData, SchedulerOutput

SCHEMES = ("contiguous", "power of two", "paged", "paged, shared")


@dataclass(slots=True)
class Slots:
    """Slots summed over time [slot * s], and `peak`: the most that were ever allocated."""

    used: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    peak: int = 0

    def add(self, seconds: float, used: int, reserved: int, internal: int, external: int) -> None:
        """Add a state that lasted `seconds`."""
        self.used += used * seconds
        self.reserved += reserved * seconds
        self.internal += internal * seconds
        self.external += external * seconds
        self.peak = max(self.peak, used + reserved + internal + external)

    @property
    def total(self) -> float:
        """Number of all slots, used or not."""
        return self.used + self.reserved + self.internal + self.external


class BuddyAllocator:
    """Allocates pieces of powers of two, lowest address first, from a memory that grows as needed."""

    def __init__(self) -> None:
        self._free: dict[int, set[int]] = {}
        self._pieces: dict[str, tuple[int, int]] = {}
        self._size = 0

    @property
    def extent(self) -> int:
        """One more than the highest address allocated."""
        return max((start + size for start, size in self._pieces.values()), default=0)

    def allocate(self, name: str, size: int) -> None:
        """Allocate a piece of `size`, a power of two, for `name`."""
        while True:
            fitting = [have for have, starts in self._free.items() if have >= size and starts]
            if fitting:
                break
            self._grow(size)
        have = min(fitting)
        start = min(self._free[have])
        self._free[have].remove(start)
        while have > size:
            have //= 2
            self._free.setdefault(have, set()).add(start + have)
        self._pieces[name] = (start, size)

    def free(self, name: str) -> None:
        """Free the piece, and join it with its buddy as long as that is free."""
        start, size = self._pieces.pop(name)
        while size < self._size:
            buddy = start ^ size
            starts = self._free.get(size, set())
            if buddy not in starts:
                break
            starts.remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free.setdefault(size, set()).add(start)

    def _grow(self, size: int) -> None:
        """Double the memory, at least to `size`."""
        if self._size == 0:
            self._size = size
            self._free.setdefault(size, set()).add(0)
            return
        start, new = self._size, self._size
        whole = self._free.get(start, set())
        self._size *= 2
        if 0 in whole:
            whole.remove(0)
            start, new = 0, self._size
        self._free.setdefault(new, set()).add(start)


@dataclass(slots=True)
class WasteMeter:
    """An observer of a simulated run that accounts for all schemes side by side.

    Args:
        requests: of the run. `begin` must be called before the first step.

    Attributes:
        slots: by scheme. max_paged_waste: most slots that a sequence had in blocks beyond its tokens.
    """

    requests: Sequence[TraceRequest]
    slots: dict[str, Slots] = field(default_factory=lambda: {scheme: Slots() for scheme in SCHEMES})
    max_paged_waste: int = 0
    block_size: int = 0
    max_model_len: int = 0
    max_num_seqs: int = 0
    _finals: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)
    _tables: dict[str, list[int]] = field(default_factory=dict)
    _owners: Counter[int] = field(default_factory=Counter)
    _buddies: BuddyAllocator = field(default_factory=BuddyAllocator)

    def begin(self, ready: Ready) -> None:
        """Set the sizes that the engine has chosen."""
        self.block_size, self.max_model_len, self.max_num_seqs = (
            ready.block_size,
            ready.max_model_len,
            ready.max_num_seqs,
        )
        self._finals = {
            str(request.number): min(request.num_tokens - 1, self.max_model_len - 1) for request in self.requests
        }

    def __call__(self, plan: SchedulerOutput, contents: StepContents, seconds: float) -> None:
        """Add a step that lasted `seconds`: its sequences have their slots for as long."""
        for name in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            if self._held.pop(name, None) is not None:
                self._drop(self._tables.pop(name))
                self._buddies.free(name)
        for new in plan.new_sequences:
            self._tables[new.sequence_id] = list(new.block_ids[0])
            self._owners.update(new.block_ids[0])
            self._buddies.allocate(new.sequence_id, _power_of_two(self._finals[new.sequence_id]))
        going: list[ContinuingSequenceData | NewSequenceData] = [*plan.continuing, *plan.new_sequences]
        for data in going:
            self._held[data.sequence_id] = data.num_computed_tokens + plan.num_scheduled_tokens.get(data.sequence_id, 0)
        for data in plan.continuing:
            table = self._tables[data.sequence_id]
            for group, index, block_id in data.replaced_blocks:
                if group == 0:
                    self._drop([table[index]])
                    self._owners[block_id] += 1
                    table[index] = block_id
            if data.new_block_ids:
                table += data.new_block_ids[0]
                self._owners.update(data.new_block_ids[0])
        self._add(seconds)

    def _drop(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._owners[block_id] -= 1
            if not self._owners[block_id]:
                del self._owners[block_id]

    def _add(self, seconds: float) -> None:
        size = self.block_size
        used = sum(self._held.values())
        finals = sum(self._finals[name] for name in self._held)
        pieces = sum(_power_of_two(self._finals[name]) for name in self._held)
        paged = 0
        for name, tokens in self._held.items():
            waste = len(self._tables[name]) * size - tokens
            self.max_paged_waste = max(self.max_paged_waste, waste)
            paged += waste
        rows = len(self._held) * self.max_model_len
        idle = (self.max_num_seqs - len(self._held)) * self.max_model_len
        self.slots["contiguous"].add(seconds, used, finals - used, rows - finals, idle)
        holes = max(self._buddies.extent - pieces, 0)
        self.slots["power of two"].add(seconds, used, finals - used, pieces - finals, holes)
        # The rest of a last block may be written later or not; it is counted as never, which is the larger waste.
        self.slots["paged"].add(seconds, used, 0, paged, 0)
        self.slots["paged, shared"].add(seconds, max(len(self._owners) * size - paged, 0), 0, paged, 0)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def waste_report(slots: Mapping[str, Slots]) -> dict[str, dict[str, float]]:
    """Return for each scheme its shares of the slot-seconds, its peak of slots, and its slots relative to paging."""
    paged = slots["paged"].total or 1.0
    report = {}
    for scheme, of_scheme in slots.items():
        total = of_scheme.total or 1.0
        report[scheme] = {
            "used": of_scheme.used / total,
            "reserved": of_scheme.reserved / total,
            "internal": of_scheme.internal / total,
            "external": of_scheme.external / total,
            "peak_slots": of_scheme.peak,
            "against_paged": of_scheme.total / paged,
        }
    return report


def waste_table(report: Mapping[str, Mapping[str, float]]) -> str:
    """Return the report as text."""
    names = ("used", "reserved", "internal", "external")
    lines = [f"  {'share of KV slots over time':<28}" + "".join(f"{name:>10}" for name in names)]
    lines[0] += f"{'x paged':>10}{'most slots':>14}"
    for scheme, row in report.items():
        cells = "".join(f"{row[name]:>10.2%}" for name in names)
        lines.append(f"  {scheme:<28}{cells}{row['against_paged']:>10.2f}{int(row['peak_slots']):>14,}")
    return "\n".join(lines)
