"""`LayerwiseReader`: how many layerwise blocks the steps of a run load from the host and store there.

The rule is the worker's (`kernels/gpu/layerwise.py`): a step loads, once, each layerwise block that holds tokens
computed before it of a sequence that it computes, and stores each that it writes. Copies within the device load their
sources and store their destinations, if these are layerwise.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from quire.step import SchedulerOutput, TransferOp


class LayerwiseContents(Protocol):
    """What is counted of a step, see `StepContents`."""

    num_layerwise_loads: int
    num_layerwise_stores: int
    streamed: float
    exchanged: float


class _Table:
    """A block table; of its layerwise blocks, the ids and their indices in the table, rising."""

    __slots__ = ("block_ids", "indices", "layerwise")

    def __init__(self, block_ids: list[int], first_layerwise: int) -> None:
        self.block_ids = block_ids
        self.indices: list[int] = []
        self.layerwise: list[int] = []
        self.extend(first_layerwise, 0)

    def extend(self, first_layerwise: int, start: int) -> None:
        """Find the layerwise blocks from index `start` on."""
        for index in range(start, len(self.block_ids)):
            if self.block_ids[index] >= first_layerwise:
                self.indices.append(index)
                self.layerwise.append(self.block_ids[index])


class LayerwiseReader:
    """Follows the block tables of a run; for models with one group of layers.

    Args:
        first_layerwise: id of the first layerwise block. share: of a block's layers, those that are streamed.
    """

    def __init__(self, first_layerwise: int, block_size: int, share: float) -> None:
        self._first_layerwise, self._block_size, self._share = first_layerwise, block_size, share
        self._tables: dict[str, _Table] = {}

    def read(self, step: SchedulerOutput, contents: LayerwiseContents) -> None:
        """Take in `step` and count what it streams."""
        first_layerwise, tables = self._first_layerwise, self._tables
        copies = [(each.block_id, each.key) for each in step.transfers if each.op is TransferOp.COPY]
        num_loads = sum(source >= first_layerwise for source, _ in copies)
        num_stores = sum(target >= first_layerwise for _, target in copies)
        contents.num_layerwise_loads, contents.num_layerwise_stores = num_loads, num_stores
        contents.exchanged = (num_loads + num_stores) * self._share
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            tables.pop(sequence_id, None)
        for fork in step.forks:
            if not fork.samples:
                tables[fork.sequence_id] = _Table(tables[fork.parent_id].block_ids.copy(), first_layerwise)
        starts: dict[str, int] = {}
        for new in step.new_sequences:
            tables[new.sequence_id] = _Table(list(new.block_ids[0]), first_layerwise)
            starts[new.sequence_id] = new.num_computed_tokens
        for data in step.continuing:
            starts[data.sequence_id] = data.num_computed_tokens
            self._grow(tables[data.sequence_id], data.new_block_ids, data.replaced_blocks)
        loads: set[int] = set()
        num_stores = 0
        for sequence_id, count in step.num_scheduled_tokens.items():
            table, start = tables[sequence_id], starts[sequence_id]
            if table.layerwise:
                loads.update(table.layerwise[: bisect_left(table.indices, -(-start // self._block_size))])
                first = bisect_left(table.indices, start // self._block_size)
                num_stores += bisect_left(table.indices, -(-(start + count) // self._block_size)) - first
        for fork in step.forks:
            if fork.samples:
                tables[fork.sequence_id] = _Table(tables[fork.parent_id].block_ids.copy(), first_layerwise)
        contents.num_layerwise_loads += len(loads)
        contents.num_layerwise_stores += num_stores
        contents.streamed = (len(loads) + num_stores) * self._share

    def _grow(self, table: _Table, new_block_ids: list[list[int]], replaced: list[tuple[int, int, int]]) -> None:
        start = len(table.block_ids)
        if new_block_ids:
            table.block_ids += new_block_ids[0]
        if replaced:
            for _, index, block_id in replaced:
                table.block_ids[index] = block_id
            table.indices, table.layerwise, start = [], [], 0
        table.extend(self._first_layerwise, start)
