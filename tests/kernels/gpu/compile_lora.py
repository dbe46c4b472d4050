"""Launches what adapters do at the shapes of Llama-3.1-8B, for `tests.helpers.pretend_gpu`."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.lora import LoRARows

LAYERS = ((4096, [4096, 1024, 1024]), (14336, [4096]))  # inputs and the sizes of parts


def rows(tokens: int, num_slots: int) -> LoRARows:
    """Return rows without adapters: nothing reads them here."""
    return LoRARows(*(torch.zeros(n, dtype=torch.int64) for n in (tokens, tokens, num_slots + 1)))


def launch(capability: tuple[int, int] = (9, 0)) -> None:
    """Linear layers with few and many rows, a table, and a head."""
    backend = GPUBackend(device="cpu")
    backend.capability = capability
    for depth, sizes in LAYERS:
        for rank in (16, 64, 256):
            slots = backend.new_lora_slots(8, rank, sizes)
            for tokens in (1, 64, 2048) if rank < 256 else (64, 2048):
                y, x = (torch.empty(tokens, n, dtype=backend.act) for n in (sum(sizes), depth))
                backend.lora(y, x, slots, rows(tokens, 8))
    y, x = torch.empty(64, 128512), torch.empty(64, 4096, dtype=backend.act)
    backend.lora(y, x, backend.new_lora_slots(8, 16, [128512], widest=128512), rows(64, 8))
    y, ids = torch.empty(2048, 4096, dtype=backend.act), torch.zeros(2048, dtype=torch.int64)
    backend.lora_embedding(y, ids, backend.new_lora_slots(8, 16, [4096]), rows(2048, 8))
    backend.limit_columns(torch.empty(64, 128512), backend.from_numpy(np.zeros(64, np.int64)))
