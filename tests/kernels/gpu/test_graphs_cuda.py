"""What is asked of torch for CUDA graphs, on a torch.cuda that only keeps its rules: see the graphs' own tests."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from quire.kernels.gpu.graphs import CUDAGraphCapture


class FakeCuda:
    """Pools that live as long as their graphs, and an allocator that captures fill until it is told that they end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users: dict[int, int] = {}  # by pool, graphs; 0: there were some
        self.underway: set[int] = set()
        self.breaks = False
        self.capturing = False  # as the generator of random numbers has it
        numbers = itertools.count(1)
        fake = self

        class Graph:
            pool: int | None = None

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert pool not in fake.underway and fake.users.get(pool) != 0, "a pool that has ended"
                fake.users[pool] = fake.users.get(pool, 0) + 1
                fake.underway.add(pool)
                fake.capturing = True
                self.pool = pool

            def capture_end(self) -> None:
                if fake.breaks:
                    raise RuntimeError("the capture was broken off")
                fake.underway.remove(self.pool)
                fake.capturing = False

            def __del__(self) -> None:
                if self.pool is not None:
                    fake.users[self.pool] -= 1
                    assert self.pool not in fake.underway, "the allocator asks a graph that is gone"

        class Generator:
            def clone_state(self) -> Generator:
                return Generator()

            def graphsafe_set_state(self, state: Generator) -> None:
                assert state is not self
                fake.capturing = False

        class Stream:
            def __init__(self, *args: Any) -> None: ...

            def wait_stream(self, other: Any) -> None: ...

        def end_allocate(device: int, pool: int) -> None:
            if pool not in self.underway:
                raise RuntimeError("not capturing")
            self.underway.remove(pool)

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "current_stream": lambda device: Stream(),
            "current_device": lambda: 0,
            "default_generators": [Generator()],
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": lambda: next(numbers),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocate, raising=False)


def capture(owner: CUDAGraphCapture) -> Any:
    with owner.capturing():
        graph = owner.begin()
        owner.end(graph)
    return graph


def test_graphs_share_a_pool_as_long_as_one_of_them_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    owner = CUDAGraphCapture(torch.device("cuda"))
    graphs = [capture(owner) for _ in range(3)]
    assert len({graph.pool for graph in graphs}) == 1
    first = graphs[0].pool
    del graphs[:2]
    gc.collect()
    graphs.append(capture(owner))
    assert graphs[-1].pool == first
    graphs.clear()  # as when an engine sleeps
    gc.collect()
    assert cuda.users[first] == 0
    assert capture(owner).pool != first


def test_a_capture_that_broke_off_is_over_for_the_allocator_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    owner = CUDAGraphCapture(torch.device("cuda"))
    kept = capture(owner)
    cuda.breaks = True
    with pytest.raises(RuntimeError, match="broken off"):
        capture(owner)
    gc.collect()
    assert not cuda.underway and not cuda.capturing and gc.isenabled()
    cuda.breaks = False
    assert capture(owner).pool != kept.pool
