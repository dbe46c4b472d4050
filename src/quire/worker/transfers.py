"""`BlockTransfers`: moves KV blocks between the device and the tiers, as `SchedulerOutput.transfers` says.

A `WorkerTier` is the worker half of a tier: it moves the bytes of what the scheduler's half (`kvcache/tiers.py`)
decides. Everything here runs on the engine's thread, the only one that touches the KV caches between two runs of the
model. A device may be several steps behind that thread: copies are ordered with the model's kernels
(`kernels/host_blocks.py`), and only the threads of the disk tier wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.kernels.backend import Backend, HostBlocks, KVCache, LayerwiseOffload
from quire.step import BlockTransfer, SchedulerOutput, Tier, TransferOp
from quire.worker.disk_store import DiskStore
from quire.worker.disk_tier import DiskTierWorker

_COPY, _STORE, _LOAD, _DROP, _CLEAR = TransferOp


class WorkerTier(Protocol):
    """The worker half of a tier. Calls take effect in their order and in that of the backend's ops.

    The defaults are those of a tier whose loads are synchronous and whose blocks do not outlive the process.
    """

    def store(self, transfers: Sequence[BlockTransfer]) -> None:
        """Copy device blocks out, which later calls and steps may overwrite at once."""

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        """Fill device blocks; an asynchronous tier begins to, and `finish_loads` does the rest."""

    def finish_loads(self, *, wait: bool) -> dict[int, bool]:
        """Return the device blocks whose asynchronous loads ended since the last call, and whether they succeeded.

        With `wait` there is at least one, unless none is under way or the tier takes too long.
        """
        return {}

    def take_failed_stores(self) -> list[int]:
        """Return the keys that could not be written since the last call; nothing is stored after the first failure."""
        return []

    def drop(self, transfers: Sequence[BlockTransfer]) -> None:
        """Drop the blocks in these keys, if they would be found after a restart."""
        return

    def clear(self) -> None:
        """Drop all blocks."""
        return

    def flush(self) -> None:
        """Return when everything stored so far is where it outlives this process."""
        return

    def close(self) -> None:
        """Finish stores, give up loads, give back memory and files. Once more is no error."""


class HostTierWorker(WorkerTier):
    """Swap space and prefix cache in host memory; keys are blocks of the pool. Loads are synchronous."""

    def __init__(self, blocks: HostBlocks) -> None:
        self._blocks = blocks

    def store(self, transfers: Sequence[BlockTransfer]) -> None:
        self._blocks.copy_out(*_ids(transfers))

    def load(self, transfers: Sequence[BlockTransfer]) -> None:
        block_ids, host_block_ids = _ids(transfers)
        self._blocks.copy_in(host_block_ids, block_ids)

    def close(self) -> None:
        self._blocks.close()


@dataclass(slots=True)
class _Batch:
    """Transfers of one kind by what they write, and all that they read."""

    transfers: dict[tuple[Tier, int], BlockTransfer] = field(default_factory=dict)
    reads: set[tuple[Tier, int]] = field(default_factory=set)


Kind = tuple[TransferOp, Tier]

# Batches that may run in any order run in this one: blocks are moved out before they are used for something else.
ORDER: tuple[Kind, ...] = (
    *((_DROP, tier) for tier in Tier if tier.is_async),
    *((_STORE, tier) for tier in Tier if tier.is_async),
    *((_STORE, tier) for tier in Tier if not tier.is_async and tier is not Tier.DEVICE),
    (_COPY, Tier.DEVICE),
    *((_LOAD, tier) for tier in Tier if not tier.is_async and tier is not Tier.DEVICE),
    *((_LOAD, tier) for tier in Tier if tier.is_async),
)


def order_transfers(transfers: Iterable[BlockTransfer]) -> Iterator[tuple[Kind, list[BlockTransfer]]]:
    """Yield batches (kind, transfers) that, one after the other, do what `transfers` say.

    In a batch all sources are read before any destination is written, and no destination occurs twice. Transfers are
    gathered into one batch of each kind for as long as running those in `ORDER` gives what running one transfer after
    the other would. What an asynchronous load reads is checked by its header, and needs no order.
    """
    batches: dict[Kind, _Batch] = {}
    for each in transfers:
        kind = each.op, each.tier
        if each.op is _CLEAR:
            yield from _drain(batches)
            yield kind, [each]
            continue
        on_device, there = (Tier.DEVICE, each.block_id), (each.tier, each.key)
        source, writes = (there, on_device) if each.op is _LOAD else (on_device, there)
        reads = set() if each.op is _DROP else {source}
        later = [batches[other] for other in ORDER[ORDER.index(kind) + 1 :] if other in batches]
        if (kind in batches and reads & batches[kind].transfers.keys()) or any(
            reads & batch.transfers.keys() or writes in batch.transfers or writes in batch.reads for batch in later
        ):
            yield from _drain(batches)
        batch = batches.setdefault(kind, _Batch())
        batch.transfers[writes] = each
        if not (each.op is _LOAD and each.tier.is_async):
            batch.reads |= reads
    yield from _drain(batches)


def _drain(batches: dict[Kind, _Batch]) -> Iterator[tuple[Kind, list[BlockTransfer]]]:
    for kind in ORDER:
        if kind in batches:
            yield kind, list(batches.pop(kind).transfers.values())


def _ids(transfers: Sequence[BlockTransfer]) -> tuple[np.ndarray, np.ndarray]:
    """Return device blocks and keys, int64 [n] each."""
    return (
        np.array([each.block_id for each in transfers], np.int64),
        np.array([each.key for each in transfers], np.int64),
    )


class BlockTransfers:
    """Owns the worker half of the tiers, and the layers that are offloaded layer by layer.

    Args:
        kv_caches: of all layers; one that several layers share counts once.
        num_host_blocks: size of the host's pool.
        store: an open disk store, or None; from now on it is this object's, which closes it.
        offload: layers that are not among `kv_caches`, or None; closed by this object as well. With it blocks do not
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
        offload: LayerwiseOffload | None = None,
    ) -> None:
        assert offload is None or (num_host_blocks == 0 and store is None), "blocks leave in one way"
        self._backend = backend
        self._caches = kv_caches
        self._host = backend.host_blocks(self._caches, num_host_blocks)
        self._offload = offload
        self._tiers: dict[Tier, WorkerTier] = {}
        if store is not None:
            self._tiers[Tier.DISK] = DiskTierWorker(store, self._host)
        self._leaves_device = num_host_blocks > 0 or bool(self._tiers)
        self._tiers[Tier.HOST] = HostTierWorker(self._host)

    def apply(self, plan: SchedulerOutput) -> dict[int, bool]:
        """Do the transfers of `plan`; return the asynchronous loads that ended since the last call.

        The result says of each device block whether it now holds what it was to be loaded with. With `wait_for_loads`
        it has at least one entry, unless no load is under way or the tier takes too long. Without a tier nothing is
        stored in it, and loads from it fail.
        """
        loaded: dict[int, bool] = {}
        for (op, tier), transfers in order_transfers(plan.transfers):
            if op is _COPY:
                self._copy(transfers)
            elif tier not in self._tiers:
                loaded |= {each.block_id: False for each in transfers if op is _LOAD}
            elif op is _STORE:
                self._tiers[tier].store(transfers)
            elif op is _LOAD:
                self._tiers[tier].load(transfers)
            elif op is _DROP:
                self._tiers[tier].drop(transfers)
            else:
                self._tiers[tier].clear()
        for each in self._tiers.values():
            loaded |= each.finish_loads(wait=plan.wait_for_loads)
        return loaded

    def take_failed_stores(self) -> dict[Tier, list[int]]:
        """See `ModelOutput.failed_stores`."""
        return {tier: keys for tier, worker in self._tiers.items() if (keys := worker.take_failed_stores())}

    def warm_up(self) -> None:
        """Have block 0, which belongs to nobody yet, leave the device and come back, if blocks ever will."""
        if self._leaves_device:
            first = np.zeros(1, np.int64)
            self._host.write(first, self._host.read(first)())

    def flush(self) -> None:
        for tier in self._tiers.values():
            tier.flush()

    def close(self) -> None:
        for tier in self._tiers.values():
            tier.close()
        if self._offload is not None:
            self._offload.close()

    def _copy(self, transfers: Sequence[BlockTransfer]) -> None:
        pairs = np.stack(_ids(transfers), axis=1)
        for cache in self._caches:
            self._backend.copy_blocks(cache, pairs)
        if self._offload is not None:
            self._offload.copy_blocks(pairs)
