"""Calls the ops on logits at real vocabularies, to be compiled for a GPU that is not there; see pretend_gpu.py."""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.backend import DeviceTokens, Penalties, SamplingOptions
from quire.kernels.gpu.backend import GPUBackend


def launch() -> None:
    """Call every op on logits of Llama 3 and of Qwen 3: with few rows, which are cut, and with many."""
    backend = GPUBackend(device="cpu")
    for rows, size in ((1, 151936), (64, 128256)):
        logits = torch.zeros(rows, size)
        ones = np.ones(rows)
        options = SamplingOptions(ones, 50 * ones.astype(np.int64), 0.9 * ones, 0.1 * ones)
        backend.sample(logits, options, 0.5 * ones)
        backend.greedy(logits)
        backend.rows_finite(logits)
        backend.top_logprobs(logits, torch.zeros(rows, dtype=torch.int64), 5)
    which = np.zeros(1, np.int64)
    backend.apply_bitmask(logits, which, np.ones((1, -(-size // 32)), np.int32))
    backend.add_bias(logits, which, which, np.ones(1, np.float32))
    numbers = np.ones(1, np.float32)
    ids = np.zeros(300, np.int32)
    last = DeviceTokens(torch.zeros(4, dtype=torch.int64), which)
    penalties = Penalties(which, np.array([0, 300]), ids, ids, numbers, numbers, numbers)
    backend.apply_penalties(logits, penalties, last)
    backend.ban_after(logits, which, which, last, which)
