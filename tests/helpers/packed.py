"""What packed weights of the CPU backend stand for, and how large they are, read from their arrays."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from quire.checkpoint.small_floats import E4M3, E5M2
from quire.kernels.cpu.linear_coded import ONE_BITS, CodedLinear
from quire.kernels.cpu.linear_int import EIGHT_BIT_ZEROS, IntLinear
from quire.kernels.cpu.products import Weight


def packed_nbytes(weight: Weight) -> int:
    """Return the bytes of all arrays of a packed weight."""
    values = (getattr(weight, field.name) for field in fields(weight))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def unpacked(weight: IntLinear | CodedLinear, ids: np.ndarray) -> np.ndarray:
    """Return rows `ids` of a packed weight as float32 [len(ids), K]."""
    columns = weight.packed_columns(np.asarray(ids))
    block, lane = columns // 16, columns % 16
    words = weight.data.reshape(-1, weight.depth * weight.bits // 32, 16)[block, :, lane]
    return (_integers if isinstance(weight, IntLinear) else _codes)(weight, words, block, lane)  # type: ignore[arg-type]


def _integers(weight: IntLinear, words: np.ndarray, block: np.ndarray, lane: np.ndarray) -> np.ndarray:
    def by_k(stored: np.ndarray) -> np.ndarray:
        groups = stored.view(np.float16).reshape(-1, weight.depth // weight.group, 16)[block, :, lane]
        return np.repeat(groups.astype(np.float32), weight.group, axis=1)

    stored = np.ascontiguousarray(words).view(np.uint8)
    if weight.bits == 4:
        quads = stored.reshape(len(block), -1, 1, 4)
        stored = np.concatenate([quads & 15, quads >> 4], axis=2).reshape(len(block), -1)
    values = stored.astype(np.float32) - np.float32(1 << (weight.bits - 1))
    scale = weight.scales[block * 16 + lane, None]
    if weight.group_scales is not None:
        if weight.zeros is not None:
            values -= by_k(weight.zeros) * np.float32(1 if weight.bits == 4 else EIGHT_BIT_ZEROS)
        scale = by_k(weight.group_scales) * scale
    found = (values * scale)[:, : weight.inputs]
    return found if weight.order is None else found[:, np.argsort(weight.order)]


def _codes(weight: CodedLinear, words: np.ndarray, block: np.ndarray, lane: np.ndarray) -> np.ndarray:
    in_word = 32 // weight.bits
    shifts = np.array([k // 2 * weight.bits + k % 2 * 16 for k in range(in_word)], np.uint32)
    codes = (words[:, :, None] >> shifts).astype(np.uint8).reshape(len(block), -1) & ((1 << weight.bits) - 1)
    table = (weight.table[:16].astype(np.uint32) << 16).view(np.float32) if weight.paired else weight.table
    worth = table if weight.kind == "table" else E4M3 if weight.kind == "e4m3" else E5M2
    scales = weight.scales.reshape(-1, -(-weight.depth // weight.group), 16)[block, :, lane]
    if scales.dtype == np.uint16:
        scales = scales + np.uint16(ONE_BITS if weight.powers else 0)
        scales = (scales.astype(np.uint32) << 16).view(np.float32)
    return (worth[codes] * np.repeat(scales, weight.group, axis=1)[:, : weight.depth])[:, : weight.inputs]
