"""Paged attention as the backend calls it: checks, sizes, and the instructions of one layer.

The arithmetic is in paged_pairs.py, paged_floats.py and paged_softmax.py, the cutting into items in paged_plan.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.cache import CPUKVCache, CPULatentCache
from quire.kernels.cpu.jit import Op
from quire.kernels.cpu.paged_floats import ATTEND, ATTEND_LATENT
from quire.kernels.cpu.paged_latent import attend_latent_pairs
from quire.kernels.cpu.paged_pairs import attend_pairs
from quire.kernels.cpu.paged_plan import (
    ATTEND_ALONE,
    ATTEND_SHARED,
    MERGE_ALONE,
    MERGE_SHARED,
    UNIT_ROWS,
    Plan,
    make_plan,
)
from quire.kernels.cpu.paged_softmax import TILE, merge
from quire.kernels.cpu.paged_tiles import GROUP, SEGMENT
from quire.kernels.cpu.threads import SCRATCH_BYTES, Launcher

NEVER = 1 << 60  # items that one thread does alone where the plan says so


def attend_op(dtype: np.dtype, paired: bool, latent: bool = False) -> Op:
    """Return the op for caches of this storage dtype."""
    if latent:
        return attend_latent_pairs if paired else ATTEND_LATENT[dtype]
    return attend_pairs if paired else ATTEND[dtype]


def head_groups(num_heads: int) -> int:
    """Return into how many groups heads are cut that share a latent cache: none has more rows than an item."""
    return next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= UNIT_ROWS)


def paged_attention(
    launcher: Launcher,
    q: np.ndarray,
    cache: CPUKVCache | CPULatentCache,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> np.ndarray:
    """Emit attention of q [T, Hq*D], see `Backend.paged_attention` -> [T, Hq * size of a value].

    cu_query_lens, seq_lens and block_tables are int32 and read when the program runs; rows of block_tables may lie
    apart. The first call for a metadata object, and for each window and shape of heads, also emits the plan, which
    later layers use: a metadata object is for one step, or for one recording.
    """
    assert metadata.cu_query_lens.dtype == metadata.seq_lens.dtype == metadata.block_tables.dtype == np.int32
    assert metadata.cu_query_lens.flags.c_contiguous and metadata.seq_lens.flags.c_contiguous
    assert metadata.block_tables.shape[1] <= 1 or metadata.block_tables.strides[1] == 4
    q, stride = as_rows(q)
    tokens = q.shape[0]
    out = launcher.empty((tokens, params.num_heads * params.out_size))
    if params.value_size is not None:
        params = replace(params, num_kv_heads=head_groups(params.num_heads))
    if tokens == 0:
        return out
    key = (*params.reach, params.num_heads, params.num_kv_heads, params.out_size, cache.block_size)
    if key not in metadata.plans:
        metadata.plans[key] = make_plan(launcher, tokens, metadata, params, cache.block_size)
    _emit(launcher, q, stride, out, cache, metadata, params, metadata.plans[key])
    return out


def _emit(
    launcher: Launcher,
    q: np.ndarray,
    stride: int,
    out: np.ndarray,
    cache: CPUKVCache | CPULatentCache,
    metadata: AttentionMetadata,
    params: AttentionParams,
    plan: Plan,
) -> None:
    """Emit the items and, after them, what folds the parts of split ones."""
    heads, size = params.num_kv_heads, params.head_size
    tables = metadata.block_tables
    before = (
        q, stride, out, cache.flat_keys, cache.flat_values, cache.key_scales, cache.value_scales,
        tables, tables.strides[0] // 4,
    )  # fmt: skip
    after = (
        plan.partials, params.num_heads, heads, size, params.out_size, cache.block_size, *params.reach,
        float(params.scale), float(params.softcap or 0.0), _floats(params.sinks), _floats(params.alibi_slopes),
        plan.slot_rows, plan.room_rows,
    )  # fmt: skip
    assert _room_needed(plan, size, cache.paired) <= SCRATCH_BYTES, f"{plan.room_rows} rows of {size} elements"
    dtype, latent = cache.flat_keys.dtype, isinstance(cache, CPULatentCache)
    attend = attend_op(dtype, cache.paired, latent)
    shared = launcher.num_threads > 1
    for op, records, limit, alone, together in (
        (attend, plan.items, plan.item_limit, ATTEND_ALONE, ATTEND_SHARED),
        (merge, plan.merges, plan.merge_limit, MERGE_ALONE, MERGE_SHARED),
    ):
        if op is merge and not shared:
            continue
        for word, alone_below in ((alone, NEVER), (together, 0))[: 1 + shared]:
            at = plan.words[word : word + 1]
            args = (*before, records, *after)
            launcher.emit(op, *args, items=limit * heads, work=0, items_at=at, alone_below=alone_below, grain=1)


def _floats(values: np.ndarray | None) -> np.ndarray | None:
    """Return sinks or slopes as kernels want them."""
    return None if values is None else np.require(values, np.float32, ["C", "A"])


def _room_needed(plan: Plan, size: int, paired: bool) -> int:
    """Return an upper bound of the scratch an item takes, see `make_room` and every `plan_room`."""
    rows, padded = max(plan.room_rows, plan.slot_rows), -(-size // 32) * 32
    state = rows * (4 * padded + 36) + 16384
    if paired:
        pairs = 2 * (-(-size // 32) * 32)  # bytes of a row
        return state + 4 * GROUP * (padded + SEGMENT) + (rows + 2 * SEGMENT) * pairs + 64 * padded
    return state + 4 * rows * (padded + SEGMENT + size) + 8 * TILE * padded
