"""Streamed layers on a GPU: their blocks of all layers in one arena, and copies beside the model's steps.

The arena has the whole blocks of each streamed layer, one layer after the other, and behind them the window: two halves
with a place for each thin block. The cache of a layer is the arena from its own first block on, so that whole blocks
have their numbers there, and places of the window have numbers as well. Even layers use the first half, odd ones the
second. Each half is handed on, by marks, from one to the next that may touch it:

    IN fills it for layer k -> the model attends -> OUT empties it, if there was written -> IN fills it for layer k + 2

and in the next step on to layers 0 and 1 again. What lies on the host of a layer is written and read by way of its half
only, so that the same marks order that as well, also with the next step launched before one has ended. The host waits
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.cache import CacheOps, KVCache
from quire.kernels.gpu.lanes import AtOnce, CudaLanes, Lane, Lanes, Mark
from quire.kernels.gpu.pinned import PinnedPool, cuda_register
from quire.kernels.layer_stream import WINDOW_LAYERS, LayerStream, StreamedLayer, runs

MOST_LOADS = 64  # copies to the device for a layer; blocks between those wanted are read rather than to make more


class GPUStreamedLayer:
    """See `StreamedLayer`."""

    def __init__(self, owner: GPULayerStream, number: int, cache: KVCache) -> None:
        self._owner, self._number, self.cache = owner, number, cache

    def enter(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """See `StreamedLayer.enter`."""
        return self._owner.enter(self._number, metadata)

    def leave(self) -> None:
        """See `StreamedLayer.leave`."""
        self._owner.leave(self._number)


class GPULayerStream:
    """See `LayerStream`.

    Args:
        arena: a cache with room for the whole blocks of all layers and the window. num_whole, num_thin: blocks.
        copy_blocks: see `Backend.copy_blocks`. lanes: of the device.
        pools: memory of the host for each of the arena's sides: the blocks of layer 0, of layer 1, and so on. From now
            on this object's, which closes them.
    """

    def __init__(
        self,
        arena: KVCache,
        num_layers: int,
        num_whole: int,
        num_thin: int,
        copy_blocks: Callable[[KVCache, np.ndarray], None],
        lanes: Lanes,
        pools: Sequence[PinnedPool],
    ) -> None:
        self.first_thin, self._num_thin = num_whole, num_thin
        self.block_size = arena.block_size
        self._copy_blocks, self._lanes, self.pools = copy_blocks, lanes, list(pools)
        behind = num_layers * num_whole
        assert arena.num_blocks == behind + WINDOW_LAYERS * num_thin
        self.windows = [side[behind:] for side in arena.sides()]
        self.layers: Sequence[StreamedLayer] = [
            GPUStreamedLayer(self, number, _from_block(arena, number * num_whole)) for number in range(num_layers)
        ]
        self._free: list[Mark | None] = [None] * WINDOW_LAYERS  # of each half: when the next one may touch it
        self._next: int | None = None  # layer to be entered, or left; None between steps
        self._loads: list[tuple[int, int]] = []
        self._stores: list[tuple[int, int]] = []
        self._thin: tuple[torch.Tensor, torch.Tensor] | None = None  # which entries of tables and slots are
        self._closed = False

    def begin(self, loads: np.ndarray, stores: np.ndarray) -> None:
        """See `LayerStream.begin`."""
        if self._next is not None:
            self._give_up()
        self._next, self._thin = 0, None
        self._loads = runs(loads - self.first_thin, MOST_LOADS)
        self._stores = runs(stores - self.first_thin)
        for number in range(min(WINDOW_LAYERS, len(self.layers))):
            self._load(number)

    def enter(self, number: int, metadata: AttentionMetadata) -> AttentionMetadata:
        """See `StreamedLayer.enter`."""
        if self._next is None:
            return metadata
        self._await(number)
        tables, slots = metadata.block_tables, metadata.slot_mapping
        if self._thin is None:
            thin_slots = slots >= self.first_thin * self.block_size
            self._thin = (tables >= self.first_thin).to(tables.dtype), thin_slots.to(slots.dtype)
        moved = self._shift(number)
        return replace(
            metadata,
            block_tables=torch.add(tables, self._thin[0], alpha=moved),
            slot_mapping=torch.add(slots, self._thin[1], alpha=moved * self.block_size),
            plans=dict(metadata.plans),  # what is planned for these tables is of no use to others
        )

    def leave(self, number: int) -> None:
        """See `StreamedLayer.leave`."""
        if self._next is None:
            return
        assert number == self._next, "layers are entered in their order, and left"
        done = self._lanes.mark(Lane.COMPUTE)
        if self._stores:
            self._lanes.wait(Lane.OUT, done)
            copies = [(host, window) for window, host in self._places(number, self._stores)]
            self._lanes.run(Lane.OUT, lambda: _copy(copies))
            done = self._lanes.mark(Lane.OUT)
        self._free[number % WINDOW_LAYERS] = done
        if number + WINDOW_LAYERS < len(self.layers):
            self._load(number + WINDOW_LAYERS)
        self._next = number + 1
        if self._next == len(self.layers):
            self._next = self._thin = None

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """See `LayerStream.copy_blocks`."""
        thin = pairs >= self.first_thin
        self.begin(*(np.unique(pairs[thin[:, way], way]) for way in (0, 1)))
        for number, layer in enumerate(self.layers):
            self._await(number)
            places = np.where(thin, pairs + self._shift(number), pairs)
            self._lanes.run(Lane.COMPUTE, partial(self._copy_blocks, layer.cache, places))
            self.leave(number)

    def close(self) -> None:
        """See `LayerStream.close`."""
        if self._closed:
            return
        self._closed = True
        for lane in (Lane.OUT, Lane.IN, Lane.COMPUTE):
            self._lanes.join(self._lanes.mark(lane))
        for pool in self.pools:
            pool.close()
        self.layers, self.windows, self._thin = [], [], None

    def _shift(self, number: int) -> int:
        """Return what is added to the number of a thin block for its place in a layer's cache."""
        return (len(self.layers) - number - 1) * self.first_thin + number % WINDOW_LAYERS * self._num_thin

    def _await(self, number: int) -> None:
        """Have the model wait for a layer's half of the window."""
        assert number == self._next, "layers are entered in their order, and left"
        free = self._free[number % WINDOW_LAYERS]
        if free is not None:
            self._lanes.wait(Lane.COMPUTE, free)

    def _load(self, number: int) -> None:
        """Have a layer's half of the window filled with what the step reads."""
        if not self._loads:
            return
        half = number % WINDOW_LAYERS
        free, copies = self._free[half], self._places(number, self._loads)
        if free is not None:
            self._lanes.wait(Lane.IN, free)
        self._lanes.run(Lane.IN, lambda: _copy(copies))
        self._free[half] = self._lanes.mark(Lane.IN)

    def _places(self, number: int, thin: list[tuple[int, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return where runs of a layer's thin blocks lie, in the window and on the host: pairs of tensors."""
        found, at = [], number % WINDOW_LAYERS * self._num_thin
        for pool, window in zip(self.pools, self.windows, strict=True):
            for start, stop in thin:
                while start < stop:
                    piece, first = divmod(number * self._num_thin + start, pool.rows)
                    end = min(stop, start + pool.rows - first)  # of the run, or of the piece
                    host = pool.pieces[piece][first : first + end - start]
                    found.append((window[at + start : at + end], host))
                    start = end
        return found

    def _give_up(self) -> None:
        """End a step that was broken off: both halves are free when all is done that has begun."""
        for free in self._free:
            if free is not None:
                self._lanes.wait(Lane.COMPUTE, free)
        self._free = [self._lanes.mark(Lane.COMPUTE)] * WINDOW_LAYERS


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to the first of each pair from the second."""
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def _from_block(arena: KVCache, first: int) -> KVCache:
    return KVCache(arena.data[first:], None if arena.scales is None else arena.scales[first:])


class StreamOps(CacheOps):
    """Streamed layers."""

    def layer_stream(
        self,
        num_layers: int,
        num_blocks: int,
        num_thin_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        *,
        latent: bool = False,
    ) -> LayerStream:
        num_whole, on_gpu = num_blocks - num_thin_blocks, self.device.type == "cuda"
        assert num_whole >= 0 and num_thin_blocks > 0
        room = num_layers * num_whole + WINDOW_LAYERS * num_thin_blocks
        arena = self.new_kv_cache(room, block_size, num_kv_heads, head_size, latent=latent)
        register, unregister = cuda_register(self.device) if on_gpu else (None, None)
        sizes = [side.shape[1] for side in arena.sides()]
        pools = [PinnedPool(num_layers * num_thin_blocks, size, register, unregister) for size in sizes]
        return GPULayerStream(arena, num_layers, num_whole, num_thin_blocks, self.copy_blocks, self.new_lanes(), pools)

    def new_lanes(self) -> Lanes:
        """Return lanes of this device."""
        return CudaLanes(self.device) if self.device.type == "cuda" else AtOnce()
