"""Whatever is done to the block manager, in any order: no block is lost, shared wrongly, or misnamed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvcache.machine import Machine

OPERATIONS_PER_SEED = 500
OPERATIONS = {
    "begin",
    "grow",
    "advance",
    "preempt",
    "swap_out",
    "swap_in",
    "load",
    "make_resident",
    "offload",
    "append",
    "end",
    "fork",
    "arrive",
    "reset",
}
OUTCOMES = {"hit", "partial", "restored", "sample", "forget", "loaded", "damaged", "moved", "sent"}


def run(seeds: range) -> None:
    counts: Counter[str] = Counter()
    num_operations = 0
    for seed in seeds:
        machine = Machine(seed)
        try:
            machine.run(OPERATIONS_PER_SEED)
        except Exception as error:
            error.add_note(f"seed {seed}, after {machine.num_operations} operations")
            raise
        counts.update(machine.counts)
        num_operations += machine.num_operations
    assert num_operations >= OPERATIONS_PER_SEED * len(seeds)
    rare = {kind: counts[kind] for kind in OPERATIONS | OUTCOMES if counts[kind] < 5}
    assert not rare, f"too rare to show anything: {rare} of {counts}"


@pytest.mark.parametrize(
    "seeds",
    [range(14), *(pytest.param(range(at, at + 40), marks=pytest.mark.slow) for at in range(0, 200, 40))],
    ids=str,
)
def test_random_operations(seeds: range):
    run(seeds)
