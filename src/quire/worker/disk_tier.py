"""`DiskTierWorker`: the worker half of the disk tier. Its threads see to it that no step waits without need.

One thread writes, in the order of the stores; a few read and verify. None of them touches the KV cache: what was read
waits here until the engine's thread fetches it, for only there is it known that no kernel runs (and on a GPU, only
there do copies keep their order with the kernels). Both ways are bounded: an engine that stores faster than the disk
writes is slowed down to it, and readers pause while blocks that nobody has fetched pile up. What is in the files is
in `disk_store.py`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue, SimpleQueue

import numpy as np

from quire.kernels.backend import HostBlocks
from quire.step import BlockTransfer
from quire.worker.disk_store import DiskStore

logger = logging.getLogger(__name__)

READERS = 2
PENDING_BYTES = 256 * 2**20  # of blocks on their way to the disk, and as many on their way from it
LOAD_TIMEOUT_S = 1.0  # then the step ends, so that new requests and aborts are seen even if a disk hangs
BLOCKS_AT_ONCE = 32  # that pass between device and threads through one array

Payload = Callable[[], np.ndarray]  # waits until the block, uint8 [block_nbytes], has come from the device
PendingStore = tuple[int, bytes, Payload | None]  # slot, header, block; without a block, the slot is erased


class DiskTierWorker:
    """See `WorkerTier`; keys are slots of `store`, which `close` closes.

    Args:
        blocks: reads and writes blocks of the device.
    """

    def __init__(self, store: DiskStore, blocks: HostBlocks) -> None:
        assert store.block_nbytes == blocks.block_nbytes, "the store was opened for other blocks"
        self._store, self._blocks = store, blocks
        most = max(1, PENDING_BYTES // store.block_nbytes)
        self._stores: Queue[PendingStore | None] = Queue(most)
        self._loads: SimpleQueue[BlockTransfer | None] = SimpleQueue()
        self._room = threading.Semaphore(most)  # for blocks in `_done`
        self._changed = threading.Condition()  # guards what follows
        self._unwritten: dict[int, PendingStore] = {}  # the last store to each slot, until it is written
        self._done: deque[tuple[int, np.ndarray | None]] = deque()
        self._failed_stores: list[int] = []
        self._num_pending = 0
        self._closing = False
        self._writer = threading.Thread(target=self._write_all, name="quire-kv-writer", daemon=True)
        self._readers = [
            threading.Thread(target=self._read_all, name=f"quire-kv-reader-{index}", daemon=True)
            for index in range(READERS)
        ]
        for thread in (self._writer, *self._readers):
            thread.start()

    def store(self, transfers: Sequence[BlockTransfer]) -> None:
        """See `WorkerTier.store`; waits only while too much is unwritten."""
        for first in range(0, len(transfers), BLOCKS_AT_ONCE):
            part = transfers[first : first + BLOCKS_AT_ONCE]
            data = self._blocks.read(np.array([each.block_id for each in part], np.int64))
            for index, each in enumerate(part):
                item = each.key, each.header, partial(_row, data, index)
                with self._changed:
                    self._unwritten[each.key] = item
                self._stores.put(item)

    def drop(self, transfers: Sequence[BlockTransfer]) -> None:
        """See `WorkerTier.drop`; loads find nothing in these slots from now on."""
        for each in transfers:
            item = each.key, b"", None
            with self._changed:
                self._unwritten[each.key] = item
            self._stores.put(item)

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        """See `WorkerTier.load`; blocks that are still unwritten count."""
        with self._changed:
            self._num_pending += len(transfers)
        for each in transfers:
            self._loads.put(each)

    def finish_loads(self, *, wait: bool) -> dict[int, bool]:
        """See `WorkerTier.finish_loads`; waits `LOAD_TIMEOUT_S` at most."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._done or not self._num_pending, LOAD_TIMEOUT_S)
            done = list(self._done)
            self._done.clear()
            self._num_pending -= len(done)
        if done:
            self._room.release(len(done))
        sound = [(block_id, payload) for block_id, payload in done if payload is not None]
        for first in range(0, len(sound), BLOCKS_AT_ONCE):
            block_ids, payloads = zip(*sound[first : first + BLOCKS_AT_ONCE])
            self._blocks.write(np.array(block_ids, np.int64), np.stack(payloads))
        return {block_id: payload is not None for block_id, payload in done}

    def take_failed_stores(self) -> list[int]:
        if not self._failed_stores:
            return []
        with self._changed:
            failed, self._failed_stores = self._failed_stores, []
        return failed

    def clear(self) -> None:
        """See `WorkerTier.clear`; loads under way may still succeed."""
        self.flush()
        self._store.erase_all()

    def flush(self) -> None:
        """Return when every store so far is in the files."""
        self._stores.join()

    def close(self) -> None:
        """See `WorkerTier.close`; loads that have begun are finished."""
        if self._closing:
            return
        self._closing = True
        self._stores.put(None)
        for _ in self._readers:
            self._loads.put(None)
        self._room.release()
        for thread in (self._writer, *self._readers):
            thread.join()
        self._store.close()

    def _write_all(self) -> None:
        while (item := self._stores.get()) is not None:
            slot, header, payload = item
            try:
                saved = self._store.erase(slot) if payload is None else self._store.save(slot, header, payload())
            except Exception as error:  # the thread's boundary: others wait for its queue to empty
                logger.exception("saving a block failed")
                self._store.stop_saving(repr(error))
                saved = False
            with self._changed:
                if not saved:
                    self._failed_stores.append(slot)
                if self._unwritten.get(slot) is item:
                    del self._unwritten[slot]
            self._stores.task_done()

    def _read_all(self) -> None:
        while (item := self._loads.get()) is not None:
            self._room.acquire()
            if self._closing:
                self._room.release()  # for the next one that waits
                continue
            try:
                payload = self._read(item.key, item.header)
            except Exception:  # the thread's boundary: the engine waits for an answer to every load
                logger.exception("loading a block failed")
                payload = None
            with self._changed:
                self._done.append((item.block_id, payload))
                self._changed.notify_all()

    def _read(self, slot: int, header: bytes) -> np.ndarray | None:
        with self._changed:
            unwritten = self._unwritten.get(slot)
        if unwritten is None:
            return self._store.load(slot, header)
        _, written_header, payload = unwritten
        return payload() if payload is not None and written_header == header else None


def _row(data: Callable[[], np.ndarray], index: int) -> np.ndarray:
    return data()[index]
