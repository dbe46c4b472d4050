"""The paged KV cache: its memory, the kernels that write to it, copying, reading and writing whole blocks.

The kernels are bound by memory: a token's keys and values are read once and written once, by one program with loads of
16 bytes a thread. They are compiled without fused operations (`enable_fp_fusion`), which would leave out a rounding, so
that what is stored is what the reference stores.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from quire.errors import ConfigError
from quire.kernels.backend import HeadNorms
from quire.kernels.gpu.arrays import TORCH_DTYPES, ArrayOps
from quire.kernels.gpu.pdl import launch_dependents, wait_for_dependencies

SMALLEST: tl.constexpr = tl.constexpr(2.0**-120)  # what is smaller counts as 0, as in the reference
PLAIN: tl.constexpr = tl.constexpr(0)  # how vectors are stored: as floats,
INT8: tl.constexpr = tl.constexpr(1)  # as integers and a scale,
FP8: tl.constexpr = tl.constexpr(2)  # as float8_e4m3fn and a scale


@triton.jit
def scale_of(size, finite, STORED: tl.constexpr):
    """Return what to multiply vectors with before rounding, and the scale to store, from their largest sizes."""
    LIMIT: tl.constexpr = 127.0 if STORED == 1 else 448.0
    size = tl.where(size >= SMALLEST, size, 0.0)
    up = tl.where(size > 0, tl.div_rn(tl.full(size.shape, LIMIT, tl.float32), tl.where(size > 0, size, 1.0)), 0.0)
    scale = tl.div_rn(size, tl.full(size.shape, LIMIT, tl.float32))
    return tl.where(finite, up, 0.0), tl.where(finite, scale, float("nan"))


@triton.jit
def rounded(x, STORED: tl.constexpr):
    """Round scaled float32 numbers to what the format can hold, to the nearest, ties to even.

    Adding and subtracting a large number rounds to a multiple of its last bit. For float8 the numbers of three bits
    after the first are found in the bits themselves, so that the conversion that follows has nothing left to round.
    """
    if STORED == 1:
        return x + 12582912.0 - 12582912.0
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = x + 24576.0 - 24576.0  # subnormal: multiples of 2**-9
    x = tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def store_heads(x, data, scales, at, scale_at, offsets, mask, heads_mask, STORED: tl.constexpr):
    """Store float32 vectors [heads, D] at data + at[:, None] + offsets, and their scales at scales + scale_at."""
    if STORED == 0:
        tl.store(data + at[:, None] + offsets[None, :], x.to(data.dtype.element_ty), mask=mask)
    else:
        x = tl.where(mask, x, 0.0)
        sound = tl.abs(x) < float("inf")
        finite = tl.max(sound.to(tl.int32) ^ 1, axis=1) == 0
        up, scale = scale_of(tl.max(tl.where(sound, tl.abs(x), 0.0), axis=1), finite, STORED)
        q = rounded(tl.where(finite[:, None], x, 0.0) * up[:, None], STORED)
        tl.store(data + at[:, None] + offsets[None, :], q.to(data.dtype.element_ty), mask=mask)
        tl.store(scales + scale_at, scale, mask=heads_mask)


@triton.jit
def write_kernel(
    k, v, data, scales, slots, k_step, v_step,
    SIDES: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Store TILE heads of one token, keys and, unless the cache is latent, values. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
        within = tl.arange(0, PADDED)
        heads_mask = heads < HEADS
        mask = heads_mask[:, None] & (within < SIZE)[None, :]
        for side in tl.static_range(SIDES):
            source = k + token * k_step if side == 0 else v + token * v_step
            x = tl.load(source + heads[:, None] * SIZE + within[None, :], mask=mask, other=0.0).to(tl.float32)
            vector = ((block * SIDES + side) * HEADS + heads) * BLOCK_SIZE + offset
            store_heads(x, data, scales, vector * SIZE, vector, within, mask, heads_mask, STORED)


@triton.jit
def _rotated(
    x, at, cos, sin, first, second, within, mask, rest_mask, weight, eps,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, NORMED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Norm heads if NORMED, rotate their pairs in place; return pairs and what is behind them as they were rounded."""
    at_first, at_second = x + at[:, None] + first[None, :], x + at[:, None] + second[None, :]
    a = tl.load(at_first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at_second, mask=mask, other=0.0).to(tl.float32)
    rest = 0.0
    if ROTATED < SIZE and (NORMED or KEYS):
        rest = tl.load(x + at[:, None] + within[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(a * a + b * b, axis=1)
        if ROTATED < SIZE:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        pair = tl.arange(0, cos.shape[0])
        a *= factor * tl.load(weight + first, mask=pair < ROTATED // 2, other=0.0)[None, :]
        b *= factor * tl.load(weight + second, mask=pair < ROTATED // 2, other=0.0)[None, :]
        if ROTATED < SIZE:
            rest *= factor * tl.load(weight + within, mask=within < SIZE, other=0.0)[None, :]
            rest = rest.to(x.dtype.element_ty).to(tl.float32)
            tl.store(x + at[:, None] + within[None, :], rest.to(x.dtype.element_ty), mask=rest_mask)
    low = (a * cos[None, :] - b * sin[None, :]).to(x.dtype.element_ty)
    high = (b * cos[None, :] + a * sin[None, :]).to(x.dtype.element_ty)
    tl.store(at_first, low, mask=mask)
    tl.store(at_second, high, mask=mask)
    return low.to(tl.float32), high.to(tl.float32), rest


@triton.jit
def _store_rotated(
    data, scales, vector, heads_mask, low, high, rest, first, second, within, pairs, rest_mask,
    SIZE: tl.constexpr, ROTATED: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """Store keys in three parts: both of each pair, and what is behind the rotated part, under one scale."""
    into = data + vector[:, None] * SIZE
    if STORED != 0:
        low, high = tl.where(pairs, low, 0.0), tl.where(pairs, high, 0.0)
        sound = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
        flaws = tl.max(sound.to(tl.int32) ^ 1, axis=1)
        size = tl.max(tl.where(sound, tl.maximum(tl.abs(low), tl.abs(high)), 0.0), axis=1)
        if ROTATED < SIZE:
            rest = tl.where(rest_mask, rest, 0.0)
            rest_sound = tl.abs(rest) < float("inf")
            flaws = tl.maximum(flaws, tl.max(rest_sound.to(tl.int32) ^ 1, axis=1))
            size = tl.maximum(size, tl.max(tl.where(rest_sound, tl.abs(rest), 0.0), axis=1))
        up, scale = scale_of(size, flaws == 0, STORED)
        whole = (flaws == 0)[:, None]
        low = rounded(tl.where(whole, low, 0.0) * up[:, None], STORED)
        high = rounded(tl.where(whole, high, 0.0) * up[:, None], STORED)
        if ROTATED < SIZE:
            rest = rounded(tl.where(whole, rest, 0.0) * up[:, None], STORED)
        tl.store(scales + vector, scale, mask=heads_mask)
    tl.store(into + first[None, :], low.to(data.dtype.element_ty), mask=pairs)
    tl.store(into + second[None, :], high.to(data.dtype.element_ty), mask=pairs)
    if ROTATED < SIZE:
        tl.store(into + within[None, :], rest.to(data.dtype.element_ty), mask=rest_mask)


@triton.jit
def rotary_write_kernel(
    positions, q, k, v, q_weight, k_weight, cos_sin, data, scales, slots, q_step, k_step, v_step, eps,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    Q_TILES: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, STORED: tl.constexpr, NORMED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rotate TILE heads of one token, with NORMED their RMS norms, and if they are keys, store them and their values.

    Grid: tokens, tiles of query heads and then of key heads.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * ROTATED
    cos = tl.load(table + pair, mask=pair < ROTATED // 2, other=0.0)
    sin = tl.load(table + ROTATED // 2 + pair, mask=pair < ROTATED // 2, other=0.0)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + ROTATED // 2
    behind = ROTATED + tl.arange(0, REST)
    if tile < Q_TILES:
        heads = tile * TILE + tl.arange(0, TILE)
        mask = (heads < Q_HEADS)[:, None] & (pair < ROTATED // 2)[None, :]
        rest_mask = (heads < Q_HEADS)[:, None] & (behind < SIZE)[None, :]
        at = token * q_step + heads * SIZE
        _rotated(
            q, at, cos, sin, first, second, behind, mask, rest_mask, q_weight, eps, SIZE, ROTATED, NORMED, False
        )  # fmt: skip
    else:
        heads = (tile - Q_TILES) * TILE + tl.arange(0, TILE)
        heads_mask = heads < HEADS
        mask = heads_mask[:, None] & (pair < ROTATED // 2)[None, :]
        at = token * k_step + heads * SIZE
        rest_mask = heads_mask[:, None] & (behind < SIZE)[None, :]
        low, high, rest = _rotated(
            k, at, cos, sin, first, second, behind, mask, rest_mask, k_weight, eps, SIZE, ROTATED, NORMED, True
        )  # fmt: skip
        slot = tl.load(slots + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            vector = (block * 2 * HEADS + heads) * BLOCK_SIZE + offset
            _store_rotated(
                data, scales, vector, heads_mask, low, high, rest, first, second, behind, mask, rest_mask,
                SIZE, ROTATED, STORED,
            )  # fmt: skip
            within = tl.arange(0, PADDED)
            whole = heads_mask[:, None] & (within < SIZE)[None, :]
            x = tl.load(v + token * v_step + heads[:, None] * SIZE + within[None, :], mask=whole, other=0.0)
            vector += HEADS * BLOCK_SIZE
            store_heads(x.to(tl.float32), data, scales, vector * SIZE, vector, within, whole, heads_mask, STORED)


STORAGE = {**TORCH_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
STORED = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as the kernels know it; floats are 0
FP8_CAPABILITY = (8, 9)  # Ada: the first whose instructions know float8_e4m3fn
TILE_ELEMENTS = 2048  # of heads that one program writes


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's keys and values, or, with one side and one head, its latent vectors.

    Attributes:
        data: [B, sides, Hkv, bs, D] in a storage type, so that a block is contiguous, and so are the keys, and the
            values, of one of its heads. scales: float32 [B, sides, Hkv, bs] by which vectors of int8 and
            float8_e4m3fn are multiplied, None for others.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks."""
        return self.data.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads, 1 for a latent cache."""
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.data.shape[3]

    @property
    def head_size(self) -> int:
        """Elements of a vector."""
        return self.data.shape[4]

    @property
    def latent(self) -> bool:
        """Whether there is one vector per token."""
        return self.data.shape[1] == 1

    @property
    def stored(self) -> int:
        """How vectors are stored, in the words of the kernels: 0 floats, 1 int8, 2 float8_e4m3fn."""
        return STORED.get(self.data.dtype, 0)

    @property
    def scales_or_data(self) -> torch.Tensor:
        """What a kernel is handed as scales; any tensor where there are none."""
        return self.data if self.scales is None else self.scales

    def sides(self) -> list[torch.Tensor]:
        """Return all that a block consists of, as bytes: uint8 views [B, n]."""
        whole = [self.data] if self.scales is None else [self.data, self.scales]
        return [part.view(torch.uint8).view(part.shape[0], -1) for part in whole]


class CacheOps(ArrayOps):
    """The KV cache."""

    def new_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, latent: bool = False
    ) -> KVCache:
        """See `Backend.new_kv_cache`.

        Raises:
            ConfigError: the device cannot convert what is to be stored.
        """
        if self.kv_dtype == "fp8" and self.capability < FP8_CAPABILITY:
            major, minor = self.capability
            raise ConfigError(
                f"kv_cache_dtype is fp8; that takes a GPU of compute capability 8.9 or newer, this one has "
                f"{major}.{minor}. int8 takes as little memory",
                param="kv_cache_dtype",
            )
        assert not latent or (num_kv_heads == 1 and self.kv_dtype != "int8")
        shape = (num_blocks, 1 if latent else 2, num_kv_heads, block_size)
        dtype = STORAGE[self.kv_dtype]
        data = torch.zeros((*shape, head_size), dtype=dtype, device=self.device)
        return KVCache(data, torch.zeros(shape, device=self.device) if dtype in STORED else None)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        """Rows may be parts of longer ones."""
        self._write(k, v, cache, slot_mapping)

    def write_latent(self, x: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        """Rows may be parts of longer ones."""
        self._write(x, x, cache, slot_mapping)

    def _write(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> None:
        _, sides, heads, block_size, size = cache.data.shape
        if k.shape[0] == 0:
            return
        padded, tile, tiles = tiling(heads, size)
        write_kernel[(k.shape[0], tiles)](
            k, v, cache.data, cache.scales_or_data, slots, row_step(k), row_step(v),
            sides, heads, size, block_size, tile, padded, cache.stored,
            num_warps=4 if tile * padded >= 1024 else 1, enable_fp_fusion=False,
        )  # fmt: skip

    def rotary_write_kv(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        head_size: int,
        interleaved: bool,
        cache: KVCache,
        slot_mapping: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One launch, which reads and writes everything once.

        What is normed is not rounded before it is rotated.
        """
        if q.shape[0] == 0:
            return q, k
        q_weight, k_weight, eps = (cos_sin, cos_sin, 0.0) if norms is None else norms
        heads, q_heads, rotated = cache.num_kv_heads, q.shape[1] // head_size, cos_sin.shape[1]
        padded, tile, tiles = tiling(heads, head_size)
        q_tiles = -(-q_heads // tile)
        rest = power_of_two(head_size - rotated) if rotated < head_size else 1
        rotary_write_kernel[(q.shape[0], q_tiles + tiles)](
            positions, q, k, v, q_weight, k_weight, cos_sin, cache.data, cache.scales_or_data, slot_mapping,
            row_step(q), row_step(k), row_step(v), eps,
            q_heads, heads, head_size, rotated, cache.block_size,
            q_tiles, tile, power_of_two(rotated // 2), rest, padded, interleaved, cache.stored, norms is not None,
            self.pdl, num_warps=4 if tile * padded >= 1024 else 1, enable_fp_fusion=False, launch_pdl=self.pdl,
        )  # fmt: skip
        return q, k

    def copy_blocks(self, cache: KVCache, pairs: np.ndarray) -> None:
        """Sources are gathered before anything is written."""
        source, destination = self.from_numpy(np.ascontiguousarray(pairs.T, np.int64))
        for side in cache.sides():
            side[destination] = side[source]

    def block_nbytes(self, cache: KVCache) -> int:
        return sum(side.shape[1] for side in cache.sides())

    def read_blocks(self, cache: KVCache, block_ids: np.ndarray) -> np.ndarray:
        """Vectors, then their scales."""
        ids = self.from_numpy(block_ids)
        return torch.cat([side[ids] for side in cache.sides()], dim=1).cpu().numpy()

    def write_blocks(self, cache: KVCache, block_ids: np.ndarray, data: np.ndarray) -> None:
        ids, start = self.from_numpy(block_ids), 0
        whole = torch.from_numpy(np.require(data, requirements=["C", "W"])).to(self.device)
        for side in cache.sides():
            side[ids] = whole[:, start : start + side.shape[1]]
            start += side.shape[1]


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def tiling(heads: int, size: int) -> tuple[int, int, int]:
    """Return a vector's padded size, how many heads a program takes, and how many programs that makes of a token."""
    padded = power_of_two(size)
    tile = min(power_of_two(heads), max(1, TILE_ELEMENTS // padded))
    return padded, tile, -(-heads // tile)


def row_step(x: torch.Tensor) -> int:
    """Return how many elements lie between the rows of x [T, N], whose rows are contiguous."""
    assert x.stride(1) == 1 or x.shape[1] == 1, "elements of a row lie side by side"
    return x.stride(0)
