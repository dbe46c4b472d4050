"""Sizes of tiles, scratch memory and work items that decide how much memory ops take; without Numba.

Kernels use them, and so does `kernels/meta.py`, which plans memory and must not import kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from quire.checkpoint.tensor import Tensor
from quire.kernels import weight_storage
from quire.kernels.backend import AttentionParams

LANES = 16  # float32 of a vector
COLUMNS = weight_storage.COLUMNS  # of a tile of products; N is padded to a multiple of it
DEPTH_UNIT = weight_storage.CODE_UNIT  # K of weights without groups is padded to a multiple of it
INT4_GROUP = 64  # neighbouring weights of a row that share a scale, where floats are quantized to 4 bits
DOT_ROWS = 8  # rows of the largest tile of pairs
CHUNK = 1024  # logits of sixteen groups, see sampling.py
SCRATCH_BYTES = 1 << 20  # a thread's own memory for one call of an op
ROW = 32  # int64 values of an instruction, see team.py
INSTRUCTION_BYTES = 8 * ROW

# Attention, see attention.py
SEGMENT = 128  # positions whose scores are weighed together
GROUP = 8  # query rows of the largest register tile: 8 x 2 sums and the operands fill AVX-512's 32 registers
UNIT_ROWS = 64  # rows of an item, where there are enough: each reads the keys and values from memory once
SPLIT_ROWS = 16  # units with more rows are not split
ITEMS_PER_THREAD = 4  # items there should be for each thread
PARTIAL_BYTES = 1 << 26  # at most for the partial results of split units
RECORD, WORD_COUNT = 10, 4  # int64 of a record, and words that a plan writes


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not smaller than `size`."""
    return -(-size // unit) * unit


def can_gate(parts: Sequence[Tensor]) -> bool:
    """Whether two matrices can be packed as gate and up."""
    return len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].shape[0] % LANES == 0


def tile_height(rows: int) -> int:
    """Return the rows of the next tile of pairs if `rows` are left; the tile may have more."""
    return 8 if rows > 4 else 4 if rows > 1 else 1


def padded_rows(rows: int) -> int:
    """Return the rows of all tiles that compute `rows` rows."""
    whole = rows // DOT_ROWS * DOT_ROWS
    return whole if whole == rows else whole + tile_height(rows - whole)


def expert_rows(pairs: int, experts: int) -> int:
    """Return the rows needed for `pairs` of a token and an expert, however they are distributed among experts."""
    return pairs + min(pairs, 3 * experts)  # a tile of 2 rows has 2 more, one of 5 has 3


def head_groups(num_heads: int) -> int:
    """Return the number of groups of heads that share a latent cache: the fewest with at most UNIT_ROWS heads each."""
    return next(n for n in range(1, num_heads + 1) if num_heads % n == 0 and num_heads // n <= UNIT_ROWS)


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """Sizes of a plan of attention; they follow from shapes alone.

    Attributes:
        target_items: items there should be; 0 for one thread. max_queries, min_queries: of a unit.
        item_rows, partial_rows: rows that an item, and a partial result, have memory for.
        partial_size: float32 values of a partial result. num_partials: the most there may be.
        items, merges: records there may be.
    """

    target_items: int
    max_queries: int
    min_queries: int
    item_rows: int
    partial_rows: int
    partial_size: int
    num_partials: int
    items: int
    merges: int


def plan_sizes(num_threads: int, tokens: int, positions: int, params: AttentionParams) -> PlanSizes:
    """Return the sizes for a step of `tokens`, with block tables of `positions`, in layers with these heads."""
    group = params.num_heads // params.num_kv_heads
    target = ITEMS_PER_THREAD * num_threads if num_threads > 1 else 0
    least = GROUP // gcd(GROUP, group)
    most = max(1, UNIT_ROWS // group // least * least or UNIT_ROWS // group)
    partial_rows = round_up(max(group, SPLIT_ROWS), LANES)
    partial_size = 2 * (partial_rows + LANES) + partial_rows * round_up(params.out_size, 32)
    num_partials = min(target * -(-positions // SEGMENT), PARTIAL_BYTES // (4 * partial_size))
    limits = tokens + 2 * target + 1, target + 1
    return PlanSizes(target, most, min(least, most), most * group, partial_rows, partial_size, num_partials, *limits)
