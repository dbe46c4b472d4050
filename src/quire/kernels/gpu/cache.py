"""The paged KV cache: its memory, writing to it, copying, reading and writing whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.errors import ConfigError
from quire.kernels.backend import HeadNorms
from quire.kernels.gpu.arrays import TORCH_DTYPES, ArrayOps
from quire.kernels.gpu.cache_kernels import rotary_write_kernel, write_kernel

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
