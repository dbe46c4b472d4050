"""The paged KV cache: its memory, the kernels that write to it, copying, reading and writing whole blocks.

The kernels are bound by memory: a token's keys and values are read once and written once, by one program with loads of
16 bytes a thread. They are compiled without fused operations (`enable_fp_fusion`), which would leave out a rounding, so
that what is stored is what the reference stores.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from quire.errors import ConfigError
from quire.kernels.backend import HeadNorms
from quire.kernels.gpu.arrays import TORCH_DTYPES, ArrayOps
from quire.kernels.gpu.kernel_args import power_of_two, whole_rows
from quire.kernels.gpu.pdl import launch_dependents, wait_for_dependencies
from quire.kernels.gpu.quantize import round_block, scale_of


class Vectors(NamedTuple):
    """The shape of a layer's cache, and the heads that a program writes: `tile` of them, of `padded` elements."""

    sides: int
    heads: int
    size: int
    block_size: int
    tile: int
    padded: int
    e4m3: bool


class Rotation(NamedTuple):
    """Query heads and tiles of them, the elements of a head that are rotated, half of them and the rest padded."""

    q_heads: int
    q_tiles: int
    rotated: int
    half: int
    rest: int
    interleaved: bool


@triton.jit
def round_e4m3(x, factor):
    """Return x * factor, float32, rounded to what float8_e4m3fn can hold, ties to even; 0 for what is not finite.

    The three bits after the first are rounded in the bits of the float32, so that the conversion that follows has
    nothing left to round; adding and subtracting a large number rounds subnormals to multiples of 2^-9.
    """
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0) * factor
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = x + 24576.0 - 24576.0
    x = tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))
    return tl.minimum(tl.maximum(x, -448.0), 448.0)


@triton.jit
def store_vectors(parts, cache, vector, heads_mask, FORM: tl.constexpr):
    """Store float32 vectors [heads, D] as number `vector` int64 [heads] of a cache, each with one scale if it has any.

    cache: data, and scales or None. parts: tuples of some columns of the vectors, which these are, and a mask.
    """
    data, scales = cache
    PARTS: tl.constexpr = len(parts)
    if scales is not None:
        size, faults = tl.zeros_like(vector).to(tl.float32), tl.zeros_like(vector).to(tl.int32)
        for part in tl.static_range(PARTS):
            values, _, mask = parts[part]
            values = tl.abs(tl.where(mask, values, 0.0))
            sound = values < float("inf")
            size = tl.maximum(size, tl.max(tl.where(sound, values, 0.0), axis=1))
            faults = tl.maximum(faults, tl.max(sound.to(tl.int32) ^ 1, axis=1))
        up, scale = scale_of(size, faults == 0, FORM.e4m3)
        tl.store(scales + vector, scale, mask=heads_mask)
    for part in tl.static_range(PARTS):
        values, columns, mask = parts[part]
        if scales is not None:
            values = round_e4m3(values, up[:, None]) if FORM.e4m3 else round_block(values, up[:, None], False)
        tl.store(data + vector[:, None] * FORM.size + columns[None, :], values.to(data.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(k, v, cache, slots, FORM: tl.constexpr):
    """Store `tile` heads of one token, keys and, unless the cache is latent, values. Grid: tokens, tiles of heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block, offset = slot // FORM.block_size, slot % FORM.block_size
        heads = tl.program_id(1) * FORM.tile + tl.arange(0, FORM.tile)
        within = tl.arange(0, FORM.padded)
        heads_mask = heads < FORM.heads
        mask = heads_mask[:, None] & (within < FORM.size)[None, :]
        SIDES: tl.constexpr = FORM.sides
        for side in tl.static_range(SIDES):
            source = k.data + token * k.stride if side == 0 else v.data + token * v.stride
            x = tl.load(source + heads[:, None] * FORM.size + within[None, :], mask=mask, other=0.0).to(tl.float32)
            vector = ((block * SIDES + side) * FORM.heads + heads) * FORM.block_size + offset
            store_vectors(((x, within, mask),), cache, vector, heads_mask, FORM)


@triton.jit
def _rotate_heads(x, at, angles, columns, masks, weight, eps, KEYS: tl.constexpr, FORM: tl.constexpr, R: tl.constexpr):
    """Norm heads if there is a weight, and rotate their pairs in place.

    Return both of each pair, and with KEYS what is behind the rotated part, as they were rounded. columns, masks: of
    both of each pair, and of what is behind.
    """
    cos, sin = angles
    first, second, behind = columns
    mask, rest_mask = masks
    PARTIAL: tl.constexpr = R.rotated < FORM.size
    at_first, at_second = x + at[:, None] + first[None, :], x + at[:, None] + second[None, :]
    a = tl.load(at_first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at_second, mask=mask, other=0.0).to(tl.float32)
    rest = 0.0
    if PARTIAL and (weight is not None or KEYS):
        rest = tl.load(x + at[:, None] + behind[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a + b * b, axis=1)
        if PARTIAL:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / FORM.size + eps)[:, None]
        pairs = tl.arange(0, R.half) < R.rotated // 2
        a *= factor * tl.load(weight + first, mask=pairs, other=0.0)[None, :]
        b *= factor * tl.load(weight + second, mask=pairs, other=0.0)[None, :]
        if PARTIAL:
            rest *= factor * tl.load(weight + behind, mask=behind < FORM.size, other=0.0)[None, :]
            rest = rest.to(x.dtype.element_ty).to(tl.float32)
            tl.store(x + at[:, None] + behind[None, :], rest.to(x.dtype.element_ty), mask=rest_mask)
    low = (a * cos[None, :] - b * sin[None, :]).to(x.dtype.element_ty)
    high = (b * cos[None, :] + a * sin[None, :]).to(x.dtype.element_ty)
    tl.store(at_first, low, mask=mask)
    tl.store(at_second, high, mask=mask)
    return low.to(tl.float32), high.to(tl.float32), rest


@triton.jit
def rotary_write_kernel(
    positions, q, k, v, norms, cos_sin, cache, slots, FORM: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr
):
    """Rotate `tile` heads of one token, after their RMS norms if any, and store keys with their values.

    norms: weights of queries and of keys, and epsilon; or None. Grid: tokens, tiles of query heads and then of keys'.
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, R.half)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * R.rotated
    cos = tl.load(table + pair, mask=pair < R.rotated // 2, other=0.0)
    sin = tl.load(table + R.rotated // 2 + pair, mask=pair < R.rotated // 2, other=0.0)
    behind = R.rotated + tl.arange(0, R.rest)
    if R.interleaved:
        columns = (2 * pair, 2 * pair + 1, behind)
    else:
        columns = (pair, pair + R.rotated // 2, behind)
    q_weight, k_weight, eps = norms, norms, 0.0
    if norms is not None:
        q_weight, k_weight, eps = norms
    within = tl.arange(0, FORM.tile)
    if tile < R.q_tiles:
        heads = tile * FORM.tile + within
        mask = (heads < R.q_heads)[:, None] & (pair < R.rotated // 2)[None, :]
        rest_mask = (heads < R.q_heads)[:, None] & (behind < FORM.size)[None, :]
        at = token * q.stride + heads * FORM.size
        _rotate_heads(q.data, at, (cos, sin), columns, (mask, rest_mask), q_weight, eps, False, FORM, R)
    else:
        heads = (tile - R.q_tiles) * FORM.tile + within
        heads_mask = heads < FORM.heads
        mask = heads_mask[:, None] & (pair < R.rotated // 2)[None, :]
        rest_mask = heads_mask[:, None] & (behind < FORM.size)[None, :]
        at = token * k.stride + heads * FORM.size
        low, high, rest = _rotate_heads(
            k.data, at, (cos, sin), columns, (mask, rest_mask), k_weight, eps, True, FORM, R
        )
        slot = tl.load(slots + token)
        if slot >= 0:
            block, offset = slot // FORM.block_size, slot % FORM.block_size
            vector = (block * 2 * FORM.heads + heads) * FORM.block_size + offset
            parts = ((low, columns[0], mask), (high, columns[1], mask))
            if R.rotated < FORM.size:
                parts += ((rest, behind, rest_mask),)  # type: ignore[assignment]
            store_vectors(parts, cache, vector, heads_mask, FORM)
            element = tl.arange(0, FORM.padded)
            whole = heads_mask[:, None] & (element < FORM.size)[None, :]
            source = v.data + token * v.stride + heads[:, None] * FORM.size + element[None, :]
            x = tl.load(source, mask=whole, other=0.0).to(tl.float32)
            store_vectors(((x, element, whole),), cache, vector + FORM.heads * FORM.block_size, heads_mask, FORM)


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
        """The storage format as kernels number it: 0 floats, 1 int8, 2 float8_e4m3fn."""
        return STORED.get(self.data.dtype, 0)

    def sides(self) -> list[torch.Tensor]:
        """Return the tensors that blocks consist of, as bytes: uint8 views [B, n]."""
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
        if k.shape[0] == 0:
            return
        form, tiles, options = vectors(cache.data.shape, cache.stored)
        storage = cache.data, cache.scales
        write_kernel[(k.shape[0], tiles)](whole_rows(k), whole_rows(v), storage, slot_mapping, FORM=form, **options)

    def write_latent(self, x: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
        """Rows may be parts of longer ones."""
        self.write_kv(x, x, cache, slot_mapping)

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
        form, tiles, options = vectors(cache.data.shape, cache.stored)
        rotation = rotation_of(form, q.shape[1] // head_size, cos_sin.shape[1], interleaved)
        queries, keys, storage = whole_rows(q), whole_rows(k), (cache.data, cache.scales)
        rotary_write_kernel[(q.shape[0], rotation.q_tiles + tiles)](
            positions,
            queries,
            keys,
            whole_rows(v),
            norms,
            cos_sin,
            storage,
            slot_mapping,
            form,
            rotation,
            self.pdl,
            launch_pdl=self.pdl,
            **options,
        )
        return q, k

    def copy_blocks(self, cache: KVCache, pairs: np.ndarray) -> None:
        """All sources are read before any target is written."""
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


@cache
def vectors(shape: tuple[int, ...], stored: int) -> tuple[Vectors, int, dict[str, Any]]:
    """Return what kernels that write to a cache are compiled for, the programs of a token, and options for Triton."""
    _, sides, heads, block_size, size = shape
    padded = power_of_two(size)
    tile = min(power_of_two(heads), max(1, TILE_ELEMENTS // padded))
    options = {"num_warps": 4 if tile * padded >= 1024 else 1, "enable_fp_fusion": False}
    return Vectors(sides, heads, size, block_size, tile, padded, stored == 2), -(-heads // tile), options


@cache
def rotation_of(form: Vectors, q_heads: int, rotated: int, interleaved: bool) -> Rotation:
    """Return what rotating the first `rotated` elements of heads is compiled for."""
    rest = power_of_two(form.size - rotated) if rotated < form.size else 1
    return Rotation(q_heads, -(-q_heads // form.tile), rotated, power_of_two(rotated // 2), rest, interleaved)
