"""Launches that overlap: where they do, and how much of a weight is fetched ahead."""

from __future__ import annotations

import pytest

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.pdl import AHEAD_BYTES, PIECE_BYTES, PROGRAMS, prefetch_pieces
from quire.kernels.gpu.tuned_configs import TunedConfigs
from tests.kernels.gpu.common import DEVICE


def test_only_chips_that_are_faster_so_overlap_launches() -> None:
    backend = GPUBackend("float16", "float16", DEVICE)
    backend.tuned_configs = TunedConfigs()
    assert not backend.pdl
    backend.tuned_configs = TunedConfigs({"pdl": {"all": {"on": 1}}})
    assert backend.pdl == (DEVICE == "cuda" and backend.capability >= (9, 0)), "the interpreter has no such launches"
    backend.capability = (8, 0)
    backend.tuned_configs = TunedConfigs({"pdl": {"all": {"on": 1}}})
    assert not backend.pdl


@pytest.mark.parametrize(
    ("row_bytes", "rows", "programs", "wanted"),
    [(4096, 1, 1024, 16), (8192, 4, 7168, 4), (28672, 4, 1024, 16), (2056, 1, 8, 0), (240, 1, 8, 0), (272, 1, 8, 1)],
)
def test_what_is_fetched_ahead_fits(row_bytes: int, rows: int, programs: int, wanted: int) -> None:
    pieces = prefetch_pieces(row_bytes, rows, programs, 132)
    assert pieces == wanted
    assert pieces * PIECE_BYTES <= row_bytes
    assert pieces * PIECE_BYTES * rows * min(programs, PROGRAMS * 132) <= AHEAD_BYTES
