"""`ThinReader`: how many thin blocks the steps of a run bring from the host and take there, by the worker's own rule.

A step loads, once, each thin block that holds tokens computed before it of a sequence that it computes, and stores each
that it writes. Copies within the device load their sources and store their destinations, if these are thin.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from quire.step import SchedulerOutput, TransferOp


class ThinContents(Protocol):
    """What is to be told of a step, see `StepContents`."""

    num_thin_loads: int
    num_thin_stores: int
    streamed: float
    exchanged: float


class _Table:
    """A block table; of its thin blocks, the ids and where in the table they stand, rising."""

    __slots__ = ("block_ids", "places", "thin")

    def __init__(self, block_ids: list[int], first_thin: int) -> None:
        self.block_ids = block_ids
        self.places: list[int] = []
        self.thin: list[int] = []
        self.look(first_thin, 0)

    def look(self, first_thin: int, start: int) -> None:
        """Find the thin blocks from place `start` on."""
        for place in range(start, len(self.block_ids)):
            if self.block_ids[place] >= first_thin:
                self.places.append(place)
                self.thin.append(self.block_ids[place])


class ThinReader:
    """Follows the block tables of a run; for models with one group of layers.

    Args:
        first_thin: id of the first thin block. share: of a block's layers, those that are streamed.
    """

    def __init__(self, first_thin: int, block_size: int, share: float) -> None:
        self._first_thin, self._block_size, self._share = first_thin, block_size, share
        self._tables: dict[str, _Table] = {}

    def read(self, step: SchedulerOutput, contents: ThinContents) -> None:
        """Take in `step` and count what it streams."""
        first_thin, tables = self._first_thin, self._tables
        copies = [(each.block_id, each.key) for each in step.transfers if each.op is TransferOp.COPY]
        num_loads = sum(source >= first_thin for source, _ in copies)
        num_stores = sum(target >= first_thin for _, target in copies)
        contents.num_thin_loads, contents.num_thin_stores = num_loads, num_stores
        contents.exchanged = (num_loads + num_stores) * self._share
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            tables.pop(sequence_id, None)
        for fork in step.forks:
            if not fork.samples:
                tables[fork.sequence_id] = _Table(tables[fork.parent_id].block_ids.copy(), first_thin)
        starts: dict[str, int] = {}
        for new in step.new_sequences:
            tables[new.sequence_id] = _Table(list(new.block_ids[0]), first_thin)
            starts[new.sequence_id] = new.num_computed_tokens
        for data in step.continuing:
            starts[data.sequence_id] = data.num_computed_tokens
            self._grow(tables[data.sequence_id], data.new_block_ids, data.replaced_blocks)
        loads: set[int] = set()
        num_stores = 0
        for sequence_id, count in step.num_scheduled_tokens.items():
            table, start = tables[sequence_id], starts[sequence_id]
            if table.thin:
                loads.update(table.thin[: bisect_left(table.places, -(-start // self._block_size))])
                first = bisect_left(table.places, start // self._block_size)
                num_stores += bisect_left(table.places, -(-(start + count) // self._block_size)) - first
        for fork in step.forks:
            if fork.samples:
                tables[fork.sequence_id] = _Table(tables[fork.parent_id].block_ids.copy(), first_thin)
        contents.num_thin_loads += len(loads)
        contents.num_thin_stores += num_stores
        contents.streamed = (len(loads) + num_stores) * self._share

    def _grow(self, table: _Table, new_block_ids: list[list[int]], replaced: list[tuple[int, int, int]]) -> None:
        start = len(table.block_ids)
        if new_block_ids:
            table.block_ids += new_block_ids[0]
        if replaced:
            for _, place, block_id in replaced:
                table.block_ids[place] = block_id
            table.places, table.thin, start = [], [], 0
        table.look(self._first_thin, start)
