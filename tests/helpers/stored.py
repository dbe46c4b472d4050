"""Quantized tensors made of what they hold, without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.checkpoint.quantization.tensors import CodeTensor, IntegerTensor, code_layout, integer_layout
from quire.checkpoint.tensor import Tensor
from quire.kernels.cpu.linear_int import IntLinear, pack_integers
from quire.kernels.cpu.threads import Launcher


def integers(q: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, group: int) -> IntegerTensor:
    """Return a weight of q, uint8 below 16 or int8 [N, K], and scales and zeros [N, ceil(K / group)]."""
    bits = 4 if q.dtype == np.uint8 else 8
    by_row = scales.astype(np.float32).reshape(len(q), -1)
    points = None if zeros is None else zeros.astype(np.float32)
    return IntegerTensor.whole(
        (len(q), q.shape[1]),
        group,
        integer_layout(bits, group, q.shape[1], zeros=zeros is not None),
        lambda rows, across: q[rows, across],
        lambda rows: by_row[rows],
        zeros=None if points is None else lambda rows: points[rows],
        middle=8 if bits == 4 else 0,
    )


def codes(q: np.ndarray, scales: np.ndarray, group: int, kind: str, table: np.ndarray | None = None) -> CodeTensor:
    """Return a weight of codes uint8 [N, K] with scales [N, ceil(K / group)]."""
    return CodeTensor.whole(
        (len(q), q.shape[1]),
        group,
        code_layout(kind, group, q.shape[1]),
        lambda rows, across: q[rows, across],
        lambda rows: scales[rows],
        kind=kind,
        table=table,
    )


def pack_from(
    q: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    group: int | None = None,
    biases: Sequence[Tensor] | None = None,
    gated: bool = False,
) -> IntLinear:
    """Pack `integers`; `gated`: the first half of the rows are the gate."""
    whole = integers(q, scales, zeros, group or q.shape[1])
    half = len(q) // 2
    parts = [whole.rows(0, half), whole.rows(half, len(q))] if gated else [whole]
    made = pack_integers(parts, biases, Launcher(1), gated)
    assert made is not None
    return made
