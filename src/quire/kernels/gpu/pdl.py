"""Launches that overlap: a kernel begins while the one before it drains, and waits before it touches what that leaves.

Hopper's programmatic dependent launch (PDL). A kernel launched so may start once every program of the kernel before has
called `launch_dependents`, or ended. Nothing of that kernel can be relied on, and nothing that it or an earlier one
reads may be written, before `wait_for_dependencies` returns: then all of it is done, and so is what came before it,
since its programs have waited as well. Hence the rule that every program of such a kernel waits, those too that find
nothing to do, and that only weights are read before, which no kernel of a step writes. A kernel launched in the
ordinary way after such a one waits for all of it, as ever.

In a CUDA graph the two are joined by an edge of that kind. It is off unless the stored choices of the chip say {"pdl":
{"all": {"on": 1}}}, see `tuned_configs.py`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PIECE_BYTES = 256  # that are fetched at a time
AHEAD_BYTES = 16 << 20  # of weights that all programs of a launch fetch together: L2 has room for them and for the rest
PROGRAMS = 16  # of four warps that a multiprocessor has room for


@triton.jit
def wait_for_dependencies(PDL: tl.constexpr):
    """Return when all earlier kernels are done and what they wrote can be read."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel begin as soon as every program has come to this."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(rows, PIECES: tl.constexpr):
    """Have the first PIECES * 256 bytes behind each of these addresses, a multiple of 16, brought to L2."""
    if PIECES > 0:
        places = rows.to(tl.int64)[:, None] + (tl.arange(0, PIECES) * 256)[None, :]
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;",
            "=r,l",
            [places],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def prefetch_pieces(row_bytes: int, rows: int, programs: int, num_sms: int) -> int:
    """Return how many pieces of each of its `rows` a program fetches ahead: a power of two, or 0 for none."""
    if row_bytes % 16:
        return 0
    each = AHEAD_BYTES // (min(programs, PROGRAMS * num_sms) * rows)
    pieces = min(row_bytes, each) // PIECE_BYTES
    return 1 << pieces.bit_length() - 1 if pieces else 0
