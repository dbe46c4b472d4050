"""Launches the kernel that moves blocks at the shapes of real models, to be compiled, see `helpers/pretend_gpu.py`."""

from __future__ import annotations

import torch

from quire.kernels.gpu.host_blocks import BlockMover

# Layers, and bytes of a block of 16 tokens of each, with its scales: Llama-3.1-8B in bfloat16 (as Qwen3-0.6B) and fp8,
# DeepSeek-V3's latent vectors, a block of odd size.
BLOCKS = [(32, (65536,)), (32, (32768, 1024)), (61, (18432,)), (2, (1000,))]


def launch() -> None:
    """Gather and scatter blocks of each kind."""
    for layers, sizes in BLOCKS:
        sides = [torch.zeros((2, size), dtype=torch.uint8) for _ in range(layers) for size in sizes]
        mover = BlockMover(sides)
        ids = torch.zeros(2, dtype=torch.int64)
        rows = torch.zeros((2, mover.row_bytes), dtype=torch.uint8)
        mover.gather(ids, rows)
        mover.scatter(rows, ids)
