"""What adapters add to the layers of Llama-3.1-8B on a GPU: ranks, adapters in a step, and rows of it.

Layers take turns, whose factors are together larger than L2 where they can be. Bytes are those of the factors of the
adapters that have rows, each once, and of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from benchmarks.gpu.case import Case, Run, Tuning

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.lora import LoRASlots, PackedLoRA
from quire.kernels.lora import LoRARows

L2_BYTES = 60 << 20
MAX_TURNS = 64
LAYERS = {"qkv": (4096, [4096, 1024, 1024]), "down": (14336, [4096])}  # inputs, and the sizes of parts
STEPS = ((1, 1), (64, 1), (64, 8), (2048, 1), (2048, 8))  # rows, and adapters among them
RANKS = (16, 64)


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; sizes and rows are divided by `scale`, for tests."""
    for name, (depth, sizes) in LAYERS.items():
        for rank in RANKS:
            for rows, adapters in STEPS:
                small = max(1, rows // scale)
                layer = depth // scale, [size // scale for size in sizes]
                yield lora(backend, f"lora {name} rank {rank} rows {small} of {adapters}", layer, rank, small, adapters)


def new_slots(backend: GPUBackend, layer: tuple[int, list[int]], rank: int, adapters: int) -> LoRASlots:
    """Return a layer's slots, all full of random factors."""
    depth, sizes = layer
    slots: LoRASlots = backend.new_lora_slots(adapters, rank, sizes)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=backend.device).to(backend.act)

    for slot in range(adapters):
        parts = [PackedLoRA(random(rank, depth), random(size, rank), size, None) for size in sizes]
        backend.set_lora(slots, slot, parts)
    return slots


def spread(backend: GPUBackend, rows: int, adapters: int) -> LoRARows:
    """Return rows that have the adapters in turn."""
    slots = np.arange(rows) % adapters
    order = np.argsort(slots, kind="stable")
    starts = np.searchsorted(slots[order], np.arange(adapters + 1))
    return LoRARows(*(backend.from_numpy(array.astype(np.int64)) for array in (slots, order, starts)))


def lora(backend: GPUBackend, name: str, layer: tuple[int, list[int]], rank: int, count: int, adapters: int) -> Case:
    """Return `lora` of one layer, for `count` rows."""
    depth, sizes = layer
    each = backend.act.itemsize * rank * (len(sizes) * depth + sum(sizes))
    turns = min(MAX_TURNS, 2 * L2_BYTES // (each * adapters) + 2)
    layers = [new_slots(backend, layer, rank, adapters) for _ in range(turns)]
    rows = spread(backend, count, adapters)
    x = torch.randn((count, depth), device=backend.device).to(backend.act)
    y = torch.zeros((count, sum(sizes)), dtype=backend.act, device=backend.device)
    used = min(adapters, count)
    big = count >= 256 and not backend.batch_invariant
    wide = backend.act is torch.float32
    tile = 64 if big and not wide else 16
    candidates = [{"BK": k, "num_stages": stages} for k in (32, 64, 128, 256) for stages in (2, 3, 4)]
    return Case(
        name,
        lambda turn: backend.lora(y, x, layers[turn % turns], rows),
        used * each + backend.act.itemsize * count * (depth + 2 * sum(sizes)),
        2.0 * count * rank * (len(sizes) * depth + sum(sizes)),
        against=_dense(y, x, layers, sizes) if adapters == 1 else {},
        tuning=Tuning("lora_shrink", f"m{tile}_r{layers[0].rank_tile}", candidates),
    )


def _dense(y: torch.Tensor, x: torch.Tensor, layers: list[LoRASlots], sizes: list[int]) -> dict[str, Run]:
    """Return the same by cuBLAS, for one adapter that all rows have."""

    def run(turn: int) -> None:
        column = 0
        for size, part in zip(sizes, layers[turn % len(layers)].adapters[0], strict=True):
            assert part is not None and part.a is not None and part.b is not None
            y[:, column : column + size].addmm_(x @ part.a.T, part.b.T)
            column += size

    return {"two products a part": run}
