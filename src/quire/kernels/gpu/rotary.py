"""Rotary positions of queries and keys in place, in one launch.

Bound by memory: each rotated element is read and written once, the rows of the table come from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 2048  # that one program rotates


@triton.jit
def _rotate(
    x, positions, table, stride, heads, count, first,
    SIZE: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate heads `first` to first + ROWS - 1 of all `count` heads of x."""
    number = first + tl.arange(0, ROWS)
    valid = number < count
    row = (number // heads).to(tl.int64)
    place = x + row * stride + (number % heads) * SIZE
    angles = table + tl.load(positions + row, mask=valid, other=0).to(tl.int64) * (2 * HALF)
    column = tl.arange(0, HB)
    mask = valid[:, None] & (column < HALF)[None, :]
    cos = tl.load(angles[:, None] + column[None, :], mask=mask, other=0)
    sin = tl.load(angles[:, None] + (HALF + column)[None, :], mask=mask, other=0)
    if INTERLEAVED:
        both = tl.arange(0, 2 * HB)
        whole = valid[:, None] & (both < 2 * HALF)[None, :]
        pairs = tl.load(place[:, None] + both[None, :], mask=whole, other=0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (ROWS, HB, 2)))
        made = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, 2 * HB))
        tl.store(place[:, None] + both[None, :], made.to(x.dtype.element_ty), mask=whole)
    else:
        first_half = place[:, None] + column[None, :]
        a = tl.load(first_half, mask=mask, other=0).to(tl.float32)
        b = tl.load(first_half + HALF, mask=mask, other=0).to(tl.float32)
        tl.store(first_half, (a * cos - b * sin).to(x.dtype.element_ty), mask=mask)
        tl.store(first_half + HALF, (b * cos + a * sin).to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["q_count", "k_count", "q_programs"])
def rotary_kernel(
    q, k, positions, table, q_stride, k_stride, q_heads, k_heads, q_count, k_count, q_programs,
    SIZE: tl.constexpr, HALF: tl.constexpr, HB: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first `q_programs` rotate heads of q, the others of k."""
    program = tl.program_id(0)
    if program < q_programs:
        _rotate(q, positions, table, q_stride, q_heads, q_count, program * ROWS, SIZE, HALF, HB, ROWS, INTERLEAVED)
    else:
        begin = (program - q_programs) * ROWS
        _rotate(k, positions, table, k_stride, k_heads, k_count, begin, SIZE, HALF, HB, ROWS, INTERLEAVED)


def rotate(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    head_size: int,
    interleaved: bool,
) -> None:
    """See `Backend.rotary_embedding`. q and k may be views whose rows are apart."""
    assert q.stride(1) == 1 and k.stride(1) == 1, "what is changed in place has whole rows"
    assert cos_sin.is_contiguous(), "the table is contiguous"
    half = cos_sin.shape[1] // 2
    padded = triton.next_power_of_2(half)
    q_heads, k_heads, tokens = q.shape[1] // head_size, k.shape[1] // head_size, q.shape[0]
    if tokens == 0:
        return
    # One token's heads are shared among programs; those of many fill them.
    rows = max(1, ELEMENTS // (2 * padded))
    if tokens * q_heads <= 16 * rows:
        rows = max(1, rows // 4)
    q_programs = triton.cdiv(tokens * q_heads, rows)
    rotary_kernel[(q_programs + triton.cdiv(tokens * k_heads, rows),)](
        q, k, positions, cos_sin, q.stride(0), k.stride(0), q_heads, k_heads,
        tokens * q_heads, tokens * k_heads, q_programs,
        SIZE=head_size, HALF=half, HB=padded, ROWS=rows, INTERLEAVED=interleaved,
        enable_fp_fusion=False,  # the same numbers as where keys are rotated on their way to the cache
    )  # fmt: skip
