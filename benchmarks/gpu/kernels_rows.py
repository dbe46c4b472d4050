"""Norms, rotation, activations and layers with states on a GPU, at the shapes of real models.

What is read takes turns among copies that are together larger than L2, where that takes no more than `MAX_COPIES`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from benchmarks.gpu.case import Case

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.backend import GPUBackend

L2_BYTES = 60 << 20
MAX_COPIES = 64
HEAD = 128
MODELS = {"8B": (4096, 32, 8), "0.6B": (1024, 16, 8)}  # hidden size, query heads, KV heads
TOKENS = (1, 64, 256, 2048)
KEY_HEADS, HEADS, TAPS = 16, 32, 4  # of Qwen3-Next-80B-A3B's layers with states


def cases(backend: GPUBackend, scale: int = 1) -> Iterator[Case]:
    """Yield all cases; tokens and sequences are divided by `scale`, for tests."""
    for name, shape in MODELS.items():
        for tokens in TOKENS:
            yield from rows(backend, f"{name} {tokens}", shape, max(1, tokens // scale))
    for sequences in (1, 64, 256):
        yield from states(backend, f"{sequences} x 1", max(1, sequences // scale), 1)
    for sequences, tokens in ((1, 2048), (4, 2048)):
        yield from states(backend, f"{sequences} x {tokens}", sequences, max(1, tokens // scale))


def _copies(backend: GPUBackend, *shape: int) -> list[torch.Tensor]:
    """Return tensors of activations that are together larger than L2, if they are not too many."""
    nbytes = torch.Size(shape).numel() * backend.act.itemsize
    count = min(MAX_COPIES, 2 * L2_BYTES // nbytes + 2)
    return [torch.randn(shape, device=backend.device).to(backend.act) for _ in range(count)]


def rows(backend: GPUBackend, name: str, shape: tuple[int, int, int], tokens: int) -> Iterator[Case]:
    """Yield what a layer does to `tokens` rows."""
    hidden, heads, kv_heads = shape
    x, y = _copies(backend, tokens, hidden), _copies(backend, tokens, hidden)
    qkv = _copies(backend, tokens, (heads + 2 * kv_heads) * HEAD)
    weight, per_head = torch.ones(hidden, device=backend.device), torch.ones(HEAD, device=backend.device)
    narrow = weight.to(backend.act)
    table = torch.randn(4096, HEAD, device=backend.device)
    positions = torch.arange(tokens, device=backend.device)
    size, width = backend.act.itemsize * tokens, heads * HEAD

    def split(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = qkv[i % len(qkv)]
        return whole[:, :width], whole[:, width : width + kv_heads * HEAD]

    def norm_heads(i: int) -> None:
        for part in split(i):
            backend.rms_norm(part, per_head, 1e-6)

    torchs = {"torch": lambda i: torch.nn.functional.rms_norm(x[i % len(x)], (hidden,), narrow, 1e-5)}
    yield Case(
        f"norm {name}", lambda i: backend.rms_norm(x[i % len(x)], weight, 1e-5), 2.0 * size * hidden, against=torchs
    )
    yield Case(
        f"add and norm {name}",
        lambda i: backend.add_rms_norm(x[i % len(x)], y[i % len(y)], weight, 1e-5),
        4.0 * size * hidden,
    )
    both = size * (heads + kv_heads) * HEAD
    yield Case(f"norm heads {name}", norm_heads, 2.0 * both)
    yield Case(
        f"rotate {name}",
        lambda i: backend.rotary_embedding(positions, *split(i), table, HEAD, False),
        2.0 * both + 4.0 * tokens * HEAD,
    )
    silu = {"torch": lambda i: torch.nn.functional.silu(x[i % len(x)])}
    yield Case(f"silu {name}", lambda i: backend.activation(x[i % len(x)], "silu"), 2.0 * size * hidden, against=silu)


def states(backend: GPUBackend, name: str, sequences: int, tokens: int) -> Iterator[Case]:
    """Yield the convolution and the delta rule of a step with `tokens` of each sequence, which have some before."""
    device, total = backend.device, sequences * tokens
    keys, values = KEY_HEADS * HEAD, HEADS * HEAD
    width = 2 * keys + values
    matrices = [torch.randn(sequences, HEADS, HEAD, HEAD, device=device) for _ in range(2)]
    windows = [torch.randn(sequences, TAPS - 1, width, device=device) for _ in range(2)]
    mixed, weight = _copies(backend, total, width + values), torch.randn(TAPS, width, device=device)
    gates = torch.rand(total, 2 * HEADS, device=device)
    metadata = AttentionMetadata(
        cu_query_lens=torch.arange(sequences + 1, dtype=torch.int32, device=device) * tokens,
        seq_lens=torch.full((sequences,), tokens + 5, dtype=torch.int32, device=device),
        block_tables=None,
        slot_mapping=None,
        state_rows=torch.arange(sequences, device=device),
        single=tokens == 1,
    )

    def convolve(i: int) -> None:
        x = mixed[i % len(mixed)][:, :width]
        backend.causal_conv(x, weight, None, windows[i % 2], metadata, "silu")

    decay, beta = -gates[:, :HEADS].contiguous(), gates[:, HEADS:] * 0.01

    def change(i: int) -> None:
        q, k, v = mixed[i % len(mixed)][:, :width].split([keys, keys, values], dim=1)
        backend.gated_delta(q, k, v, decay, beta, matrices[i % 2], metadata)

    size = backend.act.itemsize
    yield Case(f"convolve {name}", convolve, 2.0 * size * total * width + 8.0 * windows[0].numel())
    yield Case(
        f"delta rule {name}",
        change,
        8.0 * matrices[0].numel() + size * total * (width + values),
        flops=8.0 * total * HEADS * HEAD * HEAD,
    )
