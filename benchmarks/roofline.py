"""What the machine can do, and how much of it each kernel gets: bandwidth and peak rates first, then kernels.

The limit of a kernel is the time its bytes take at the measured bandwidth, or its arithmetic at the measured peak,
whichever is longer. Weights and caches rotate through more memory than the caches hold, as in a model; the peaks are
those of the same instructions with all operands in the first-level cache. Best of the repetitions.

    python benchmarks/roofline.py [--shape M1|M2] [--rows 1,4,16,64,1024] [--threads 2]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common import print_header, print_table

from quire.checkpoint.quantization.tensors import CodeTensor, code_layout
from quire.checkpoint.small_floats import E2M1
from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu import simd
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.jit import op
from quire.kernels.cpu.pointers import bf16_ptr, f16_ptr, f32_ptr, i32_ptr, u32_ptr
from quire.kernels.cpu.threads import Launcher, measure_bandwidth

MIB = 2**20
octets_many = simd.int8_tiles[simd.HAS_VNNI][0]
ROTATE = 256 * MIB  # bytes of weights that a kernel goes through before it meets the first again


@dataclass(frozen=True)
class Shape:
    """A model's sizes."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each linear layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        return {
            "qkv": (qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_size),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {"M1": Shape(1024, 3072, 16, 8, 128, 32768), "M2": Shape(576, 1536, 9, 3, 64, 49152)}


@dataclass(frozen=True)
class Limits:
    """Bytes a second and operations a second, by the kind of product."""

    bandwidth: float
    peaks: dict[str, float]

    def seconds(self, size: float, work: float, kind: str) -> float:
        """Return the least time for so many bytes and operations."""
        return max(size / self.bandwidth, work / self.peaks[kind])


@op
def multiply_floats(args, first, last, scratch):
    """Tiles of 8 x 32 over a K of 128, all in the cache. args: w, x, out."""
    w, x, out = f32_ptr(args[0]), f32_ptr(args[1]), f32_ptr(args[2])
    rows = simd.TILE_ROWS
    for i in range(first, last):
        simd.tile_many(w, 0, 16, 2048, x, 0, rows, 1, 128, out, i * 256, 32, 0)


@op
def multiply_pairs(args, first, last, scratch):
    """Like `multiply_floats` for bfloat16."""
    w, x, out = bf16_ptr(args[0]), u32_ptr(args[1]), f32_ptr(args[2])
    for i in range(first, last):
        simd.dot_many(w, 0, 2048, x, 0, 64, out, i * 256, 32, 0, 0, 0)


@op
def multiply_octets(args, first, last, scratch):
    """Like `multiply_floats` for 8-bit integers."""
    w, x, out, starts, none = u32_ptr(args[0]), u32_ptr(args[1]), f32_ptr(args[2]), i32_ptr(args[0]), f16_ptr(args[3])
    for i in range(first, last):
        octets_many(w, 0, 512, x, 0, 8, starts, 0, 1, 32, none, none, 0, 0, out, i * 256, 0, 0)


def best(call: Callable[[], object], repeat: int = 9) -> float:
    """Return the least seconds of some calls after one that warms up."""
    call()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_limits(launcher: Launcher) -> Limits:
    """Measure bandwidth and peaks."""
    bandwidth = measure_bandwidth(launcher)
    w, x = np.ones(1 << 16, np.float32), np.ones(1 << 16, np.float32)
    out = np.zeros(1 << 20, np.float32)
    items = 4096
    work = 2 * items * 32 * 128

    def rate(multiply: object, rows: int) -> float:
        return work * rows / best(lambda: launcher.emit(multiply, w, x, out, None, items=items, work=work, grain=64))

    peaks = {"float32": rate(multiply_floats, simd.TILE_ROWS)}
    peaks["bfloat16"] = rate(multiply_pairs, 8) if simd.HAS_BF16_DOT else peaks["float32"]
    peaks["int8"] = rate(multiply_octets, 8) if simd.HAS_VNNI else peaks["float32"]
    return Limits(bandwidth, peaks)


def random_matrix(rng: np.random.Generator, outputs: int, inputs: int) -> HostTensor:
    """Return small random numbers in bfloat16."""
    signs = rng.integers(0, 2, (outputs, inputs), dtype=np.uint16) << 15
    return HostTensor(signs | rng.integers(0x3C00, 0x3D80, (outputs, inputs), dtype=np.uint16), "bfloat16")


def weight_bytes(weight: object) -> int:
    """Return the bytes of a packed weight."""
    return int(weight.nbytes)  # type: ignore[attr-defined]


def multiply_all(backend: CPUBackend, x: np.ndarray, weights: list[Any]) -> tuple[None]:
    """Multiply x by one weight after the other."""
    for weight in weights:
        backend.linear(x, weight)
    return (None,)


def linear_rows(
    shape: Shape, quantization: str | None, counts: list[int], threads: int, limits: Limits
) -> list[list[str]]:
    """Measure every linear layer for each number of rows; a table row for each layer."""
    backend = CPUBackend("bfloat16", "bfloat16", threads, quantization=quantization)
    kind = "int8" if quantization else "bfloat16"
    rng, table = np.random.default_rng(0), []
    for name, (outputs, inputs) in shape.matrices().items():
        matrix = random_matrix(rng, outputs, inputs)
        weights = [backend.pack_linear([matrix], table=name == "head")]
        size = weight_bytes(weights[0])
        while len(weights) * size < ROTATE:
            weights.append(backend.pack_linear([matrix], table=name == "head"))
        cells = [f"{quantization or 'bf16'} {name} {outputs}x{inputs}"]
        for rows in counts:
            x = rng.standard_normal((rows, inputs)).astype(np.float32)
            used = weights if rows <= 64 else weights[:4]
            seconds = best(backend.graph(partial(multiply_all, backend, x, used))) / len(used)
            least = limits.seconds(size, 2 * rows * outputs * inputs, kind)
            cells.append(f"{seconds * 1e6:.0f} us {100 * least / seconds:.0f} %")
        table.append(cells)
    return table


def random_codes(rng: np.random.Generator, kind: str, group: int, outputs: int, inputs: int) -> CodeTensor:
    """Return a weight of random codes; scales are powers of two where a group is 32, as in MXFP4."""
    codes = rng.integers(0, 16 if kind == "table" else 0x78, (outputs, inputs), dtype=np.uint8)
    scales = np.float32(2.0) ** rng.integers(-9, -5, (outputs, -(-inputs // group)))
    powers = group == 32
    layout = code_layout(kind, group, inputs, scale_bytes=2 if powers else 4)
    table = E2M1 if powers else np.linspace(-1, 1, 16, dtype=np.float32) if kind == "table" else None
    scales = scales.astype(np.float32) if powers else scales.astype(np.float32) * np.float32(1.1)
    return CodeTensor.whole(
        (outputs, inputs),
        group,
        layout,
        lambda rows, across: codes[rows, across],
        lambda rows: scales[rows],
        kind=kind,
        table=table,
    )


# what checkpoints hold as codes: kind, inputs that share a scale, 0 for all
CODED = {"fp8 rows": ("e4m3", 0), "fp8 blocks": ("e4m3", 128), "nf4": ("table", 64), "mxfp4": ("table", 32)}


def coded_rows(shape: Shape, counts: list[int], threads: int) -> list[list[str]]:
    """Measure one layer with weights that are codes, in turns with bfloat16; a table row for each format."""
    backend = CPUBackend("bfloat16", "bfloat16", threads)
    rng, (outputs, inputs) = np.random.default_rng(0), shape.matrices()["gate_up"]
    copies = 1 + ROTATE // (2 * outputs * inputs)
    plain = [backend.pack_linear([random_matrix(rng, outputs, inputs)]) for _ in range(copies)]
    table = []
    for name, (kind, group) in CODED.items():
        tensor = random_codes(rng, kind, group or inputs, outputs, inputs)
        weights = [backend.pack_linear([tensor]) for _ in range(copies)]
        cells = [name]
        for rows in counts:
            x, used = rng.standard_normal((rows, inputs)).astype(np.float32), copies if rows <= 64 else 2
            seconds = in_turns(
                [backend.graph(partial(multiply_all, backend, x, some[:used])) for some in (weights, plain)]
            )
            cells.append(f"{seconds[0] / used * 1e6:.0f} us {seconds[0] / seconds[1]:.2f}")
        table.append(cells)
    return table


def in_turns(calls: list[Callable[[], object]], repeat: int = 9) -> list[float]:
    """Return the least seconds of each, one after the other again and again so that all see the same machine."""
    times = [[best(call, 1) for call in calls] for _ in range(repeat)]
    return [min(column) for column in zip(*times, strict=True)]


# sequences, tokens of each in the step, context of each
ATTENTION = {
    "decode, 1 x 256": (1, 1, 256),
    "decode, 1 x 4096": (1, 1, 4096),
    "decode, 16 x 1024": (16, 1, 1024),
    "prefill, 1 x 1024": (1, 1024, 1024),
    "chunk of 512 after 3584": (1, 512, 4096),
}


def attention_rows(shape: Shape, threads: int, limits: Limits) -> list[list[str]]:
    """Measure attention in the main situations; a table row for each, by KV format."""
    table = []
    for title, (sequences, tokens, context) in ATTENTION.items():
        cells = [title]
        for kv_dtype in ("float32", "bfloat16", "int8"):
            seconds, size, work = attend(shape, kv_dtype, threads, sequences, tokens, context)
            kind = "float32" if kv_dtype == "float32" else "bfloat16"
            least = limits.seconds(size, work, kind)
            cells.append(f"{seconds * 1e6:.0f} us {100 * least / seconds:.0f} %")
        table.append(cells)
    return table


def attend(
    shape: Shape, kv_dtype: str, threads: int, sequences: int, tokens: int, context: int
) -> tuple[float, float, float]:
    """Measure one situation: seconds, bytes of the cache that must be read, and operations that causality leaves."""
    backend, block = CPUBackend("bfloat16", kv_dtype, threads), 16
    blocks = sequences * context // block
    element = {"float32": 4, "bfloat16": 2, "int8": 1}[kv_dtype]
    size = sequences * context * shape.kv_heads * shape.head_size * 2 * element
    caches = [backend.new_kv_cache(blocks, block, shape.kv_heads, shape.head_size) for _ in range(1 + ROTATE // size)]
    rng = np.random.default_rng(0)
    k = rng.standard_normal((sequences * context, shape.kv_heads * shape.head_size)).astype(np.float32)
    for cache in caches:
        backend.write_kv(k, k, cache, np.arange(sequences * context))
    q = rng.standard_normal((sequences * tokens, shape.heads * shape.head_size)).astype(np.float32)
    tables = rng.permutation(blocks).astype(np.int32).reshape(sequences, -1)
    metadata = AttentionMetadata(
        cu_query_lens=np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32),
        seq_lens=np.full(sequences, context, np.int32),
        block_tables=tables,
        slot_mapping=np.zeros(sequences * tokens, np.int64),
    )
    params = AttentionParams(shape.heads, shape.kv_heads, shape.head_size, shape.head_size**-0.5)

    def build() -> tuple[None]:
        for cache in caches:
            backend.paged_attention(q, cache, metadata, params)
        return (None,)

    seconds = best(backend.graph(build)) / len(caches)
    seen = sequences * sum(range(context - tokens + 1, context + 1))
    return seconds, size, 4 * seen * shape.heads * shape.head_size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="M1")
    parser.add_argument("--rows", default="1,4,16,64,1024", help="rows of x for the linear layers")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print_header(f"Kernels and limits, {args.shape}, {args.threads} threads")
    limits = measure_limits(Launcher(args.threads))
    print(f"read bandwidth {limits.bandwidth / 1e9:.1f} GB/s")
    print("peaks, 10^9 operations/s: " + ", ".join(f"{kind} {rate / 1e9:.0f}" for kind, rate in limits.peaks.items()))
    print()
    shape, counts = SHAPES[args.shape], [int(count) for count in args.rows.split(",")]
    rows = [row for kind in (None, "int8", "int4") for row in linear_rows(shape, kind, counts, args.threads, limits)]
    print_table(("linear: time and share of the limit", *(f"{count} rows" for count in counts)), rows)
    rows = coded_rows(shape, counts, args.threads)
    print_table(("codes: time and that of bf16 = 1", *(f"{count} rows" for count in counts)), rows)
    rows = attention_rows(shape, args.threads, limits)
    print_table(("attention: time and share of the limit", "KV float32", "KV bfloat16", "KV int8"), rows)


if __name__ == "__main__":
    main()
