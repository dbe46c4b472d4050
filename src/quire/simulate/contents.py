"""`StepContents` says what a step's duration depends on; `StepReader` finds it in the `SchedulerOutput`s of a run.

Both the simulated executor and the calibration of a real one read steps here, so that a cost model is applied to what
it was fitted to. `LayerwiseReader` counts the layerwise blocks that steps load from the host and store there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from quire.step import ContinuingSequenceData, NewSequenceData, SchedulerOutput, Tier, TransferOp

Windows = tuple[tuple[int, float], ...]  # (sliding window in tokens, share of the layers that have it)


@dataclass(slots=True)
class StepContents:
    """Describes one step in numbers.

    Attributes:
        num_tokens: computed. num_sequences: that have some of them. num_sampled: that get a new token.
        prefill_pairs: (query, key) pairs that attention compares, over sequences with more than one query.
        decode_context: positions that attention reads for sequences with one query. Both are means over layers.
        num_new: sequences that are new to the worker. num_new_known_tokens: the tokens it is sent of them.
        num_layerwise_loads, num_layerwise_stores: layerwise blocks loaded from the host, and stored there.
        streamed: both, in as many whole blocks as have that many bytes.
        exchanged: the same of copies within the device from and to layerwise blocks, beside which nothing is computed.
        num_moved_blocks: copied between device and host. num_disk_blocks: to or from disk.
        is_new_shape: whether no recent step had as many tokens, sequences and samples (`worker/graphs.py` records one
            program for each shape).
    """

    num_tokens: int = 0
    num_sequences: int = 0
    num_sampled: int = 0
    prefill_pairs: float = 0.0
    decode_context: float = 0.0
    num_new: int = 0
    num_new_known_tokens: int = 0
    num_layerwise_loads: int = 0
    num_layerwise_stores: int = 0
    streamed: float = 0.0
    exchanged: float = 0.0
    num_moved_blocks: int = 0
    num_disk_blocks: int = 0
    is_new_shape: bool = False


class Row:
    """A sequence as the worker knows it: how many tokens it has, and what is sampled for it each time."""

    __slots__ = ("num_known", "sample")

    def __init__(self, num_known: int, sample: list[int]) -> None:
        self.num_known = num_known
        self.sample = sample


def windows_of(layer_windows: Sequence[int | None]) -> Windows:
    """Return the distinct sliding windows and their shares of the layers; layers without one are left out."""
    windows = [window for window in layer_windows if window is not None]
    return tuple((window, windows.count(window) / len(layer_windows)) for window in sorted(set(windows)))


def attended(start: int, count: int, windows: Windows = ()) -> float:
    """Return the keys that queries at positions `start` to `start + count - 1` attend to, as a mean over layers."""
    whole = count * start + count * (count + 1) // 2
    if not windows:
        return whole
    total = whole * (1.0 - sum(share for _, share in windows))
    for window, share in windows:
        growing = min(max(window - start, 0), count)  # queries that do not see a full window behind them
        total += share * (growing * start + growing * (growing + 1) // 2 + (count - growing) * window)
    return total


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

    The rule is the worker's (`kernels/gpu/layerwise.py`): a step loads, once, each layerwise block that holds tokens
    computed before it of a sequence that it computes, and stores each that it writes. Copies within the device load
    their sources and store their destinations, if these are layerwise.

    Args:
        first_layerwise: id of the first layerwise block. share: of a block's layers, those that are streamed.
    """

    def __init__(self, first_layerwise: int, block_size: int, share: float) -> None:
        self._first_layerwise, self._block_size, self._share = first_layerwise, block_size, share
        self._tables: dict[str, _Table] = {}

    def read(self, plan: SchedulerOutput, contents: StepContents) -> None:
        """Process `step` and count the blocks that it streams."""
        first_layerwise, tables = self._first_layerwise, self._tables
        copies = [(each.block_id, each.key) for each in plan.transfers if each.op is TransferOp.COPY]
        num_loads = sum(source >= first_layerwise for source, _ in copies)
        num_stores = sum(target >= first_layerwise for _, target in copies)
        contents.num_layerwise_loads, contents.num_layerwise_stores = num_loads, num_stores
        contents.exchanged = (num_loads + num_stores) * self._share
        for sequence_id in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            tables.pop(sequence_id, None)
        for fork in plan.forks:
            if not fork.samples:
                tables[fork.sequence_id] = _Table(tables[fork.parent_id].block_ids.copy(), first_layerwise)
        starts: dict[str, int] = {}
        for new in plan.new_sequences:
            tables[new.sequence_id] = _Table(list(new.block_ids[0]), first_layerwise)
            starts[new.sequence_id] = new.num_computed_tokens
        for data in plan.continuing:
            starts[data.sequence_id] = data.num_computed_tokens
            self._grow(tables[data.sequence_id], data.new_block_ids, data.replaced_blocks)
        loads: set[int] = set()
        num_stores = 0
        for sequence_id, count in plan.num_scheduled_tokens.items():
            table, start = tables[sequence_id], starts[sequence_id]
            if table.layerwise:
                loads.update(table.layerwise[: bisect_left(table.indices, -(-start // self._block_size))])
                first = bisect_left(table.indices, start // self._block_size)
                num_stores += bisect_left(table.indices, -(-(start + count) // self._block_size)) - first
        for fork in plan.forks:
            if fork.samples:
                tables[fork.sequence_id] = _Table(tables[fork.parent_id].block_ids.copy(), first_layerwise)
        contents.num_layerwise_loads += len(loads)
        contents.num_layerwise_stores += num_stores
        contents.streamed = (len(loads) + num_stores) * self._share

    def _grow(
        self, table: _Table, new_block_ids: Sequence[list[int]], replaced: Sequence[tuple[int, int, int]]
    ) -> None:
        start = len(table.block_ids)
        if new_block_ids:
            table.block_ids += new_block_ids[0]
        if replaced:
            for _, index, block_id in replaced:
                table.block_ids[index] = block_id
            table.indices, table.layerwise, start = [], [], 0
        table.extend(self._first_layerwise, start)


class StepReader:
    """Follows the sequences of a run; finds what is in each step, and which sequences are sampled.

    Args:
        windows: sliding windows of the model.
        num_shapes: most shapes of step that the worker remembers; 0: it records none.
    """

    def __init__(self, windows: Windows = (), num_shapes: int = 0, first_token: int = 0) -> None:
        self.rows: dict[str, Row] = {}
        self._windows = windows
        self._num_shapes = num_shapes
        self._shapes: dict[tuple[int, int, int], None] = {}
        self._next_token = first_token
        self._layerwise: LayerwiseReader | None = None

    def follow_layerwise(self, first_layerwise: int, block_size: int, share: float) -> None:
        """From now on count layerwise blocks, those from `first_layerwise` on, of whose layers `share` are streamed."""
        self._layerwise = LayerwiseReader(first_layerwise, block_size, share)

    def read(self, plan: SchedulerOutput) -> tuple[StepContents, dict[str, list[int]]]:
        """Process `step`; return its contents, and a new token for every sequence that is sampled.

        The tokens of a sequence are all the same, and those of two sequences differ.
        """
        rows, windows, scheduled = self.rows, self._windows, plan.num_scheduled_tokens
        for sequence_id in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            rows.pop(sequence_id, None)
        contents = StepContents(num_tokens=plan.total_num_scheduled_tokens, num_sequences=len(scheduled))
        sampled: dict[str, list[int]] = {}
        for new in plan.new_sequences:
            rows[new.sequence_id] = Row(new.num_tokens, [self._next_token])
            self._next_token += 1
            contents.num_new += 1
            contents.num_new_known_tokens += new.num_tokens
        context = 0.0
        going: list[ContinuingSequenceData | NewSequenceData] = [*plan.continuing, *plan.new_sequences]
        for data in going:
            sequence_id, start = data.sequence_id, data.num_computed_tokens
            count = scheduled.get(sequence_id, 0)
            if count == 1:
                context += attended(start, 1, windows) if windows else start + 1
            elif count > 1:
                contents.prefill_pairs += attended(start, count, windows)
            row = rows[sequence_id]
            if start + count == row.num_known:
                sampled[sequence_id] = row.sample
                row.num_known += 1
        contents.decode_context = context
        contents.num_sampled = len(sampled)
        contents.num_moved_blocks = sum(each.tier is Tier.HOST for each in plan.transfers)
        contents.num_disk_blocks = sum(
            each.tier is Tier.DISK and each.op in (TransferOp.STORE, TransferOp.LOAD) for each in plan.transfers
        )
        if self._layerwise is not None:
            self._layerwise.read(plan, contents)
        contents.is_new_shape = self._is_new((contents.num_tokens, contents.num_sequences, contents.num_sampled))
        return contents, sampled

    def _is_new(self, shape: tuple[int, int, int]) -> bool:
        """Whether `shape` is not among the most recent ones; it is from now on."""
        if self._num_shapes == 0 or shape[0] == 0:
            return False
        shapes = self._shapes
        is_new = shape not in shapes
        shapes.pop(shape, None)
        shapes[shape] = None  # dicts keep the order of insertion: the first is the least recently used
        if len(shapes) > self._num_shapes:
            del shapes[next(iter(shapes))]
        return is_new
