"""Ops on rows of activations: norms, rotary positions, activations. All are bound by memory.

A norm keeps a row in registers between its sum and its result: it is read once and written once. Which rows share a
program depends on their width alone, so that a row's bits never depend on how many there are. Rotation reads and writes
each rotated element once; the rows of its table come from the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.activations import ACTIVATIONS, activate
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.kernel_args import Rows, power_of_two, rows_of, whole_rows
from quire.kernels.gpu.pdl import launch_dependents, wait_for_dependencies

ELEMENTS = 1024  # that one program norms of several narrow pieces, or computes one by one
ROTATED_ELEMENTS = 2048  # of a program that rotates
PER_THREAD = 16  # elements of a norm: two loads of 16 bytes of a 16-bit type


class Norm(NamedTuple):
    """What a norm is compiled for: pieces of `width` elements, padded, of which a program has `rows`.

    centered: around the mean (layer norm). pdl: see `pdl.py`.
    """

    width: int
    padded: int
    rows: int
    centered: bool
    pdl: bool


@triton.jit(do_not_specialize=["count"])
def norm_kernel(x, residual, weight, bias, out, pieces, count, eps, FORM: tl.constexpr):
    """Norm `count` pieces, of which a row of x has `pieces`; with a residual the norm of residual + x, which is kept.

    x: `Rows`; residual: `Rows` or None. weight, bias (or None): float32 [width].
    """
    launch_dependents(FORM.pdl)
    piece = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    columns = tl.arange(0, FORM.padded)
    inside = columns < FORM.width
    row, start = (piece // pieces).to(tl.int64), (piece % pieces) * FORM.width
    mask = (piece < count)[:, None] & inside[None, :]
    scales = tl.load(weight + columns, mask=inside, other=0)
    wait_for_dependencies(FORM.pdl)
    source = x.data + (row * x.stride + start)[:, None] + columns[None, :]
    values = tl.load(source, mask=mask, other=0).to(tl.float32)
    if residual is not None:
        places = residual.data + (row * residual.stride + start)[:, None] + columns[None, :]
        values += tl.load(places, mask=mask, other=0).to(tl.float32)
        kept = values.to(residual.data.dtype.element_ty)
        tl.store(places, kept, mask=mask)
        values = kept.to(tl.float32)  # the norm is that of what the next layer will find
    if FORM.centered:
        # The mean is taken twice, the second time of what the first left: values may be close together, far from 0.
        values = tl.where(inside[None, :], values - (tl.sum(values, 1) / FORM.width)[:, None], 0.0)
        values = tl.where(inside[None, :], values - (tl.sum(values, 1) / FORM.width)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 1) / FORM.width + eps)
    normed = values * factor[:, None] * scales[None, :]
    if bias is not None:
        normed += tl.load(bias + columns, mask=inside, other=0)[None, :]
    target = out + piece.to(tl.int64)[:, None] * FORM.width + columns[None, :]
    tl.store(target, normed.to(out.dtype.element_ty), mask=mask)


class Rotary(NamedTuple):
    """What rotation is compiled for: heads of `size` elements, of which the first 2 * `half` are rotated.

    padded: `half` to a power of two. rows: heads of a program. interleaved: pairs are neighbours, not halves apart.
    """

    q_heads: int
    k_heads: int
    size: int
    half: int
    padded: int
    rows: int
    interleaved: bool


@triton.jit
def _rotate(x, positions, table, tokens, program, HEADS: tl.constexpr, FORM: tl.constexpr):
    """Rotate the heads of one program among all of x."""
    number = program * FORM.rows + tl.arange(0, FORM.rows)
    valid = number < tokens * HEADS
    row = (number // HEADS).to(tl.int64)
    place = (x.data + row * x.stride + (number % HEADS) * FORM.size)[:, None]
    angles = (table + tl.load(positions + row, mask=valid, other=0).to(tl.int64) * (2 * FORM.half))[:, None]
    column = tl.arange(0, FORM.padded)
    mask = valid[:, None] & (column < FORM.half)[None, :]
    cos = tl.load(angles + column[None, :], mask=mask, other=0)
    sin = tl.load(angles + (FORM.half + column)[None, :], mask=mask, other=0)
    ROWS: tl.constexpr = FORM.rows
    PADDED: tl.constexpr = FORM.padded
    if FORM.interleaved:
        both = tl.arange(0, 2 * PADDED)
        whole = valid[:, None] & (both < 2 * FORM.half)[None, :]
        pairs = tl.load(place + both[None, :], mask=whole, other=0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (ROWS, PADDED, 2)))
        rotated = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, 2 * PADDED))
        tl.store(place + both[None, :], rotated.to(x.data.dtype.element_ty), mask=whole)
    else:
        first, second = place + column[None, :], place + (FORM.half + column)[None, :]
        a = tl.load(first, mask=mask, other=0).to(tl.float32)
        b = tl.load(second, mask=mask, other=0).to(tl.float32)
        tl.store(first, (a * cos - b * sin).to(x.data.dtype.element_ty), mask=mask)
        tl.store(second, (b * cos + a * sin).to(x.data.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def rotary_kernel(q, k, positions, table, tokens, FORM: tl.constexpr):
    """Rotate q and k, each `Rows`, in place: the first programs do so for heads of q, the others for those of k."""
    program = tl.program_id(0)
    q_programs = tl.cdiv(tokens * FORM.q_heads, FORM.rows)
    if program < q_programs:
        _rotate(q, positions, table, tokens, program, FORM.q_heads, FORM)
    else:
        _rotate(k, positions, table, tokens, program - q_programs, FORM.k_heads, FORM)


@triton.jit
def _tanh(x):
    """tanh, accurate near 0."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * 62.0 / 2835.0))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, series, tl.where(x < 0.0, -far, far))


@triton.jit
def activation_kernel(x, out, width, count, ACTIVATION_ID: tl.constexpr, BLOCK: tl.constexpr):
    """Apply the activation to `count` elements of x, `Rows` of `width`; those of out are contiguous."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    values = tl.load(x.data + at // width * x.stride + at % width, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, activate(values, ACTIVATION_ID).to(out.dtype.element_ty), mask=mask)


@triton.jit
def softcap_kernel(x, width, count, cap, BLOCK: tl.constexpr):
    """x = cap * tanh(x / cap) of `count` elements of `Rows`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    place = x.data + at // width * x.stride + at % width
    values = tl.load(place, mask=mask, other=0).to(tl.float32)
    tl.store(place, (cap * _tanh(values / cap)).to(x.data.dtype.element_ty), mask=mask)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., N] as [T, N], whose rows may be apart but are whole; a view where that is possible."""
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


class RowOps(ArrayOps):
    """Norms, rotation, activations."""

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, None, eps, centered=False)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm is computed from the sum as rounded to the type of `residual`."""
        return self._norm(x, whole_rows(residual), weight, None, eps, centered=False)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        if x.shape[-1] != weight.shape[0]:
            raise ValueError(f"layer norm: rows have {x.shape[-1]} elements, the weight has {weight.shape[0]}")
        return self._norm(x, None, weight, bias, eps, centered=True)

    def _norm(
        self,
        x: torch.Tensor,
        residual: Rows | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        centered: bool,
    ) -> torch.Tensor:
        """Return the norm in `act` of each piece of x [..., n * W], weight [W]; or of residual + x, which is kept."""
        source, width = as_rows(x), weight.shape[0]
        out = torch.empty(x.shape, dtype=self.act, device=x.device)
        pieces = source.shape[1] // width
        if source.shape[1] != pieces * width:
            raise ValueError(f"norm: rows of {source.shape[1]} elements cannot be cut into pieces of {width}")
        count = source.shape[0] * pieces
        if count == 0:
            return out
        padded, pdl = power_of_two(width), self.pdl and not centered
        form = Norm(width, padded, max(1, ELEMENTS // padded), centered, pdl)
        warps = min(16, max(1, form.rows * padded // (32 * PER_THREAD)))
        norm_kernel[(-(-count // form.rows),)](
            rows_of(source), residual, weight, bias, out, pieces, count, eps, FORM=form, num_warps=warps, launch_pdl=pdl
        )
        return out

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        head_size: int,
        interleaved: bool,
    ) -> None:
        assert cos_sin.is_contiguous(), "the table is contiguous"
        half, tokens = cos_sin.shape[1] // 2, q.shape[0]
        if tokens == 0:
            return
        padded, q_heads, k_heads = power_of_two(half), q.shape[1] // head_size, k.shape[1] // head_size
        # One token's heads are shared among programs; those of many fill them.
        rows = max(1, ROTATED_ELEMENTS // (2 * padded))
        if tokens * q_heads <= 16 * rows:
            rows = max(1, rows // 4)
        form = Rotary(q_heads, k_heads, head_size, half, padded, rows, interleaved)
        # Without fused operations: the same numbers as where keys are rotated on their way to the cache.
        rotary_kernel[(-(-tokens * q_heads // rows) + -(-tokens * k_heads // rows),)](
            whole_rows(q), whole_rows(k), positions, cos_sin, tokens, FORM=form, enable_fp_fusion=False
        )

    def activation(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The result has the type of x: the gates of recurrent states are float32 and need its precision."""
        activation_id, source = ACTIVATIONS[activation], as_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        count = source.numel()
        if count:
            grid = (-(-count // ELEMENTS),)
            activation_kernel[grid](
                rows_of(source), out, source.shape[1], count, ACTIVATION_ID=activation_id, BLOCK=ELEMENTS
            )
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        count = x.numel()
        if count:
            grid = (-(-count // ELEMENTS),)
            softcap_kernel[grid](whole_rows(x), x.shape[1], count, float(cap), BLOCK=ELEMENTS)
