"""Choosing tokens on a GPU: draws with several options, greedy choices, log-probabilities, masks, at real vocabularies.

Logits are either flat, where every token has some weight and the most passes are needed, or peaked, as models' are.
The roofline is that of reading them once; they take turns among copies that are together larger than L2.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from benchmarks.gpu.case import Case, Tuning

from quire.kernels.backend import SamplingOptions
from quire.kernels.gpu.backend import GPUBackend

L2_BYTES = 60 << 20
MAX_COPIES = 64
VOCABULARIES = {"8B": 128256, "0.6B": 151936}
ROWS = (1, 16, 64, 256)
DRAWS = {"all": (0, 1.0), "top-p 0.9": (0, 0.9), "top-k 50, top-p 0.9": (50, 0.9)}
WIDTHS = [
    {"num_warps": 16, "weigh": 2048, "read": 2048},
    {"num_warps": 16, "weigh": 2048, "read": 4096},
    {"num_warps": 8, "weigh": 1024, "read": 2048},
    {"num_warps": 8, "weigh": 2048, "read": 2048},
    {"num_warps": 4, "weigh": 512, "read": 1024},
]
CHOICES = {
    "more rows": WIDTHS,
    "few rows": [{**widths, "rounds": rounds} for widths in WIDTHS for rounds in (3, 4, 6)],
}


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; rows and vocabularies are divided by `scale`, for tests."""
    keep_uploads(backend)
    for name, size in VOCABULARIES.items():
        for rows in ROWS:
            shape = max(1, rows // scale), max(1, size // scale)
            for kind, spread in (("flat", 1.0), ("peaked", 5.0)):
                yield from draws(backend, f"{name} {rows} {kind}", shape, spread)
            yield from others(backend, f"{name} {rows}", shape)


def keep_uploads(backend: GPUBackend) -> None:
    """Have what the backend brings to the device once be there from then on, so that launches can be recorded."""
    upload, held = backend.from_numpy, dict[tuple[object, ...], torch.Tensor]()

    def from_numpy(array: np.ndarray) -> torch.Tensor:
        key = array.dtype, array.shape, array.tobytes()
        if key not in held:
            held[key] = upload(array)
        return held[key]

    backend.from_numpy = from_numpy  # type: ignore[method-assign]


def _logits(backend: GPUBackend, shape: tuple[int, int], spread: float) -> list[torch.Tensor]:
    count = min(MAX_COPIES, 2 * L2_BYTES // (4 * shape[0] * shape[1]) + 2)
    return [spread * torch.randn(shape, device=backend.device) for _ in range(count)]


def draws(backend: GPUBackend, name: str, shape: tuple[int, int], spread: float) -> Iterator[Case]:
    """Yield a case for each of `DRAWS`; torch's best draws by a softmax and one pass of exponential numbers."""
    logits = _logits(backend, shape, spread)
    rows = shape[0]
    ones, uniforms = np.ones(rows), np.random.default_rng(0).random(rows)

    def by_torch(i: int) -> torch.Tensor:
        return torch.multinomial(torch.softmax(logits[i % len(logits)], dim=-1), 1)

    for kind, (top_k, top_p) in DRAWS.items():

        def run(i: int, top_k: int = top_k, top_p: float = top_p) -> torch.Tensor:
            options = SamplingOptions(ones, np.full(rows, top_k), np.full(rows, top_p), np.zeros(rows))
            return backend.sample(logits[i % len(logits)], options, uniforms)

        against = {"softmax and multinomial": by_torch} if kind == "all" else {}
        tuning = Tuning("draw", backend.draw_key(rows), CHOICES[backend.draw_key(rows)])
        yield Case(f"draw {name}, {kind}", run, 4.0 * shape[0] * shape[1], against=against, tuning=tuning)


def others(backend: GPUBackend, name: str, shape: tuple[int, int]) -> Iterator[Case]:
    """Yield greedy choices, log-probabilities and masks."""
    logits = _logits(backend, shape, 5.0)
    rows, size = shape
    nbytes = 4.0 * rows * size
    chosen = torch.zeros(rows, dtype=torch.int64, device=backend.device)
    bits = np.random.default_rng(1).integers(0, 2, (rows, -(-size // 32))).astype(np.int32)
    places = np.arange(rows)
    best = min(20, size)
    yield Case(
        f"greedy {name}",
        lambda i: backend.greedy(logits[i % len(logits)]),
        nbytes,
        against={"argmax": lambda i: logits[i % len(logits)].argmax(dim=1)},
    )
    yield Case(
        f"20 log-probabilities {name}",
        lambda i: backend.top_logprobs(logits[i % len(logits)], chosen, best),
        nbytes,
        against={"log_softmax and topk": lambda i: torch.log_softmax(logits[i % len(logits)], dim=1).topk(best)},
    )
    yield Case(f"bits {name}", lambda i: backend.apply_bitmask(logits[i % len(logits)], places, bits), nbytes)
