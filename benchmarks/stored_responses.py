"""What it costs to store a response: each operation of the store, in memory and in files, alone and beside others.

Each time is the median (and the 99th percentile) over all repetitions, in microseconds, until the event loop has the
result. `stall` is the longest time for which the event loop did not run meanwhile, in milliseconds; it is that of the
machine and of Python's lock as well.

    python benchmarks/stored_responses.py [--repeat 500] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import print_header, print_table

from quire.server.responses.store import ResponseStore, StoredResponse
from quire.server_config import ServerConfig

OPERATIONS = ("add", "finish", "find", "previous", "items", "delete")
SIZES = {"2 KB": 2_000, "200 KB": 200_000, "4 MB": 4_000_000}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=500)
    parser.add_argument("--folder", default=None, help="on the disk to be measured")
    args = parser.parse_args()
    print_header("Stored responses, microseconds")
    rows = []
    for name, size in SIZES.items():
        repeat = args.repeat if size < 10**6 else max(args.repeat // 20, 10)
        for place in ("memory", "file", "file, 2 others write"):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder, others(folder, 2 * ("others" in place)):
                found, stall = asyncio.run(measure(None if place == "memory" else folder, size, repeat))
            rows.append([name, place, *map(shown, found.values()), f"{stall * 1e3:.1f}"])
    print_table(["earlier items", "place", *OPERATIONS, "stall [ms]"], rows)


def shown(times: list[float]) -> str:
    """Return a median and a 99th percentile."""
    return f"{statistics.median(times) * 1e6:.0f} ({sorted(times)[len(times) * 99 // 100] * 1e6:.0f})"


async def measure(folder: str | None, size: int, repeat: int, slot: int = 0) -> tuple[dict[str, list[float]], float]:
    """Return the times of each operation, and the longest stall of the event loop [s]."""
    config = ServerConfig(data_dir=folder, max_stored_responses=200, max_stored_response_bytes=2**28)
    store = ResponseStore(config, slot=slot)
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    stall = 0.0

    async def watch() -> None:
        nonlocal stall
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            stall = max(stall, time.perf_counter() - begun - 0.001)

    watching = asyncio.create_task(watch())

    @contextlib.contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        times[name].append(time.perf_counter() - begun)

    earlier = [{"id": f"msg_{number}", "type": "message", "text": "x" * 1000} for number in range(size // 1000)]
    for number in range(repeat):
        name = f"{slot}_{number}"
        response: dict[str, Any] = {"id": f"resp_{name}", "status": "in_progress", "output": []}
        stored = StoredResponse(b"key", response, earlier, [{"id": f"in_{name}", "text": "x" * 1000}], events=False)
        with timed("add"):
            await store.add(stored)
        response.update(status="completed", output=[{"id": f"out_{name}", "text": "y" * 1000}])
        with timed("finish"):
            store.finish(stored)
            await stored.ended.wait()
        with timed("find"):
            await store.find(b"key", stored.response_id)
        with timed("previous"):
            _ = (await store.previous(b"key", stored.response_id)).conversation
        with timed("items"):
            await store.items(b"key", [f"out_{name}"])
        if number % 4 == 0:
            with timed("delete"):
                await store.delete(stored)
    watching.cancel()
    store.close()
    return times, stall


def write_on(folder: str, slot: int) -> None:
    """Store small responses until killed."""
    Path(folder).mkdir(exist_ok=True)
    asyncio.run(measure(folder, 2000, 10**9, slot))


@contextlib.contextmanager
def others(folder: str, count: int) -> Iterator[None]:
    """Let so many other processes write to the same file."""
    processes = [
        multiprocessing.Process(target=write_on, args=(folder, slot), daemon=True) for slot in range(1, count + 1)
    ]
    for process in processes:
        process.start()
    time.sleep(1.0 if processes else 0.0)
    yield
    for process in processes:
        process.kill()
        process.join()


if __name__ == "__main__":
    main()
