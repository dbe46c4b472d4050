"""`StepContents`: what a step's duration depends on; `StepReader` finds it in the `SchedulerOutput`s of a run.

Both the simulated executor and the calibration of a real one read steps here, so that a cost model is applied to what
it was fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.simulate.layerwise import LayerwiseReader
from quire.step import ContinuingSequenceData, NewSequenceData, SchedulerOutput, Tier, TransferOp

Windows = tuple[tuple[int, float], ...]  # (sliding window in tokens, share of the layers that have it)


@dataclass(slots=True)
class StepContents:
    """One step in numbers.

    Attributes:
        num_tokens: computed. num_sequences: that have some of them. num_sampled: that get a new token.
        prefill_pairs: (query, key) pairs that attention compares, over sequences with more than one query.
        decode_context: positions that attention reads for sequences with one query. Both are means over layers.
        num_new: sequences that the worker did not know. num_new_known_tokens: tokens it was told of them.
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
    found = [window for window in layer_windows if window is not None]
    return tuple((window, found.count(window) / len(layer_windows)) for window in sorted(set(found)))


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


class StepReader:
    """Follows the sequences of a run, and says of each step what is in it and who is sampled.

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

    def read(self, step: SchedulerOutput) -> tuple[StepContents, dict[str, list[int]]]:
        """Take in `step`; return its contents, and a new token for every sequence that is sampled.

        The tokens of a sequence are all the same, and those of two sequences differ.
        """
        rows, windows, scheduled = self.rows, self._windows, step.num_scheduled_tokens
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            rows.pop(sequence_id, None)
        contents = StepContents(num_tokens=step.total_num_scheduled_tokens, num_sequences=len(scheduled))
        sampled: dict[str, list[int]] = {}
        for new in step.new_sequences:
            rows[new.sequence_id] = Row(new.num_tokens, [self._next_token])
            self._next_token += 1
            contents.num_new += 1
            contents.num_new_known_tokens += new.num_tokens
        context = 0.0
        going: list[ContinuingSequenceData | NewSequenceData] = [*step.continuing, *step.new_sequences]
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
        contents.num_moved_blocks = sum(each.tier is Tier.HOST for each in step.transfers)
        contents.num_disk_blocks = sum(
            each.tier is Tier.DISK and each.op is not TransferOp.CLEAR for each in step.transfers
        )
        if self._layerwise is not None:
            self._layerwise.read(step, contents)
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
