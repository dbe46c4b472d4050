"""On a GPU's kernels planning a step while the one before runs changes nothing that is said; see `test_overlap.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_gpu_engine import OPTIONS, SMALL
from tests.e2e.test_overlap import OVERLAPPING, WORDS, watch
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.slow
def test_options_that_the_device_sees_to_hold_nothing_up(tmp_path: Path) -> None:
    """Side by side, and in chunks. Rows are computed in the same way in every batch, for which steps differ."""
    folder = write_checkpoint(tmp_path / "llama", "llama", **{**SMALL, "vocab_size": 160})
    asks = [
        Request(list(range(5 + number, 9 + 3 * number)), params, 5 + number % 3, (number,), bad_words=WORDS[kind])
        for number, (kind, params) in enumerate(OVERLAPPING.items())
    ]
    told = []
    for overlapped in (False, True):
        driver = EngineDriver(folder, "cuda", batch_invariant=True, async_scheduling=overlapped, **OPTIONS)
        counting = watch(driver.core)
        for number, ask in enumerate(asks):
            driver.add(f"{number}", ask)
        driver.run()
        driver.check_all_free()
        driver.close()
        told.append(driver.results)
    assert told[0] == told[1]
    assert all(item.tokens for item in told[0].values())
    assert counting.num_postponed == 0 and counting.num_ahead > 5
