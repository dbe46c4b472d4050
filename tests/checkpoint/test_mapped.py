"""Which parts of mapped weight files stay in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from quire.checkpoint import mapped
from quire.checkpoint.mapped import MappedFile, read_ahead, release
from tests.helpers.mapped import resident


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_large_tensors_leave_memory_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = tmp_path / "x.bin", 1 << 24
    values = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    path.write_bytes(values.tobytes())
    monkeypatch.setattr(mapped, "RESIDENT_BYTES", size // 8)
    file = MappedFile(path, 1)
    view = file.view(0, size)
    for start in range(0, size, size // 16):
        piece = view[start : start + size // 16]
        np.testing.assert_array_equal(piece, values[start : start + size // 16])
        assert resident(path) < size // 2
        release(piece.view(np.uint32))
    np.testing.assert_array_equal(view, values)
    assert resident(path) == size
    release(view)
    assert resident(path) == 0
    release(values)  # no file's


def test_eager_and_prefetched_files_hold_the_same(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)) * 100)
    eager = MappedFile(path, 1, eager=True)
    read_ahead([path, tmp_path / "missing"]).join()
    np.testing.assert_array_equal(eager.view(3, 900), MappedFile(path, 1).view(3, 900))
    writable = MappedFile(path, 1, writable=True).view(0, 10)
    writable[0] = 77
    assert path.read_bytes()[0] == 0 and writable[0] == 77
