"""`DiskThreads`: the threads between the engine and a `DiskStore`, so that no step waits for the disk unless it must.

One thread writes, in the order of the saves; a few read and verify. None of them touches the KV cache: what was read
waits here until the engine's thread comes for it, for only there is it known that no kernel runs (and on a GPU, only
there do copies keep their order with the kernels). Both ways are bounded: an engine that saves faster than the disk
writes is slowed down to it, and readers pause while blocks that nobody has fetched pile up.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Queue, SimpleQueue

import numpy as np

from quire.worker.disk_store import DiskStore

logger = logging.getLogger(__name__)

READERS = 2
WAITING_BYTES = 256 * 2**20  # of blocks on their way to the disk, and as many on their way from it
PATIENCE_S = 1.0  # a step waits for a load, so that the engine hears of new requests and aborts even if a disk hangs

Payload = Callable[[], np.ndarray]  # waits until the block, uint8 [block_nbytes], has come from the device
Save = tuple[int, bytes, Payload]  # slot, header, block
Load = tuple[int, int, bytes]  # device block, slot, header


class DiskThreads:
    """Saves and loads blocks of `store` in the background; `close` closes it."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        most = max(1, WAITING_BYTES // store.block_nbytes)
        self._saves: Queue[Save | None] = Queue(most)
        self._loads: SimpleQueue[Load | None] = SimpleQueue()
        self._room = threading.Semaphore(most)  # for blocks in `_done`
        self._changed = threading.Condition()  # guards what follows
        self._unwritten: dict[int, Save] = {}  # the last save of each slot that the writer has not finished
        self._done: deque[tuple[int, np.ndarray | None]] = deque()
        self._under_way = 0
        self._closing = False
        self._writer = threading.Thread(target=self._write_all, name="quire-kv-writer", daemon=True)
        self._readers = [
            threading.Thread(target=self._read_all, name=f"quire-kv-reader-{index}", daemon=True)
            for index in range(READERS)
        ]
        for thread in (self._writer, *self._readers):
            thread.start()

    def save(self, slot: int, header: bytes, payload: Payload) -> None:
        """Write a block, which must not change any more; waits only while too much is unwritten."""
        item = (slot, header, payload)
        with self._changed:
            self._unwritten[slot] = item
        self._saves.put(item)

    def begin_load(self, block_id: int, slot: int, header: bytes) -> None:
        """Begin to read a record, for `finished` to return under `block_id`; one that is still unwritten counts."""
        with self._changed:
            self._under_way += 1
        self._loads.put((block_id, slot, header))

    def finished(self, *, wait: bool) -> list[tuple[int, np.ndarray | None]]:
        """Return (block id, its bytes or None) of loads that ended since the last call.

        With `wait` there is at least one, unless none is under way or `PATIENCE_S` have passed.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._done or not self._under_way, PATIENCE_S)
            done = list(self._done)
            self._done.clear()
            self._under_way -= len(done)
        if done:
            self._room.release(len(done))
        return done

    def erase(self) -> None:
        """Forget every block that was saved; loads under way may still end well."""
        self.flush()
        self._store.erase()

    def flush(self) -> None:
        """Return when every save so far is in the files."""
        self._saves.join()

    def close(self) -> None:
        """Finish saves, give up loads not begun, end the threads, close the store. Once more is no error."""
        if self._closing:
            return
        self._closing = True
        self._saves.put(None)
        for _ in self._readers:
            self._loads.put(None)
        self._room.release()
        for thread in (self._writer, *self._readers):
            thread.join()
        self._store.close()

    def _write_all(self) -> None:
        while (item := self._saves.get()) is not None:
            try:
                slot, header, payload = item
                self._store.save(slot, header, payload())
            except Exception as error:  # the thread's boundary: others wait for its queue to empty
                logger.exception("saving a block failed")
                self._store.stop_saving(repr(error))
            with self._changed:
                if self._unwritten.get(item[0]) is item:
                    del self._unwritten[item[0]]
            self._saves.task_done()

    def _read_all(self) -> None:
        while (item := self._loads.get()) is not None:
            self._room.acquire()
            if self._closing:
                self._room.release()  # for the next one that waits
                continue
            block_id, slot, header = item
            try:
                payload = self._read(slot, header)
            except Exception:  # the thread's boundary: the engine waits for an answer to every load
                logger.exception("loading a block failed")
                payload = None
            with self._changed:
                self._done.append((block_id, payload))
                self._changed.notify_all()

    def _read(self, slot: int, header: bytes) -> np.ndarray | None:
        with self._changed:
            unwritten = self._unwritten.get(slot)
        if unwritten is None:
            return self._store.load(slot, header)
        return unwritten[2]() if unwritten[1] == header else None
