"""Layer-wise KV offloading on a GPU: one arena for the blocks of all offloaded layers, copies overlapped with compute.

The arena has the resident blocks of each layer, one layer after the other, and behind them the staging buffer: two
halves with a place for each layerwise block. The cache of a layer is the arena from its own first block on, so that
resident blocks keep their ids there, and places of the staging buffer have ids as well. Even layers use the first half,
odd ones the second. Events pass each half from one user to the next:

    H2D loads layer k -> the model attends -> D2H saves what was written -> H2D loads layer k + 2

and in the next step to layers 0 and 1 again. A layer's host memory is written and read through its half only, so that
the same events order that, also when the next step is launched before one has ended. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from quire.kernels.backend import STAGED_LAYERS, AttentionMetadata, HostBlocks, LayerwiseOffload
from quire.kernels.gpu.cache import CacheOps, KVCache
from quire.kernels.gpu.host_blocks import BlockMover, GPUHostBlocks, PinnedPool, Register, Unregister, cuda_register
from quire.kernels.gpu.streams import Event, Stream, Streams

MAX_COPIES = 64  # to load a layer; blocks between those requested are loaded rather than to launch more


class GPULayerwiseOffload:
    """See `LayerwiseOffload`.

    Args:
        arena: a cache with room for the resident blocks of all layers and the staging buffer.
        num_resident, num_layerwise: blocks of each kind.
        copy_blocks: see `Backend.copy_blocks`. streams: of the device.
        pools: memory of the host for each of the arena's sides: the blocks of layer 0, of layer 1, and so on. From now
            on this object's, which closes them.
    """

    def __init__(
        self,
        arena: KVCache,
        num_layers: int,
        num_resident: int,
        num_layerwise: int,
        copy_blocks: Callable[[KVCache, np.ndarray], None],
        streams: Streams,
        pools: Sequence[PinnedPool],
    ) -> None:
        self.first_layerwise, self._num_layerwise = num_resident, num_layerwise
        self.block_size = arena.block_size
        self._copy_blocks, self._streams, self.pools = copy_blocks, streams, list(pools)
        behind = num_layers * num_resident
        assert arena.num_blocks == behind + STAGED_LAYERS * num_layerwise
        self.staging = [side[behind:] for side in arena.sides()]
        self.caches: Sequence[KVCache] = [_from_block(arena, layer * num_resident) for layer in range(num_layers)]
        self._free: list[Event | None] = [None] * STAGED_LAYERS  # of each half: when the next one may touch it
        self._next: int | None = None  # layer whose turn is next; None between steps
        self._loads: list[tuple[int, int]] = []
        self._stores: list[tuple[int, int]] = []
        self._layerwise: tuple[torch.Tensor, torch.Tensor] | None = None  # which entries of tables and slots are
        self._closed = False

    def start_load(self, block_tables: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        loads, stores = layerwise_blocks(block_tables, query_lens, seq_lens, self.block_size, self.first_layerwise)
        if not len(loads) and not len(stores):
            return False
        self.begin(loads, stores)
        return True

    def begin(self, loads: np.ndarray, stores: np.ndarray) -> None:
        """Begin a step that reads layerwise blocks `loads` and writes `stores`, int64 [n], rising."""
        if self._next is not None:
            self._abandon()
        self._next, self._layerwise = 0, None
        self._loads = runs(loads - self.first_layerwise, MAX_COPIES)
        self._stores = runs(stores - self.first_layerwise)
        for layer in range(min(STAGED_LAYERS, len(self.caches))):
            self._load(layer)

    def wait_for_load(self, layer: int, metadata: AttentionMetadata) -> AttentionMetadata:
        if self._next is None:
            return metadata
        self._await(layer)
        tables, slots = metadata.block_tables, metadata.slot_mapping
        if self._layerwise is None:
            layerwise_slots = slots >= self.first_layerwise * self.block_size
            self._layerwise = (tables >= self.first_layerwise).to(tables.dtype), layerwise_slots.to(slots.dtype)
        moved = self._shift(layer)
        return replace(
            metadata,
            block_tables=torch.add(tables, self._layerwise[0], alpha=moved),
            slot_mapping=torch.add(slots, self._layerwise[1], alpha=moved * self.block_size),
            plans=dict(metadata.plans),  # what is planned for these tables is of no use to others
        )

    def save(self, layer: int) -> None:
        if self._next is None:
            return
        assert layer == self._next, "layers take turns in their order"
        done = self._streams.record(Stream.COMPUTE)
        if self._stores:
            self._streams.wait(Stream.D2H, done)
            copies = [(host, staged) for staged, host in self._places(layer, self._stores)]
            self._streams.run(Stream.D2H, lambda: _copy(copies))
            done = self._streams.record(Stream.D2H)
        self._free[layer % STAGED_LAYERS] = done
        if layer + STAGED_LAYERS < len(self.caches):
            self._load(layer + STAGED_LAYERS)
        self._next = layer + 1
        if self._next == len(self.caches):
            self._next = self._layerwise = None

    def copy_blocks(self, pairs: np.ndarray) -> None:
        layerwise = pairs >= self.first_layerwise
        self.begin(*(np.unique(pairs[layerwise[:, way], way]) for way in (0, 1)))
        for layer, cache in enumerate(self.caches):
            self._await(layer)
            places = np.where(layerwise, pairs + self._shift(layer), pairs)
            self._streams.run(Stream.COMPUTE, partial(self._copy_blocks, cache, places))
            self.save(layer)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in (Stream.D2H, Stream.H2D, Stream.COMPUTE):
            self._streams.synchronize(self._streams.record(stream))
        for pool in self.pools:
            pool.close()
        self.caches, self.staging, self._layerwise = [], [], None

    def _shift(self, layer: int) -> int:
        """Return what is added to the id of a layerwise block for its place in a layer's cache."""
        return (len(self.caches) - layer - 1) * self.first_layerwise + layer % STAGED_LAYERS * self._num_layerwise

    def _await(self, layer: int) -> None:
        """Make the compute stream wait for a layer's half of the staging buffer."""
        assert layer == self._next, "layers take turns in their order"
        free = self._free[layer % STAGED_LAYERS]
        if free is not None:
            self._streams.wait(Stream.COMPUTE, free)

    def _load(self, layer: int) -> None:
        """Load what the step reads of a layer into its half of the staging buffer."""
        if not self._loads:
            return
        half = layer % STAGED_LAYERS
        free, copies = self._free[half], self._places(layer, self._loads)
        if free is not None:
            self._streams.wait(Stream.H2D, free)
        self._streams.run(Stream.H2D, lambda: _copy(copies))
        self._free[half] = self._streams.record(Stream.H2D)

    def _places(self, layer: int, layerwise: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of tensors, runs of a layer's layerwise blocks in the staging buffer and on the host."""
        found, at = [], layer % STAGED_LAYERS * self._num_layerwise
        for pool, staging in zip(self.pools, self.staging, strict=True):
            for start, stop in layerwise:
                while start < stop:
                    piece, first = divmod(layer * self._num_layerwise + start, pool.rows)
                    end = min(stop, start + pool.rows - first)  # of the run, or of the piece
                    host = pool.pieces[piece][first : first + end - start]
                    found.append((staging[at + start : at + end], host))
                    start = end
        return found

    def _abandon(self) -> None:
        """End a step that failed: both halves are free when all is done that has begun."""
        for free in self._free:
            if free is not None:
                self._streams.wait(Stream.COMPUTE, free)
        self._free = [self._streams.record(Stream.COMPUTE)] * STAGED_LAYERS


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to the first of each pair from the second."""
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def _from_block(arena: KVCache, first: int) -> KVCache:
    return KVCache(arena.data[first:], None if arena.scales is None else arena.scales[first:])


def layerwise_blocks(
    block_tables: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, block_size: int, first_layerwise: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the layerwise blocks that a step reads from the host, and those that it writes: int64 [n], rising.

    Those with tokens from before the step are read, and those that get tokens in it are written; some are both.

    Args:
        block_tables: int [S, most blocks], at least as many as there are tokens for.
        query_lens, seq_lens: int [S], tokens of this step, and of the context with them; see `AttentionMetadata`.
    """
    row, place = np.nonzero(block_tables >= first_layerwise)
    numbers, first = block_tables[row, place].astype(np.int64), place * block_size
    computed = (seq_lens - query_lens)[row]
    read = first < computed
    written = (first + block_size > computed) & (first < seq_lens[row])
    return np.unique(numbers[read]), np.unique(numbers[written])


def runs(numbers: np.ndarray, most: int | None = None) -> list[tuple[int, int]]:
    """Return runs (first, behind the last) of neighbours among rising `numbers`, int64 [n].

    With `most` there are at most so many: the smallest gaps are taken in where there would be more.
    """
    if not len(numbers):
        return []
    gaps = np.diff(numbers) - 1
    cuts = np.flatnonzero(gaps)
    if most is not None and len(cuts) >= most:
        cuts = np.sort(cuts[np.argsort(-gaps[cuts], kind="stable")[: most - 1]])
    starts, stops = numbers[[0, *(cuts + 1)]], numbers[[*cuts, -1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


class OffloadOps(CacheOps):
    """KV blocks, and layers of them, in host memory."""

    def host_blocks(self, caches: Sequence[KVCache], num_blocks: int) -> HostBlocks:
        mover = BlockMover([side for cache in caches for side in cache.sides()])
        pool = PinnedPool(num_blocks, mover.row_bytes, *self._register())
        return GPUHostBlocks(mover, self.from_numpy, self.new_streams(), pool, num_blocks, self.device)

    def layerwise_offload(
        self,
        num_layers: int,
        num_blocks: int,
        num_layerwise_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        latent: bool = False,
    ) -> LayerwiseOffload:
        num_resident = num_blocks - num_layerwise_blocks
        assert num_resident >= 0 and num_layerwise_blocks > 0
        room = num_layers * num_resident + STAGED_LAYERS * num_layerwise_blocks
        arena = self.new_kv_cache(room, block_size, num_kv_heads, head_size, latent=latent)
        sizes = [side.shape[1] for side in arena.sides()]
        pools = [PinnedPool(num_layers * num_layerwise_blocks, size, *self._register()) for size in sizes]
        return GPULayerwiseOffload(
            arena, num_layers, num_resident, num_layerwise_blocks, self.copy_blocks, self.new_streams(), pools
        )

    def new_streams(self) -> Streams:
        """Return streams of this device."""
        return Streams(self.device)

    def _register(self) -> tuple[Register | None, Unregister | None]:
        return cuda_register(self.device) if self.device.type == "cuda" else (None, None)
