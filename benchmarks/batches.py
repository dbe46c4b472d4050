"""What a batch does to interactive requests: their times to first token over HTTP, with and without one beside them.

Starts a server with the demo model. Streamed requests arrive at random (Poisson), in rounds: alone, then with a batch
running whose lines are as long as they are. Exits with 1 if the 99th percentile of the time to first token beside a
batch is more than `--bound` times that alone.

    python benchmarks/batches.py [--rate 5] [--seconds 30] [--rounds 3] [--bound 1.2] [SERVE_OPTION ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys

import httpx
import numpy as np
from common import print_header, print_table
from overload import WORDS, Load, open_loop, served

LINES = 20_000  # more than any round answers


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bound", type=float, default=1.2)
    args, options = parser.parse_known_args()
    print_header(f"{args.rate:g} requests per second, {args.rounds} rounds of {args.seconds:g} s; {' '.join(options)}")
    loads = {"alone": Load(), "beside a batch": Load()}
    num_lines = 0
    with served(options) as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        content = b"".join(line(number) for number in range(LINES))
        file = client.post("/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}).json()
        asyncio.run(open_loop(port, args.rate, args.seconds / 3, -1, Load()))  # records the shapes of steps
        for number in range(args.rounds):
            asyncio.run(open_loop(port, args.rate, args.seconds, number, loads["alone"]))
            body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = client.post("/batches", json=body).raise_for_status().json()
            asyncio.run(open_loop(port, args.rate, args.seconds, number, loads["beside a batch"]))
            client.post(f"/batches/{batch['id']}/cancel").raise_for_status()
            num_lines += client.get(f"/batches/{batch['id']}").json()["request_counts"]["completed"]
    rows, p99 = [], {}
    for name, load in loads.items():
        first = [answer.first for answer in load.answers if answer.complete and answer.first is not None]
        p99[name] = float(np.percentile(first, 99))
        figures = [f"{1000 * value:.1f}" for value in (np.median(first), p99[name], max(first))]
        rows.append([name, f"{len(first)} of {len(load.answers)}", *figures])
    print_table(["", "complete", "TTFT, median [ms]", "p99", "longest"], rows)
    times = p99["beside a batch"] / p99["alone"]
    print(f"{num_lines} lines meanwhile; p99 {times:.2f} times as long; bound {args.bound:g}")
    return 0 if times <= args.bound else 1


def line(number: int) -> bytes:
    """Return a line of the batch."""
    chooser = random.Random(number)
    prompt = " ".join(chooser.choices(WORDS, k=chooser.randint(10, 60)))
    body = {"model": "m", "prompt": prompt, "max_tokens": chooser.randint(8, 48), "ignore_eos": True}
    request = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


if __name__ == "__main__":
    sys.exit(main())
