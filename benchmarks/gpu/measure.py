"""Times of device work, and the limits of the device that they are compared with, measured in the same call."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from quire.kernels.gpu.graphs import end_broken_capture

Run = Callable[[int], object]
ROUNDS = 7  # medians are taken of so many
ROUND_SECONDS = 0.02
WARM_UP_SECONDS = 1.0
MAX_LAUNCHES = 200
GIB = 2**30


def on_gpu() -> bool:
    """Whether there is a GPU; without one the scripts run small, to be tested."""
    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait for the device."""
    if on_gpu():
        torch.cuda.synchronize()


def wall_seconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call, device work included."""
    synchronize()
    started = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - started


def seconds(run: Run, *, recorded: bool = True, rounds: int = ROUNDS) -> float:
    """Return the median device time of one launch [seconds].

    Launches are recorded as a CUDA graph where that is possible, so that the host's share is left out, as it is when
    the engine replays a step; `recorded`: whether to try. `rounds`: of which the median is taken. Without a GPU it is
    the time of one call.
    """
    if not on_gpu():
        return max(wall_seconds(lambda: run(0)), 1e-6)
    for number in range(3):
        run(number)
    synchronize()
    once = max(wall_seconds(lambda: run(3)), 1e-6)
    launches = max(4, min(MAX_LAUNCHES, int(ROUND_SECONDS / once)))
    replay = _recorded(run, launches) if recorded else partial(_launch, run, launches)
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / launches)
    return statistics.median(times)


def _launch(run: Run, launches: int) -> None:
    for number in range(launches):
        run(number)


def _recorded(run: Run, launches: int) -> Callable[[], object]:
    """Return what launches so many times, from a graph if possible."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            _launch(run, launches)
    except RuntimeError:  # what synchronizes cannot be recorded
        end_broken_capture(pool)
        torch.cuda.synchronize()
        return partial(_launch, run, launches)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


@dataclass(slots=True)
class Limits:
    """What the device can do at best: bytes per second, operations per second by type, seconds of an empty launch.

    bandwidth: the most of what `transfers` has, by what moves the bytes.
    """

    device: str
    bandwidth: float
    transfers: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    launch: float = 0.0

    def least_seconds(self, num_bytes: float, flops: float, unit: str = "bfloat16") -> float:
        """Return the roofline: the longer of moving these bytes and doing these operations."""
        return max(num_bytes / self.bandwidth, flops / self.flops.get(unit, float("inf")))

    def save(self, file: Path) -> None:
        """Write them for the other parts."""
        file.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, file: Path) -> Limits:
        """Read what `save` wrote."""
        return cls(**json.loads(file.read_text()))


def _transfers(num_bytes: int, device: str) -> dict[str, float]:
    """Return bytes per second, read and written, of the ways in which much memory is moved."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    ways: dict[str, tuple[int, Run]] = {
        "copying by the driver": (2, lambda i: target.copy_(source)),
        "copying by a kernel": (2, lambda i: torch.mul(source, 2.0, out=target)),
        "reading": (1, lambda i: source.sum()),
        "reading by cuBLAS": (1, lambda i: source.view(-1, 8192) @ target[:8192]),
    }
    return {name: times * num_bytes / seconds(run) for name, (times, run) in ways.items()}


def _warm_up(device: str) -> None:
    """Have the device's clocks rise, which takes a while after it was idle."""
    a = torch.randn(4096, 4096, device=device)
    stop = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < stop:
        torch.mm(a, a)
        torch.cuda.synchronize()


def measure_limits(size: int = 8192, num_bytes: int = 4 * GIB) -> Limits:
    """Measure transfers of `num_bytes` bytes and products of square matrices of random numbers."""
    device = "cuda" if on_gpu() else "cpu"
    name = torch.cuda.get_device_name() if on_gpu() else "no GPU"
    if on_gpu():
        _warm_up(device)
    transfers = _transfers(num_bytes, device)
    limits = Limits(name, max(transfers.values()), transfers)
    work = 2.0 * size**3
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        limits.flops[str(dtype).removeprefix("torch.")] = work / seconds(lambda i, a=a, b=b: a @ b)
    if on_gpu():
        a8, b8 = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        scales = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)
        limits.flops["float8"] = work / seconds(
            lambda i: torch._scaled_mm(a8, b8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        )
        ai, bi = (torch.randint(-127, 127, (size, size), device=device, dtype=torch.int8) for _ in range(2))
        limits.flops["int8"] = work / seconds(lambda i: torch._int_mm(ai, bi.t()))
        one = torch.zeros(1, device=device)
        limits.launch = seconds(lambda i: one.add_(1))
    return limits
