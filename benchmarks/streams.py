"""What a streamed token costs: many streams at once from one server, CPU time of the front and of the engine apart.

    python benchmarks/streams.py --streams 512 --max-tokens 64
    python benchmarks/streams.py --bench-serve

Starts `quire serve` with the embedded model, opens all streams at once and reads them with a client that does little.
Per token there is one server-sent event, so the front's time holds HTTP, detokenizing, JSON and the socket. Besides it
says whether any stream starves: how far apart first and last end, and the longest silence within one. Linux only (CPU
times are those of /proc).

With `--bench-serve` the client is `quire bench serve`, with 64 chats of 32 random prompt tokens and up to 128 generated
ones, all at once, and the server has its default options: "front us/token" is the CPU time of the server's process per
streamed token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT, print_header, print_table

ENVIRONMENT = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Stream:
    """When things happened in one stream [s since the start of the run]."""

    first: float = 0.0
    end: float = 0.0
    num_events: int = 0
    longest_silence: float = 0.0
    finished: bool = False
    tail: bytes = field(default=b"", repr=False)


class Reader(asyncio.Protocol):
    """Sends one request and counts the events that come back."""

    def __init__(self, request: bytes, stream: Stream, done: asyncio.Event, start: float) -> None:
        self.request, self.stream, self.done, self.start = request, stream, done, start
        self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        stream, now = self.stream, time.perf_counter() - self.start
        events = data.count(b"data: {")
        if events:
            if not stream.num_events:
                stream.first = now
            else:
                stream.longest_silence = max(stream.longest_silence, now - self.last)
            self.last = now
            stream.num_events += events
        stream.tail = (stream.tail + data)[-64:]
        if b"[DONE]" in stream.tail:
            stream.finished = True
            stream.end = now
            self.done.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def children(pid: int) -> list[int]:
    """Return the child processes of a process, whichever of its threads started them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


async def run_streams(port: int, count: int, max_tokens: int, path: str) -> tuple[list[Stream], float]:
    """Run the streams to their ends; return them and the seconds that all took."""
    loop = asyncio.get_running_loop()
    streams = [Stream() for _ in range(count)]
    ends = []
    start = time.perf_counter()
    for index, stream in enumerate(streams):
        body = {"model": "quire-demo", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "seed": index}
        text = f"{index}: once upon a time"
        body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        done = asyncio.Event()
        ends.append(done)

        def protocol(
            request: bytes = head.encode() + data, stream: Stream = stream, done: asyncio.Event = done
        ) -> Reader:
            return Reader(request, stream, done, start)

        await loop.create_connection(protocol, "127.0.0.1", port)
    for done in ends:
        await done.wait()
    return streams, time.perf_counter() - start


def measure(port: int, front: int, engine: int, args: argparse.Namespace, path: str) -> list[str]:
    """Return a row of the table."""
    before = [cpu_seconds(pid) for pid in (front, engine)]
    streams, seconds = asyncio.run(run_streams(port, args.streams, args.max_tokens, path))
    used = [cpu_seconds(pid) - then for pid, then in zip((front, engine), before, strict=True)]
    failed = [stream for stream in streams if not stream.finished]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(streams)} streams did not end: {failed[0]}")
    tokens = args.streams * args.max_tokens
    firsts = sorted(stream.first for stream in streams)
    ends = sorted(stream.end for stream in streams)
    return [
        f"{path}, {args.streams} streams",
        f"{tokens / seconds:.0f}",
        f"{1e6 * used[0] / tokens:.1f}",
        f"{1e6 * used[1] / tokens:.1f}",
        f"{1000 * firsts[len(firsts) // 2]:.0f} / {1000 * firsts[-1]:.0f}",
        f"{1000 * ends[0]:.0f} / {1000 * ends[-1]:.0f}",
        f"{1000 * max(stream.longest_silence for stream in streams):.0f}",
    ]


def measure_bench_serve(port: int, front: int, engine: int) -> list[str]:
    """Return a row of the table for a run of `quire bench serve`."""
    before = [cpu_seconds(pid) for pid in (front, engine)]
    with tempfile.TemporaryDirectory() as folder:
        load = ["--backend", "openai-chat", "--num-prompts", "64", "--random-input-len", "32"]
        load += ["--random-output-len", "128", "--port", str(port)]
        words = ["bench", "serve", *load, "--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        subprocess.run([sys.executable, "-m", "quire", *words], stdout=subprocess.DEVNULL, check=True, env=ENVIRONMENT)
        result = json.loads(Path(folder, "result.json").read_text())
    used = [cpu_seconds(pid) - then for pid, then in zip((front, engine), before, strict=True)]
    tokens = result["total_output_tokens"]
    return [
        f"quire bench serve, {result['completed']} chats",
        f"{result['output_throughput']:.0f}",
        f"{1e6 * used[0] / tokens:.1f}",
        f"{1e6 * used[1] / tokens:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--bench-serve", action="store_true", help="load of `quire bench serve` instead, see above")
    parser.add_argument("options", nargs="*", help="further options of quire serve, behind --")
    args = parser.parse_args()
    words = ["--port", "0", *args.options]
    if not args.bench_serve:
        words += ["--max-num-seqs", str(args.streams), "--disable-access-log"]
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *words], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert server.stdout is not None
        address = next(line for line in server.stdout if line.startswith("ready"))
        found = re.search(r":(\d+) ", address)
        assert found
        port = int(found[1])
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
        [engine] = children(server.pid)
        print_header("Streams")
        header: tuple[str, ...] = ("load", "tokens/s", "front us/token", "engine us/token")
        if args.bench_serve:
            measure_bench_serve(port, server.pid, engine)  # compiles the shapes of steps
            print_table(header, [measure_bench_serve(port, server.pid, engine) for _ in range(args.runs)])
            return
        rows = []
        for path in ("/v1/completions", "/v1/chat/completions"):
            measure(port, server.pid, engine, args, path)  # compiles the shapes of steps
            rows += [measure(port, server.pid, engine, args, path) for _ in range(args.runs)]
        header += ("first token ms, median / last", "ends ms, first / last", "longest silence ms")
        print_table(header, rows)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
