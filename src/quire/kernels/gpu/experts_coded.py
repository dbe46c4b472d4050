"""Products of tokens with quantized experts, held as `linear_weights.py` says, all experts of a layer together.

Rows come in blocks by expert (`experts_kernels.py`); a block is multiplied as in `gemm_kernels.py`, weights decoded in
registers on the left side, rows of x on the right. Inputs that are rounded are so once for each token, before they are
brought together. Few rows are bound by reading the weights, 128 rows an expert and more by decoding them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from quire.errors import ModelError
from quire.kernels.experts import Expert
from quire.kernels.gpu.activations import gate_and_multiply
from quire.kernels.gpu.experts_kernels import Blocks
from quire.kernels.gpu.gemm_kernels import decoded, operand
from quire.kernels.gpu.linear_codes import KINDS, byte_value, nibble_value
from quire.kernels.gpu.linear_weights import GPULinear
from quire.kernels.gpu.quantize import quantize_rows
from quire.kernels.gpu.tuned_configs import KernelConfig

TENSORS = ("data", "bias", "row_scales", "group_scales", "zeros", "order", "table")
TOGETHER = 8  # blocks of rows that are computed with the same columns, one after the other
NIBBLES = ("int4", "table")


@dataclass(frozen=True, slots=True)
class CodedExperts:
    """All experts of a layer: weights like those of one expert, but each tensor with a first axis of all experts."""

    first: GPULinear
    last: GPULinear

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, inputs of each, and inner values."""
        return self.last.data.shape[0], self.last.outputs, self.last.inputs


def _alike(weight: GPULinear) -> tuple[object, ...]:
    """Return all that must be the same for all experts."""
    shapes = [None if (t := getattr(weight, name)) is None else (t.shape, t.dtype) for name in TENSORS]
    return weight.kind, weight.inputs, weight.outputs, weight.group, weight.rounds, *shapes


def stack(experts: Iterable[Expert], number: int, pack_linear: Callable[..., GPULinear]) -> CodedExperts:
    """Pack experts one by one with the backend's `pack_linear` and copy them into memory for all of them.

    Raises ModelError where they differ in size or format.
    """
    made: tuple[GPULinear, GPULinear] | None = None
    count = 0
    for expert in experts:
        pair = pack_linear(*expert.first, gated=True), pack_linear(*expert.last)
        if made is None:
            kinds, made = list(map(_alike, pair)), (_room(pair[0], number), _room(pair[1], number))
        if list(map(_alike, pair)) != kinds:
            raise ModelError("the experts of a layer are quantized in different ways (expected the same for all)")
        for whole, one in zip(made, pair, strict=True):
            for name in TENSORS:
                if getattr(one, name) is not None:
                    getattr(whole, name)[count].copy_(getattr(one, name))
        count += 1
    assert made is not None and count == number, "as many experts as were announced"
    return CodedExperts(*made)


def _room(one: GPULinear, number: int) -> GPULinear:
    """Return a weight whose tensors have room for so many."""
    tensors: dict[str, Any] = {name: getattr(one, name) for name in TENSORS}
    rooms: dict[str, Any] = {
        name: None if t is None else t.new_empty((number, *t.shape)) for name, t in tensors.items()
    }
    return replace(one, near_bias=None, launches={}, **rooms)


@triton.jit
def _columns(x, rows, order, k, inputs, K, EVEN: tl.constexpr, ORDERED: tl.constexpr):
    """Return x[rows, k], or the inputs that columns k of the weight belong to; 0 beyond the last."""
    if ORDERED:
        where = tl.load(order + k, k < inputs, other=0)
        return tl.load(x + rows[:, None] + where[None, :], (k < inputs)[None, :], other=0)
    if EVEN:
        return tl.load(x + rows[:, None] + k[None, :])
    return tl.load(x + rows[:, None] + k[None, :], (k < K)[None, :], other=0)


@triton.jit
def _stored(w, columns, k, stop, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(w + columns[:, None] + k[None, :])
    return tl.load(w + columns[:, None] + k[None, :], (k < stop)[None, :], other=0)


@triton.jit
def _product(
    x, rows, order, w, group_scales, zeros, table, n, K, inputs, w_row, g_row,
    KIND: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr, X_CODES: tl.constexpr, ORDERED: tl.constexpr,
    DIRECT: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return rows n of a weight times rows of x, float32 [BN, BM], before scales of rows; see `gemm_kernel`."""
    columns, base = n * w_row, n * g_row
    nibbles: tl.constexpr = KIND == 2 or KIND == 5
    WIDTH: tl.constexpr = BK // 2 if nibbles else BK
    acc = tl.zeros([BN, BM], tl.int32 if DIRECT and KIND == 1 else tl.float32)
    at = tl.arange(0, WIDTH)
    for k0 in range(0, K, BK):
        if nibbles:
            k = k0 + at // 16 * 32 + at % 16
            stored = _stored(w, columns, k0 // 2 + at, w_row, EVEN).to(tl.int32)
            low = nibble_value(stored & 15, table, KIND)
            low = decoded(low, group_scales, zeros, base, k0, K, 0, KIND, G, HAS_ZEROS, BK, WIDTH, 32)
            first = operand(_columns(x, rows, order, k, inputs, K, EVEN, ORDERED), X_CODES, NATIVE, ACT)
            acc = tl.dot(low.to(ACT), tl.trans(first), acc, input_precision="ieee")
            high = nibble_value(stored >> 4, table, KIND)
            high = decoded(high, group_scales, zeros, base, k0, K, 16, KIND, G, HAS_ZEROS, BK, WIDTH, 32)
            second = operand(_columns(x, rows, order, k + 16, inputs, K, EVEN, ORDERED), X_CODES, NATIVE, ACT)
            acc = tl.dot(high.to(ACT), tl.trans(second), acc, input_precision="ieee")
        else:
            k = k0 + at
            given = _columns(x, rows, order, k, inputs, K, EVEN, ORDERED)
            stored = _stored(w, columns, k, w_row, EVEN)
            if DIRECT and KIND == 1:
                acc += tl.dot(stored, tl.trans(given), out_dtype=tl.int32)
            elif DIRECT and KIND == 3:
                left, right = stored.to(tl.float8e4nv, bitcast=True), given.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot(left, tl.trans(right), acc, max_num_imprecise_acc=128)
            else:
                values = byte_value(stored, KIND, NATIVE)
                values = decoded(values, group_scales, zeros, base, k0, K, 0, KIND, G, HAS_ZEROS, BK, WIDTH, 16)
                right = operand(given, X_CODES, NATIVE, ACT)
                acc = tl.dot(values.to(ACT), tl.trans(right), acc, input_precision="ieee")
    return acc.to(tl.float32)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def coded_kernel(
    x, x_scales, w, row_scales, group_scales, zeros, table, bias, order, pairs, owners, out,
    num_pairs, num_blocks, N, K, inputs, x_row, w_row, g_row,
    DIVISOR: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    X_SCALED: tl.constexpr, X_CODES: tl.constexpr, ROW_SCALED: tl.constexpr, ORDERED: tl.constexpr,
    GATE: tl.constexpr, DIRECT: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """out[pair] = w[expert] @ x[pair // DIVISOR] for pairs of a block; with GATE, w has 2 N rows, gate's and up's."""
    tiles = tl.cdiv(N, BN)
    index = tl.program_id(0)
    first = index // (TOGETHER * tiles) * TOGETHER
    height = tl.minimum(num_blocks - first, TOGETHER)
    block, tile = first + index % (TOGETHER * tiles) % height, index % (TOGETHER * tiles) // height
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    parts: tl.constexpr = 2 if GATE > 0 else 1
    n = tile * BN + tl.arange(0, BN)
    # Rows of the stack: those beyond a matrix are its last one, and nobody stores them.
    own = expert * parts * N + tl.minimum(n, N - 1)
    pair = tl.load(pairs + block * BM + tl.arange(0, BM))
    row = tl.minimum(pair, num_pairs - 1) // DIVISOR
    rows = row.to(tl.int64) * x_row
    order += expert * inputs
    table += expert * 16
    result = _product(
        x, rows, order, w, group_scales, zeros, table, own, K, inputs, w_row, g_row,
        KIND, G, HAS_ZEROS, X_CODES, ORDERED, DIRECT, NATIVE, EVEN, ACT, BM, BN, BK,
    )  # fmt: skip
    factor = tl.load(x_scales + row)[None, :] if X_SCALED else 1.0
    result *= factor
    if ROW_SCALED:
        result *= tl.load(row_scales + own)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + own)[:, None]
    if GATE > 0:
        up = _product(
            x, rows, order, w, group_scales, zeros, table, own + N, K, inputs, w_row, g_row,
            KIND, G, HAS_ZEROS, X_CODES, ORDERED, DIRECT, NATIVE, EVEN, ACT, BM, BN, BK,
        )  # fmt: skip
        up *= factor
        if ROW_SCALED:
            up *= tl.load(row_scales + own + N)[:, None]
        if HAS_BIAS:
            up += tl.load(bias + own + N)[:, None]
        result = gate_and_multiply(result, up, GATE)
    where = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(where, tl.trans(result).to(out.dtype.element_ty), (pair < num_pairs)[:, None] & (n < N)[None, :])


def default_tiles(weight: GPULinear, size: int, act: torch.dtype) -> KernelConfig:
    """Return tiles for blocks of `size` rows; fp8's sums are cut at 128 of K, below which a step must not be."""
    bytes_ = weight.rounds is not None and weight.group == 0
    if act is torch.float32:
        return {"BN": 32, "BK": 128 if bytes_ else 64, "num_warps": 4, "num_stages": 2}
    if size <= 32:
        return {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}
    wide = 64 if size == 64 else 128
    return {"BN": wide, "BK": 128 if bytes_ else 64, "num_warps": 4 if size == 64 else 8, "num_stages": 3}


def is_direct(weight: GPULinear, compiled: bool, capability: tuple[int, int]) -> bool:
    """Whether both sides of a product are multiplied as they are stored."""
    if weight.kind == "int8":
        return weight.rounds == "int8" and weight.group == 0
    return weight.kind == "e4m3" and weight.rounds == "e4m3" and compiled and capability >= (8, 9)


def product(
    x: torch.Tensor, weight: GPULinear, blocks: Blocks, top_k: int, gate: int, act: torch.dtype, options: dict[str, Any]
) -> torch.Tensor:
    """Return the products of pairs, [pairs, N] of `act`: x [pairs / top_k, K].

    With `gate`, an activation's number, gate times up. options: tiles, and what the kernel is told of the chip.
    """
    pairs, outputs = x.shape[0] * top_k, weight.outputs // (2 if gate else 1)
    scales, data, groups = None, weight.data, weight.group_scales
    if weight.rounds is not None:
        x, scales = quantize_rows(x, e4m3=weight.rounds == "e4m3", depth=weight.depth)
    elif x.dtype != act:
        x = x.to(act)
    out = torch.empty((pairs, outputs), dtype=act, device=x.device)
    num_blocks = blocks.experts.shape[0]
    coded_kernel[(num_blocks * triton.cdiv(outputs, options["BN"]),)](
        x, data if scales is None else scales, data, data if weight.row_scales is None else weight.row_scales,
        data if groups is None else groups, data if weight.zeros is None else weight.zeros,
        data if weight.table is None else weight.table, data if weight.bias is None else weight.bias,
        data if weight.order is None else weight.order, blocks.pairs, blocks.experts, out,
        pairs, num_blocks, outputs, x.shape[1], weight.inputs, x.stride(0), data.stride(1),
        0 if groups is None else groups.stride(1), DIVISOR=top_k, KIND=KINDS[weight.kind], G=weight.group,
        HAS_ZEROS=weight.zeros is not None, HAS_BIAS=weight.bias is not None, X_SCALED=scales is not None,
        X_CODES=weight.rounds == "e4m3", ROW_SCALED=weight.row_scales is not None, ORDERED=weight.order is not None,
        GATE=gate, EVEN=x.shape[1] % options["BK"] == 0, BM=blocks.size, TOGETHER=TOGETHER, **options,
    )  # fmt: skip
    return out
