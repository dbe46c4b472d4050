"""What attention kernels are launched with: tiles, stages, and into how many shares keys are split.

All of it follows from shapes and types, and nothing from what is in a step's arrays, so that it holds for graphs.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.attention_kernels import Tiling
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.kernel_args import power_of_two

CHUNK = 1024  # keys whose softmax is computed by itself where results must not depend on the batch
MAX_SHORT_ROWS = 64  # of a tile of single tokens
MIN_SHARE = 128  # keys: less is not worth a program of its own
MIN_PROMPT_SHARE = 512
Kind = Literal["decode", "prompt"]
WAVES = 4  # splits are for about so many programs a place, so that long sequences do not keep the rest waiting


class Launch(NamedTuple):
    """The parameters of one launch of `attention_kernel`.

    Attributes:
        tiling: what it is compiled for. padded: elements of a head. num_warps, num_stages: as Triton has them.
        places: programs that run at once on the whole chip.
    """

    tiling: Tiling
    padded: int
    num_warps: int
    num_stages: int
    places: int

    def splits(self, programs: int, most_keys: int) -> tuple[int, int]:
        """Return how many programs share the keys of a tile, and how many parts they leave; 1 and 0 for no sharing.

        Args:
            programs: that there are without sharing. most_keys: that block tables have room for.
        """
        if self.tiling.chunk:
            chunks = -(-most_keys // self.tiling.chunk)
            if not self.tiling.one_tile or chunks == 1:
                return 1, 0
            return min(chunks, max(1, WAVES * self.places // programs)), chunks
        most = max(1, most_keys // self.tiling.least)
        if not self.tiling.one_tile:
            splits = min(most, self.places // programs)
            return (splits, splits) if splits > 1 else (1, 0)
        splits = best_splits(programs, self.places, most)
        return splits, splits if splits > 1 else 0


def best_splits(programs: int, places: int, most: int) -> int:
    """Return the fewest splits, at most `most`, that keep a chip of so many places about as busy as any would.

    All programs taken to be as long as each other, the last wave of them decides. Where all would fit at once they
    fill the chip once. Otherwise there are two waves at least, which evens out lengths that are not the same.
    """
    first = 1 if 2 * programs <= places else -(-2 * places // programs)
    last = max(first, (2 if 2 * programs <= places else WAVES) * places // programs)
    candidates = range(min(first, most), min(last, most) + 1)

    def busy(splits: int) -> float:
        waves = programs * splits / places
        return waves / -(-programs * splits // places)

    best = max(busy(splits) for splits in candidates)
    return next(splits for splits in candidates if busy(splits) >= 0.95 * best)


def launches(metadata: AttentionMetadata, short: int, torch_from: int) -> tuple[Kind, ...]:
    """Return which kernels a step needs: for sequences of up to `short` queries, and for those with more.

    Where the host does not know, both; programs find out for themselves that they have nothing to do. Prompts from
    `torch_from` tokens on that begin in this step, if that is not 0, are done already.
    """
    if metadata.single:
        return ("decode",)
    if short == 0:
        return ("prompt",)
    if metadata.lengths is None:
        return "prompt", "decode"
    key = "attention launches", short, torch_from
    found: tuple[Kind, ...] | None = metadata.plans.get(key)
    if found is None:
        queries, lengths = metadata.lengths
        left = queries[(queries < torch_from) | (queries != lengths)] if torch_from else queries
        prompts, others = bool((left > short).any()), bool(((left > 0) & (left <= short)).any())
        needed: list[Kind] = ["prompt"] if prompts else []
        found = metadata.plans[key] = (*needed, "decode") if others else tuple(needed)
    return found


def _memory(backend: ArrayOps) -> int:
    """Return bytes of shared memory that a program may take."""
    return {(8, 0): 160, (8, 7): 160, (8, 6): 96, (8, 9): 96, (12, 0): 96}.get(backend.capability, 220) * 1024


def _key(cache: KVCache, params: AttentionParams) -> str:
    name = str(cache.data.dtype).removeprefix("torch.")
    return f"{params.num_heads // params.num_kv_heads}x{params.head_size} {name} {cache.block_size}"


def decode_launch(backend: ArrayOps, cache: KVCache, params: AttentionParams, single: bool) -> Launch:
    """Return how sequences of few queries are computed: all heads of a KV head in one tile, keys split.

    A tile of keys and one of values are 16 kB each by default, three stages of them: two programs fit a
    multiprocessor, whose loads in flight cover the latency of memory. Of 8 bits, tiles are smaller and programs more.
    """
    if backend.batch_invariant:
        return _invariant_launch(backend, cache, params, single)
    group, padded = params.num_heads // params.num_kv_heads, max(16, power_of_two(params.head_size))
    rows = min(MAX_SHORT_ROWS, max(16, power_of_two(group)))
    vector = padded * cache.data.element_size()
    default = {"keys": min(64, max(16, 16384 // vector)), "num_warps": 4, "num_stages": 3, "places": 2}
    if cache.stored:  # converted in registers, which are what is scarce then
        default = {"keys": min(64, max(16, 4096 // padded)), "num_warps": 4, "num_stages": 4, "places": 3}
    choice = backend.tuned_configs.get("decode_attention", _key(cache, params), default)
    tiling = _tiling(rows, group, choice["keys"], MIN_SHARE, single=single, one_tile=True)
    return Launch(tiling, padded, choice["num_warps"], choice["num_stages"], backend.num_sms * choice["places"])


def prompt_launch(backend: ArrayOps, cache: KVCache, params: AttentionParams, tokens: int) -> Launch:
    """Return how sequences of many queries are computed: tiles of 128 rows if there are enough of them, else of 64.

    Before Hopper, tiles are as large as registers hold them.
    """
    if backend.batch_invariant:
        return _invariant_launch(backend, cache, params, False)
    group, padded = params.num_heads // params.num_kv_heads, max(16, power_of_two(params.head_size))
    if backend.act == torch.float32:
        default = {"rows": 32, "keys": 32, "num_warps": 4, "num_stages": 1}
    else:
        large = padded <= 256 and tokens * params.num_heads >= 128 * backend.num_sms
        rows, keys, warps = 128 if large else 64, 64 if padded <= 128 else 32, 8 if large else 4
        if backend.capability < (9, 0):  # both sides of a product are in registers there
            small = padded > 128 or cache.stored
            rows, keys, warps = 64 if small else rows, 32, 8 if small else warps
        vector = padded * max(2, cache.data.element_size())
        stages = 3
        while stages > 1 and rows * padded * 2 + stages * 2 * keys * vector > _memory(backend):
            stages -= 1
        default = {"rows": rows, "keys": keys, "num_warps": warps, "num_stages": stages}
    size = "many" if tokens * params.num_heads >= 128 * backend.num_sms else "few"
    choice = backend.tuned_configs.get("prompt_attention", f"{_key(cache, params)} {size}", default)
    short = decode_launch(backend, cache, params, False).tiling.queries
    tiling = _tiling(choice["rows"], group, choice["keys"], MIN_PROMPT_SHARE, short=short)
    return Launch(tiling, padded, choice["num_warps"], choice["num_stages"], backend.num_sms)


def _tiling(rows: int, group: int, keys: int, least: int, *, single: bool = False, **others: Any) -> Tiling:
    """Return tiles of so many rows for groups of query heads that share a KV head."""
    queries = 1 if single else max(1, rows // group)
    return Tiling(rows, queries, min(group, rows), -(-group // rows), keys, least, single, **others)


def _invariant_launch(backend: ArrayOps, cache: KVCache, params: AttentionParams, single: bool) -> Launch:
    """Return how all sequences are computed where bits must not depend on the batch, nor on how a prompt was cut.

    Tiles of single tokens are as large as those of prompts, so that the same instructions multiply them, and both join
    chunks of keys in the same order.
    """
    group, padded = params.num_heads // params.num_kv_heads, max(16, power_of_two(params.head_size))
    exact = backend.act == torch.float32
    rows, keys = (16, 16) if exact else (64, 64 if padded * cache.data.element_size() <= 256 else 32)
    warps = 4
    if not exact and backend.capability < (9, 0):
        keys, warps = 32 if padded <= 128 and not cache.stored else 16, 8  # see `prompt_launch`
    assert CHUNK % keys == 0, "no key is in two chunks"
    tiling = _tiling(rows, group, keys, MIN_SHARE, single=single, one_tile=single, chunk=CHUNK)
    return Launch(tiling, padded, warps, 1 if exact else 2, backend.num_sms * 2)
