"""Offsets beyond 32 bits: rows, blocks, states and weights so far apart, in memory of which hardly a page is touched.

What is computed there is compared, bit for bit, with the same close together. Triton's interpreter says itself where a
sum or product of 32 bits overflows, and the checker where an address is none.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams, SamplingOptions
from quire.kernels.experts import RoutingParams
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.experts import PackedExperts
from quire.kernels.gpu.linear_weights import GPULinear
from quire.kernels.lora import LoRAChange, LoRARows
from tests.kernels.gpu.common import DEVICE
from tests.kernels.scenes import host, normal

SLOW = () if DEVICE == "cuda" else pytest.mark.slow  # what the interpreter takes long for
STEP = (1 << 30) + 64  # elements between rows: a number of 32 bits, of which twice is none
NORESERVE = 0x4000  # of Linux: memory that is taken when it is touched, however much there is
WIDTH = 64
Op = Callable[[GPUBackend, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cuda":
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    from tests.helpers.kernel_checks import kernel_checks

    # Otherwise the interpreter copies all arguments to where they are, and touches every page.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    with kernel_checks() as findings:
        yield
    assert not findings.errors, f"\n{findings}"


def memory(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return memory that may be larger than the machine's."""
    count = int(np.prod(shape, dtype=np.int64))
    if DEVICE == "cuda":
        return torch.empty(shape, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype).view(shape)


def apart(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, N] with rows that are STEP elements apart."""
    made = memory(STEP * (len(x) - 1) + x.shape[1], dtype=x.dtype).as_strided(x.shape, (STEP, 1))
    return made.copy_(x)


def vector(count: int = WIDTH, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(normal(np.random.default_rng(seed), count)).to(DEVICE)


def changed(change: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
    change(x)
    return x.contiguous()


def product(x: torch.Tensor, quantization: str | None) -> torch.Tensor:
    """Multiply with a matrix in the kernel for many rows; the one for four has none that could be so far."""
    backend = GPUBackend("float16", "float16", DEVICE, quantization, batch_invariant=True)
    return backend.linear(x, backend.pack_linear([host(normal(np.random.default_rng(0), 5, WIDTH))]))


def lora(backend: GPUBackend, x: torch.Tensor) -> torch.Tensor:
    rng = np.random.default_rng(0)
    slots = backend.new_lora_slots(1, 4, [32])
    backend.set_lora(slots, 0, [backend.pack_lora(LoRAChange(normal(rng, 4, 32), normal(rng, 32, 4)))])
    rows = LoRARows(
        torch.zeros(len(x), dtype=torch.int64, device=DEVICE),
        torch.arange(len(x), device=DEVICE),
        torch.tensor([0, len(x)], device=DEVICE),
    )
    return changed(lambda x: backend.lora(x[:, :32], x[:, 32:], slots, rows), x)


def packed_experts(w_in: torch.Tensor, w_out: torch.Tensor) -> PackedExperts:
    """Experts of these matrices, [E, 2I, H] and [E, H, I]."""
    return PackedExperts(*(GPULinear("float", w, w.shape[1], w.shape[2], w.shape[2]) for w in (w_in, w_out)))


def experts(backend: GPUBackend, x: torch.Tensor, number: int) -> torch.Tensor:
    w_in, w_out = vector(number * 32 * WIDTH), vector(number * 16 * WIDTH, 2)
    packed = packed_experts(w_in.half().view(number, 32, WIDTH), w_out.half().view(number, WIDTH, 16))
    ids = torch.tensor([[0], [2], [1]], device=DEVICE)
    return backend.experts(x, ids, torch.ones((3, 1), device=DEVICE), packed, "silu")


def rotated(backend: GPUBackend, x: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(x), device=DEVICE)
    table = vector(3 * 16).view(3, 16)
    return changed(lambda x: backend.rotary_embedding(positions, x[:, :32], x[:, 32:], table, 16, False), x)


def step_of(*chunks: tuple[int, int], first: int = 0) -> AttentionMetadata:
    """A step of sequences with a block, or a row of states, each, from number `first` on."""
    counts = torch.tensor([0] + [count for count, _ in chunks]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in chunks]).int()
    numbers = first + torch.arange(len(chunks))
    tables, slots = numbers.int()[:, None].contiguous(), [first * 16 + 3, -1, first * 16 + 17][: int(counts[-1])]
    parts = (counts, lengths, tables, torch.tensor(slots))
    single = all(count == 1 for count, _ in chunks)
    return AttentionMetadata(*(t.to(DEVICE) for t in parts), state_rows=numbers.to(DEVICE), single=single)


def convolved(backend: GPUBackend, x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros((2, 1, WIDTH), device=DEVICE)
    return backend.causal_conv(x, vector(2 * WIDTH).view(2, WIDTH), None, state, step_of((2, 2), (1, 4)), "silu")


def delta(backend: GPUBackend, x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros((2, 1, 16, 16), device=DEVICE)
    q, k, v, decay, beta = x[:, :16], x[:, 16:32], x[:, 32:48], x[:, 48:49], x[:, 49:50]
    return backend.gated_delta(q, k, v, -decay.abs(), beta, state, step_of((2, 2), (1, 4)))


def attended(backend: GPUBackend, x: torch.Tensor) -> torch.Tensor:
    cache = KVCache(vector(2 * 2 * 16 * 16).half().view(2, 2, 1, 16, 16))
    return backend.paged_attention(x, cache, step_of((2, 9), (1, 4)), AttentionParams(4, 1, 16, 0.25))


def written(backend: GPUBackend, x: torch.Tensor) -> torch.Tensor:
    cache = KVCache(torch.zeros((2, 2, 2, 16, 16), dtype=torch.float16, device=DEVICE))
    backend.write_kv(x[:, :32], x[:, 32:], cache, step_of((2, 9), (1, 4)).slot_mapping)
    return cache.data


ROWS = np.arange(3)
LOGITS: dict[str, Op] = {
    "greedy": lambda b, x: b.greedy(x),
    "sample": lambda b, x: b.sample(x, SamplingOptions(*(np.full(3, v) for v in (1.0, 9, 0.9, 0.01))), np.full(3, 0.4)),
    "top_logprobs": lambda b, x: b.top_logprobs(x, torch.arange(3, device=DEVICE), 2).logprobs,
    "bias": lambda b, x: changed(lambda x: b.add_bias(x, ROWS, ROWS, np.ones(3, np.float32)), x),
    "bitmask": lambda b, x: changed(lambda x: b.apply_bitmask(x, ROWS, np.full((3, 2), 5, np.int32)), x),
    "softcap": lambda b, x: changed(lambda x: b.softcap(x, 2.0), x),
    "limits": lambda b, x: changed(lambda x: b.limit_columns(x, torch.arange(5, 8, device=DEVICE)), x),
    "route": lambda b, x: b.route(x, RoutingParams(WIDTH, 4))[1],
}
OPS: dict[str, Op] = {
    "rms_norm": lambda b, x: b.rms_norm(x, vector(), 1e-5),
    "rms_norm of pieces": lambda b, x: b.rms_norm(x, vector(16), 1e-5),
    "add_rms_norm": lambda b, x: b.add_rms_norm(x[:, :32], x[:, 32:], vector(32), 1e-5) + x[:, 32:],
    "layer_norm": lambda b, x: b.layer_norm(x, vector(), None, 1e-5),
    "activation": lambda b, x: b.activation(x, "gelu"),
    "gated_activation": lambda b, x: b.gated_activation(x, "silu"),
    "rotary": rotated,
    "linear": lambda b, x: product(x, None),
    "linear int4": lambda b, x: product(x, "int4"),
    "linear int8": lambda b, x: product(x, "int8"),
    "lora": lora,
    "experts by blocks": lambda b, x: experts(b, x, 3),
    "experts one by one": lambda b, x: experts(b, x, 12),
    "causal_conv": convolved,
    "gated_delta": delta,
    "paged_attention": attended,
    "write_kv": written,
}
LONG = ("sample", "gated_delta", "lora", "linear int4", "experts by blocks")


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in LONG else ()) for name in (*OPS, *LOGITS)])
def test_rows_may_be_far_apart(name: str) -> None:
    backend = GPUBackend("float16", "float16", DEVICE)
    x = vector(3 * WIDTH, 5).view(3, WIDTH)
    if name in OPS:
        x = x.half()
    op = OPS.get(name) or LOGITS[name]
    want = op(backend, x.clone())
    assert torch.equal(op(backend, apart(x)), want)


@pytest.mark.parametrize("latent", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("chunks", [[(1, 9), (1, 4)], pytest.param([(2, 9), (1, 4)], marks=SLOW)], ids=["one", "mixed"])
def test_blocks_may_be_far_away(latent: bool, chunks: list[tuple[int, int]]) -> None:
    backend = GPUBackend("float16", "float16", DEVICE)
    sides, size = (1, 32) if latent else (2, 16)
    first = (1 << 31) // (sides * 16 * size)
    params = AttentionParams(2, 1, size, 0.25, value_size=16 if latent else None)
    tokens = sum(count for count, _ in chunks)
    x = vector(3 * 3 * 32, 2).half().view(3, 96)[:tokens]
    found = []
    for base in (0, first):
        data = memory(base + 2, sides, 1, 16, size)
        data[base:] = vector(2 * sides * 16 * size, 3).half().view(2, sides, 1, 16, size)
        cache, metadata, q = KVCache(data), step_of(*chunks, first=base), x[:, :32].clone()
        if latent:
            backend.write_latent(x[:, 64:], cache, metadata.slot_mapping)
            q = x[:, :64]
        else:
            k, table = x[:, 32:48].clone(), vector(16 * 16).view(16, 16)
            positions = torch.arange(tokens, device=DEVICE)
            backend.rotary_write_kv(positions, q, k, x[:, 48:64], table, 16, False, cache, metadata.slot_mapping)
        found.append((backend.paged_attention(q, cache, metadata, params), data[base:].clone()))
    assert all(torch.equal(near, far) for near, far in zip(*found, strict=True))


@pytest.mark.parametrize(
    "chunks", [[(1, 9), (1, 4)], [(2, 9), (1, 4)], pytest.param([(34, 40), (1, 4)], marks=SLOW)], ids=str
)
def test_states_may_be_far_away(chunks: list[tuple[int, int]]) -> None:
    backend = GPUBackend("float16", "float16", DEVICE)
    tokens = sum(count for count, _ in chunks)
    x, found = vector(tokens * WIDTH, 2).half().view(tokens, WIDTH) / 4, []
    for base in (0, (1 << 31) // 256):
        metadata = step_of(*chunks, first=base)
        matrices, inputs = (memory(base + 2, *shape, dtype=torch.float32) for shape in ((1, 16, 16), (4, WIDTH)))
        for state in (matrices, inputs):
            state[base:] = vector(512, 3).view(2, *state.shape[1:])
        gates = x[:, 48:49]
        found.append(
            (
                backend.gated_delta(x[:, :16], x[:, 16:32], x[:, 32:48], -gates.abs(), gates, matrices, metadata),
                backend.causal_conv(x, vector(5 * WIDTH).view(5, WIDTH), None, inputs, metadata),
                matrices[base:].clone(),
                inputs[base:].clone(),
            )
        )
    assert all(torch.equal(near, far) for near, far in zip(*found, strict=True))


def test_experts_may_be_far_away() -> None:
    backend, found = GPUBackend("float16", "float16", DEVICE), []
    x = vector(WIDTH, 5).half().view(1, WIDTH)
    for base in (16, (1 << 31) // (16 * WIDTH)):
        w_in, w_out = memory(base + 2, 32, WIDTH), memory(base + 2, WIDTH, 16)
        w_in[base:], w_out[base:] = vector(w_in[:2].numel()).view(2, 32, WIDTH), vector(2048, 2).view(2, WIDTH, 16)
        ids = torch.tensor([[base + 1, base]], device=DEVICE)
        packed = packed_experts(w_in, w_out)
        found.append(backend.experts(x, ids, torch.ones((1, 2), device=DEVICE), packed, "silu"))
    assert torch.equal(*found)


@pytest.mark.parametrize("quantization", [None, "int8-weight-only", "int4"])
def test_rows_of_weights_may_be_far_apart(quantization: str | None) -> None:
    backend = GPUBackend("float16", "float16", DEVICE, quantization, batch_invariant=True)
    weight = backend.pack_linear([host(normal(np.random.default_rng(0), 3, WIDTH))])
    x = vector(2 * WIDTH, 5).half().view(2, WIDTH)
    far = replace(weight, data=apart(weight.data), launches={})
    assert torch.equal(backend.linear(x, far), backend.linear(x, weight))
    ids = torch.tensor([2, 0], device=DEVICE)
    assert torch.equal(backend.embedding(ids, far), backend.embedding(ids, weight))
