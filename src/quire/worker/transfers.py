"""`BlockTransfers`: moves whole blocks between device, host and disk as `SchedulerOutput` says (points 1 to 3).

It runs on the engine's thread and is the only one that touches the KV caches between two runs of the model; files are
read and written by the threads of `disk_threads.py`. A device may be several steps behind that thread: blocks move when
their turn comes there (`kernels/host_blocks.py`), and only the disk's threads wait for it. Why a block moves is the
scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quire.kernels.backend import Backend, KVCache
from quire.kernels.layer_stream import LayerStream
from quire.step import BlockSave, SchedulerOutput, TransferKind
from quire.worker.disk_store import DiskStore
from quire.worker.disk_threads import DiskThreads

# Batches of a group run in this order: blocks are moved out before they are used for something else.
ORDER = (TransferKind.OUT, TransferKind.COPY, TransferKind.IN)
BLOCKS_AT_ONCE = 32  # that are on their way to or from the disk through one array


def order_transfers(transfers: Iterable[tuple[int, int, int]]) -> Iterator[tuple[TransferKind, np.ndarray]]:
    """Yield batches (kind, int64 [n, 2] of source and destination) that, one after the other, do what `transfers` say.

    In a batch all sources are read before any destination is written, and no destination occurs twice. Transfers are
    gathered into one batch of each kind for as long as running those in `ORDER` gives what running one transfer after
    the other would.
    """
    batches = {kind: _Batch() for kind in ORDER}
    for number, source, destination in transfers:
        kind = TransferKind(number)
        # Blocks of the host are told from those of the device by being negative.
        reads = ~source if kind is TransferKind.IN else source
        writes = ~destination if kind is TransferKind.OUT else destination
        later = [batches[other] for other in ORDER[ORDER.index(kind) + 1 :]]
        if reads in batches[kind].written or any(
            reads in batch.written or writes in batch.written or writes in batch.read for batch in later
        ):
            yield from _drain(batches)
            batches = {kind: _Batch() for kind in ORDER}
        batches[kind].written[writes] = reads
        batches[kind].read.add(reads)
    yield from _drain(batches)


@dataclass(slots=True)
class _Batch:
    """Transfers of one kind: the source of each destination, and all sources."""

    written: dict[int, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


def _drain(batches: dict[TransferKind, _Batch]) -> Iterator[tuple[TransferKind, np.ndarray]]:
    for kind, batch in batches.items():
        if batch.written:
            pairs = np.array([(source, destination) for destination, source in batch.written.items()], np.int64)
            yield kind, np.where(pairs < 0, ~pairs, pairs)


class BlockTransfers:
    """Owns the host's blocks, streamed layers, and the disk tier's threads.

    Args:
        kv_caches: of all layers; one that several layers share counts once.
        num_host_blocks: size of the host's pool.
        store: an open disk store, or None; from now on it is this object's, which closes it.
        stream: layers that are not among `kv_caches`, or None; closed by this object as well. With it blocks do not
            leave the device as a whole.

    Raises:
        ConfigError: there is no room for the host's pool.
    """

    def __init__(
        self,
        backend: Backend,
        kv_caches: Sequence[KVCache],
        num_host_blocks: int,
        store: DiskStore | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        assert stream is None or (num_host_blocks == 0 and store is None), "blocks leave in one way"
        self._backend = backend
        self._caches = list({id(cache): cache for cache in kv_caches}.values())
        self._host = backend.host_blocks(self._caches, num_host_blocks)
        self._num_host_blocks = num_host_blocks
        assert store is None or store.block_nbytes == self._host.block_nbytes, "the store was opened for other blocks"
        self._disk = None if store is None else DiskThreads(store)
        self._stream = stream

    def apply(self, step: SchedulerOutput) -> dict[int, bool]:
        """Save, move, and begin to load what `step` says; return the loads that ended since the last call.

        The result says of each device block whether it now holds the record it was to be filled with. With
        `wait_for_loads` it has at least one entry, unless no load is under way or the disk takes longer than
        `disk_threads.PATIENCE_S`.
        """
        if step.erase_stored and self._disk is not None:
            self._disk.erase()
        for first in range(0, len(step.saves), BLOCKS_AT_ONCE):
            self._save(step.saves[first : first + BLOCKS_AT_ONCE])
        for kind, pairs in order_transfers(step.transfers):
            self._move(kind, pairs)
        if self._disk is None:
            return {load.block_id: False for load in step.loads}
        for load in step.loads:
            self._disk.begin_load(load.block_id, load.slot, load.header)
        done = self._disk.finished(wait=step.wait_for_loads)
        sound = [(block_id, payload) for block_id, payload in done if payload is not None]
        for first in range(0, len(sound), BLOCKS_AT_ONCE):
            block_ids, payloads = zip(*sound[first : first + BLOCKS_AT_ONCE])
            self._host.write(np.array(block_ids, np.int64), np.stack(payloads))
        return {block_id: payload is not None for block_id, payload in done}

    def warm_up(self) -> None:
        """Have block 0, which belongs to nobody yet, leave the device and come back, if blocks ever will."""
        if self._num_host_blocks or self._disk is not None:
            first = np.zeros(1, np.int64)
            self._host.write(first, self._host.read(first)())

    def flush(self) -> None:
        """Return when all saves so far are in the files."""
        if self._disk is not None:
            self._disk.flush()

    def close(self) -> None:
        """Finish saves, give up loads, close the store, and give up the host's blocks. Once more is no error."""
        if self._disk is not None:
            self._disk.close()
        self._host.close()
        if self._stream is not None:
            self._stream.close()

    def _save(self, saves: Sequence[BlockSave]) -> None:
        """Have blocks copied out before later steps overwrite them, and hand the copies to the disk's thread."""
        if self._disk is None:
            return
        block_ids = np.array([save.block_id for save in saves], np.int64)
        data = self._host.read(block_ids)
        for index, save in enumerate(saves):
            self._disk.save(save.slot, save.header, partial(_row, data, index))

    def _move(self, kind: TransferKind, pairs: np.ndarray) -> None:
        if kind is TransferKind.COPY:
            for cache in self._caches:
                self._backend.copy_blocks(cache, pairs)
            if self._stream is not None:
                self._stream.copy_blocks(pairs)
        elif kind is TransferKind.OUT:
            self._host.copy_out(pairs[:, 0], pairs[:, 1])
        else:
            self._host.copy_in(pairs[:, 0], pairs[:, 1])


def _row(data: Callable[[], np.ndarray], index: int) -> np.ndarray:
    return data()[index]
