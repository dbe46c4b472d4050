"""`draw`: top-k, min-p, top-p and the choice of a token, as Triton kernels; their state is in `sampling_state.py`.

A row is searched, in falling order, for the k-th token (by counts), for the last token that top-p keeps (by weights),
and for the token that is drawn (by weights), one after the other. A pass over the logits leaves one of five intervals.
Once an interval holds few tokens they are copied to a list, and the passes after are over that; with a small top-k that
is everything after three or four passes. Weights are integers, so that results depend neither on the batch, nor on the
order of additions, nor on how a row is cut.

Where there are more multiprocessors than rows, rows are cut into pieces, and the first passes are a launch each: each
program works out the state from what all pieces of its row found in the pass before, and makes the next pass over its
own. A last program for each row goes on from there, mostly in the list. A piece is a few thousand logits, so that such
a launch takes some 3 us, where a pass over a row of 128k by one program would take 50. With more rows that is done for
the first pass only, which every row needs.

A pass over the vocabulary computes e^x in float64 for each token, some 80 instructions, which bounds it: about 90 us on
an H200 for 256 rows of 128k. Looking for the maximum, for the k-th token, and making lists is bound by reading
(134 MB, 28 us). Most rows take one or two passes with weights and three without. These times are calculated.

Gumbel-max would need one pass where nothing is truncated, but other tokens for the same uniforms than other backends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.logits_kernels import largest_of_parts, largest_parts
from quire.kernels.gpu.sampling_search import add_above, gather, nth_equal
from quire.kernels.gpu.sampling_state import (
    FIND,
    FOUND,
    STATE,
    TOP_K,
    ask,
    begin,
    join_found,
    learn,
    list_ends,
    load_options,
    load_state,
    save_state,
)

LIST = 4096  # tokens of a list
OPTIONS = 5  # temperature, top_k, top_p, log of min_p, uniform: float64 [5, R]


@triton.jit(do_not_specialize=["rows"])
def survey_pieces(
    logits, stride, choices, rows, size, part, tops, tokens, last_states, last_parts, states, parts, share_values,
    share_ids, lengths,
    FIRST: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Make one pass over a piece of a row, of `part` logits, or copy its share of the list.

    states int64 [STATE + 3, rows] (a state, whether there is a list, and the interval that it holds) and parts int64
    [rows, FOUND, pieces] are written; `last_states` and `last_parts` are those of the launch before. Shares of a list
    are [rows, pieces, LIST], and lengths int32 [rows, pieces] theirs.
    """
    row, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    options = load_options(choices, rows, row)
    largest, _ = largest_of_parts(tops, tokens, row, pieces, PIECES)
    parts, last_parts = parts + row * FOUND * pieces, last_parts + row * FOUND * pieces
    if (options[0] > 0) & (tl.abs(largest) < float("inf")):
        if FIRST:
            state = begin(size, largest, options)
            listed = state[2] * 0
            list_low, list_high = state[4], state[4]
        else:
            state, listed, list_low, list_high = resume(
                last_states + row, rows, last_parts, pieces, largest, options, PIECES
            )
        values = logits + row.to(tl.int64) * stride + piece * part
        items = tl.minimum(part, size - piece * part)
        if (listed == 0) & (state[0] != FIND):
            if state[2] <= LIST:
                list_low, list_high = list_ends(state, largest, options, LIST)
                share = row * pieces + piece
                at = share.to(tl.int64) * LIST
                length = gather(values, items, list_low, list_high, share_values + at, share_ids + at, READ)
                tl.store(lengths + share, length)
                listed += 1
            else:
                p0, p1, p2, p3 = ask(state, options)
                found = add_above(values, items, state[3], state[4], p0, p1, p2, p3, largest.to(tl.float64),
                                  1.0 / options[0], state[0] == TOP_K, BLOCK)  # fmt: skip
                for i in tl.static_range(8):
                    tl.store(parts + i * pieces + piece, found[i].to(tl.int64))
        if piece == 0:
            save_state(states + row, rows, state, listed, list_low, list_high)


@triton.jit
def resume(states, rows, parts, pieces, largest, options, PIECES: tl.constexpr):
    """Return the state after the launch before, whether there is a list, and its interval."""
    state, listed, list_low, list_high = load_state(states, rows)
    if (listed == 0) & (state[0] != FIND):
        state = learn(state, join_found(parts, pieces, PIECES), largest, options)
    return state, listed, list_low, list_high


@triton.jit
def join_shares(
    share_values, share_ids, lengths, part, pieces, list_values, list_ids,
    PIECES: tl.constexpr, LIST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the shares of a list, one after the other, and return its length; ids are the row's from here on."""
    which, lanes = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    length = tl.load(lengths + which, mask=which < pieces, other=0)
    first = tl.cumsum(length, axis=0) - length
    for start in range(0, tl.max(length, axis=0), WIDTH):
        column = start + lanes
        here = column[None, :] < length[:, None]
        source, target = which[:, None] * LIST + column[None, :], first[:, None] + column[None, :]
        tl.store(list_values + target, tl.load(share_values + source, mask=here, other=0.0), mask=here)
        ids = tl.load(share_ids + source, mask=here, other=0) + which[:, None] * part
        tl.store(list_ids + target, ids, mask=here)
    tl.debug_barrier()  # threads read what others have written
    return tl.sum(length, axis=0)


@triton.jit(do_not_specialize=["rows", "pieces"])
def finish_rows(
    logits, stride, choices, rows, size, part, pieces, tops, tokens, states, parts, share_values, share_ids, lengths,
    list_values, list_ids, out,
    FIRST: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row, after some launches of `survey_pieces` unless this is the first of the search.

    Lists are [rows, LIST], out int64 [rows].
    """
    row = tl.program_id(0)
    own, shares = row.to(tl.int64) * LIST, row.to(tl.int64) * pieces * LIST
    list_values, list_ids = list_values + own, list_ids + own
    options = load_options(choices, rows, row)
    largest, token = largest_of_parts(tops, tokens, row, pieces, PIECES)
    if (options[0] > 0) & (tl.abs(largest) < float("inf")):
        if FIRST:
            state = begin(size, largest, options)
            length, list_low, list_high = state[1], state[4], state[4]
        else:
            state, listed, list_low, list_high = resume(
                states + row, rows, parts + row * FOUND * pieces, pieces, largest, options, PIECES
            )
            length = listed * 0
            if listed > 0:
                length = join_shares(share_values + shares, share_ids + shares, lengths + row * pieces, part, pieces,
                                     list_values, list_ids, PIECES, LIST, 16)  # fmt: skip
        token = _search(logits + row.to(tl.int64) * stride, list_values, list_ids, size, state, length, list_low,
                        list_high, largest, options, BLOCK, READ, LIST)  # fmt: skip
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _search(
    values, list_values, list_ids, size, state, length, list_low, list_high, largest, options,
    BLOCK: tl.constexpr, READ: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Go on from a state to the token of one row, int32; the list, if its length is not 0, holds (low, high]."""
    top, inverse, whole = largest.to(tl.float64), 1.0 / options[0], tl.full((), 0, tl.int32) + size
    while state[0] != FIND:
        use_list = (length > 0) & (state[3] >= list_low) & (state[4] <= list_high)
        if (state[2] <= LIST) & (use_list == 0):
            list_low, list_high = list_ends(state, largest, options, LIST)
            length = gather(values, size, list_low, list_high, list_values, list_ids, READ)
            use_list = length > 0
        if use_list:
            source, items = list_values, length
        else:
            source, items = values, whole
        p0, p1, p2, p3 = ask(state, options)
        found = add_above(source, items, state[3], state[4], p0, p1, p2, p3, top, inverse, state[0] == TOP_K, BLOCK)
        state = learn(state, found, largest, options)
    if (length > 0) & (state[3] >= list_low) & (state[4] <= list_high):
        place = tl.load(list_ids + nth_equal(list_values, length, state[4], state[6], READ))
    else:
        place = nth_equal(values, size, state[4], state[6], READ)
    return place


def draw(
    logits: torch.Tensor, options: torch.Tensor, part: int, rounds: int, num_warps: int, weigh: int, read: int
) -> torch.Tensor:
    """Choose a token of each row, see `Backend.sample`: logits float32 [R, V], options float64 [5, R] -> int64 [R].

    Options are temperature, top_k, top_p, the logarithm of min_p, and the uniform number. There are `rounds` + 2
    launches: one that finds the largest of each `part` logits of a row, as many passes over these parts as there are
    rounds (0 or more; the tokens are the same), and the rest. `weigh` logits are weighted at a time, which registers
    bound, and `read` are looked at where they are not weighted. A thread should have four of each, or more, so that it
    reads 16 bytes at a time.
    """
    (rows, size), device = logits.shape, logits.device
    pieces = -(-size // part)
    width = 1 << (-(-size // min(part, weigh)) - 1).bit_length()  # of few rows and fewer: no kernel for each number
    tops = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    # Each by itself, for Triton has other kernels where memory does not begin at a multiple of 16.
    tokens, lengths = (torch.empty((rows, pieces), dtype=torch.int32, device=device) for _ in range(2))
    states = torch.empty((rounds, STATE + 3, rows), dtype=torch.int64, device=device)
    parts = torch.empty((rounds, rows, FOUND, pieces), dtype=torch.int64, device=device)
    values, ids = _lists(logits, rows)
    listing = rounds > 1 or (rounds == 1 and size <= LIST)  # whether lists can be made in pieces
    shares = _lists(logits, rows * pieces) if listing else (values, ids)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    stride = logits.stride(0)
    largest_parts[(rows, pieces)](logits, stride, size, part, tops, tokens, read)
    for turn in range(rounds):
        last = max(0, turn - 1)
        survey_pieces[(rows, pieces)](
            logits, stride, options, rows, size, part, tops, tokens, states[last], parts[last], states[turn],
            parts[turn], *shares, lengths,
            FIRST=turn == 0, PIECES=width, BLOCK=weigh, READ=read, LIST=LIST, num_warps=num_warps,
        )  # fmt: skip
    finish_rows[(rows,)](
        logits, stride, options, rows, size, part, pieces, tops, tokens, states[-1:], parts[-1:], *shares,
        lengths, values, ids, out,
        FIRST=rounds == 0, PIECES=width, BLOCK=weigh, READ=read, LIST=LIST, num_warps=num_warps,
    )  # fmt: skip
    return out


def _lists(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for `count` lists: their values, and the tokens that have them."""
    return (
        torch.empty((count, LIST), dtype=torch.float32, device=logits.device),
        torch.empty((count, LIST), dtype=torch.int32, device=logits.device),
    )
