"""Overload: what a server still does when four times as many requests arrive as it can answer.

Starts a server with the demo model, finds its capacity with a fixed number of clients that ask one request after the
other, then lets requests arrive at random (Poisson) at that rate and at four times it, whatever happens to the others.
Both loads take turns, so that a machine that gets slower or faster meanwhile does so for both.
Prints, for each load, the goodput (answers per second that were complete and whose first token came within the limit),
the time to be turned away, the time to the first token of those let in, the memory of all processes, and whether a
front or the engine was replaced.

    python benchmarks/overload.py [--seconds 300] [--rounds 5] [--max-ttft 2] [SERVE_OPTION ...]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

PROMPT_WORDS = (10, 60)
MAX_TOKENS = (8, 48)
WORDS = ("the", "a", "of", "red", "green", "cat", "dog", "tree", "sun", "moon", "walks", "sings", "under", "bright")


@dataclass
class Answer:
    """What became of one request; times in seconds from its sending."""

    status: int = 0
    first: float | None = None
    last: float | None = None
    complete: bool = False
    retry_after: bool = False


@dataclass
class Load:
    """All answers to one load."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)


def request_bytes(chooser: random.Random) -> bytes:
    """Return a streamed request of random length, one to a connection."""
    prompt = " ".join(chooser.choices(WORDS, k=chooser.randint(*PROMPT_WORDS)))
    body = {"model": "m", "prompt": prompt, "max_tokens": chooser.randint(*MAX_TOKENS), "stream": True}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(port: int, request: bytes) -> Answer:
    """Send a request and read its answer to the end."""
    answer = Answer()
    started = time.perf_counter()
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            answer.status = int(head.split()[1])
            answer.retry_after = b"\r\nretry-after:" in head.lower()
            answer.last = time.perf_counter() - started
            tail = b""
            while chunk := await reader.read(65536):
                if answer.first is None and b"data: {" in chunk:
                    answer.first = time.perf_counter() - started
                tail = (tail + chunk)[-64:]
                answer.last = time.perf_counter() - started
            answer.complete = b"data: [DONE]" in tail
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
    return answer


async def closed_loop(port: int, clients: int, seconds: float) -> float:
    """Return the answers per second that so many clients get, who ask one request after the other."""
    end = time.perf_counter() + seconds
    done = 0

    async def client(seed: int) -> None:
        nonlocal done
        chooser = random.Random(seed)
        while time.perf_counter() < end:
            answer = await ask(port, request_bytes(chooser))
            done += answer.complete and time.perf_counter() < end

    await asyncio.gather(*[client(seed) for seed in range(clients)])
    return done / seconds


async def open_loop(port: int, rate: float, seconds: float, seed: int, load: Load) -> None:
    """Send requests at random times at a mean rate, wait for all answers, and add them to `load`."""
    chooser = random.Random(seed)
    load.seconds += seconds
    tasks: set[asyncio.Task[None]] = set()

    async def one(request: bytes) -> None:
        load.answers.append(await ask(port, request))

    due = started = time.perf_counter()
    while due - started < seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(one(request_bytes(chooser)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due += chooser.expovariate(rate)
    await asyncio.gather(*tasks)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def memory(pid: int) -> float:
    """Return the resident memory of a process and its descendants [MiB]."""
    total, left = 0, [pid]
    while left:
        process = left.pop()
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            total += int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                left += [int(child) for child in children.read_text().split()]
    return total / 1024


def num_restarts(port: int) -> dict[str, int]:
    """Return how many fronts and engines were replaced."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    names = ("front_restarts", "engine_restarts")
    return {
        name: sum(int(float(count)) for count in re.findall(rf"^quire:{name}_total\S* (\S+)", text, re.M))
        for name in names
    }


def report(name: str, load: Load, limit: float) -> float:
    """Print a line about a load; return its goodput [answers/s]."""
    good = [item for item in load.answers if item.complete and item.first is not None and item.first <= limit]
    refused = [item for item in load.answers if item.status in (429, 503)]
    accepted = [item.first for item in load.answers if item.status == 200 and item.first is not None]
    others = len(load.answers) - len(refused) - len([item for item in load.answers if item.complete])
    goodput = len(good) / load.seconds
    print(
        f"{name}: {len(load.answers)} requests, goodput {goodput:.1f}/s, "
        f"let in {len(accepted)}, in time {len(good) / max(1, len(accepted)):.1%}, "
        f"TTFT p50 {percentile(accepted, 0.5):.3f} s p99 {percentile(accepted, 0.99):.3f} s, "
        f"turned away {len(refused)} (with Retry-After {sum(item.retry_after for item in refused)}) "
        f"p50 {1000 * percentile([item.last or 0 for item in refused], 0.5):.1f} ms "
        f"p99 {1000 * percentile([item.last or 0 for item in refused], 0.99):.1f} ms, neither {others}",
        flush=True,
    )
    return goodput


@contextlib.contextmanager
def served(options: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Run a server; yield its port and process id once it is ready."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--served-model-name", "m", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("ready"):
                    break
            found = re.search(r"url=http://[^:]+:(\d+)", line)
            assert found is not None, "the server did not start"
            yield int(found[1]), process.pid
        finally:
            process.terminate()


async def measure(port: int, pid: int, args: argparse.Namespace) -> None:
    """Run all loads and print what came of them."""
    await closed_loop(port, args.clients, args.warmup)
    capacity = await closed_loop(port, args.clients, args.warmup)
    before = memory(pid)
    print(f"capacity {capacity:.1f} answers/s with {args.clients} clients; memory {before:.0f} MiB")
    idle = [await ask(port, request_bytes(random.Random(seed))) for seed in range(5)]
    loads = {1: Load(), 4: Load()}
    for number in range(args.rounds):
        for times, load in loads.items():
            await open_loop(port, times * capacity, args.seconds / args.rounds, 2 * number + times, load)
    goodput = [report(f"{times}x", load, args.max_ttft) for times, load in loads.items()]
    after = [await ask(port, request_bytes(random.Random(seed))) for seed in range(5)]
    first = [percentile([item.first or math.nan for item in items], 0.5) for items in (idle, after)]
    print(
        f"goodput at 4x is {goodput[1] / goodput[0]:.1%} of that at 1x; memory {memory(pid):.0f} MiB, before "
        f"{before:.0f}; TTFT alone {1000 * first[0]:.0f} ms before, {1000 * first[1]:.0f} ms right after; "
        + ", ".join(f"{count} {name}" for name, count in num_restarts(port).items())
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="length of each load")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each load takes")
    parser.add_argument("--warmup", type=float, default=15.0, help="length of warming up and of finding the capacity")
    parser.add_argument("--clients", type=int, default=32, help="clients while the capacity is found")
    parser.add_argument("--max-ttft", type=float, default=2.0, help="the limit for first tokens [s]")
    args, rest = parser.parse_known_args()
    options = ["--max-ttft", str(args.max_ttft), "--max-num-seqs", "16", "--disable-access-log", *rest]
    with served(options) as (port, pid):
        asyncio.run(measure(port, pid, args))


if __name__ == "__main__":
    main()
