"""Whole blocks of all layers on a GPU: gathered and scattered on the device, and on their way to the host and back.

The last two are bound by PCIe and not by the device's memory, which the roofline of the table goes by: 50 GB/s, which
is much for PCIe 5, are some 2 % of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from benchmarks.gpu.case import Case

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.host_blocks import BlockMover

BLOCK_SIZE, HEAD = 16, 128
MODELS = {"8B": (32, 8), "0.6B": (28, 8)}  # layers, KV heads
POOL_BLOCKS = 1024
COUNTS = (1, 16, 128)


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; layers, blocks and their number are divided by `scale`, for tests."""
    for name, (layers, heads) in MODELS.items():
        caches = [
            backend.new_kv_cache(max(2, POOL_BLOCKS // scale), BLOCK_SIZE, heads, HEAD)
            for _ in range(max(1, layers // scale))
        ]
        for count in COUNTS:
            yield from blocks(backend, f"{name} {count} blocks", caches, max(1, count // scale))


def blocks(backend: GPUBackend, name: str, caches: list[KVCache], count: int) -> Iterator[Case]:
    """Yield what happens to `count` blocks, which are others each time."""
    sides = [side for cache in caches for side in cache.sides()]
    mover, number = BlockMover(sides), caches[0].num_blocks
    order = np.random.default_rng(0).permutation(number)
    turns = max(1, number // count)
    chosen = [order[turn * count : (turn + 1) * count] for turn in range(turns)]
    ids = [backend.from_numpy(part) for part in chosen]
    rows = torch.zeros((count, mover.row_bytes), dtype=torch.uint8, device=backend.device)
    nbytes = 2 * count * mover.row_bytes

    def by_layer(i: int) -> torch.Tensor:
        return torch.cat([side[ids[i % turns]] for side in sides], dim=1)

    yield Case(f"gather {name}", lambda i: mover.gather(ids[i % turns], rows), nbytes, against={"torch": by_layer})
    yield Case(f"scatter {name}", lambda i: mover.scatter(rows, ids[i % turns]), nbytes)
    host = backend.host_blocks(caches, 2 * count)
    slots = np.arange(count)
    yield Case(f"to the host {name}", lambda i: host.copy_out(chosen[i % turns], slots), nbytes, recorded=False)
    yield Case(f"from the host {name}", lambda i: host.copy_in(slots, chosen[i % turns]), nbytes, recorded=False)
    host.close()
