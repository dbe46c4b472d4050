"""What one long prompt does to short ones beside it, and they to it: times to first token on the real engine.

    python benchmarks/fair_prompts.py [--shape small|demo|large] [--long 12000] [--short 80] [--gap 0.2]

Three runs: the long prompt alone, the short ones alone, all together. The long one arrives first; the short ones come
right after it, or one every `--gap` seconds. "fifo" gives the first prompt all of a step, as schedulers without shares
do (here: by taking the others' shares away). Exits with 1 if, all at once, the slowest short prompt takes more than
twice as long as without the long one, or that more than 1.2 times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from common import print_header, print_table
from plan_accuracy import SHAPES, shape_options

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine_request import EngineRequest
from quire.sampling_params import SamplingParams

BOUNDS = 2.0, 1.2  # times of what they take alone: the short prompts, and the long one
Arrivals = list[tuple[float, str, int]]  # seconds, name, tokens of the prompt


def request(name: str, num_tokens: int, arrival: float, vocab_size: int, num_output: int) -> EngineRequest:
    """Return a request whose prompt shares no beginning with another's."""
    start = sum(name.encode()) * 31
    prompt = [1 + (start + 7 * index) % (vocab_size - 1) for index in range(num_tokens)]
    prompt[0] = 1 + hash(name) % (vocab_size - 1)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=num_output, temperature=0.0),
        arrival_time=arrival,
        sequence_ids=[name],
        seeds=[0],
        stop_ids=[],
        max_tokens=num_output,
    )


def replay(core: EngineCore, arrivals: Arrivals, num_output: int) -> dict[str, float]:
    """Return each request's time from arrival to first token [s]."""
    core.call("reset_prefix_cache")
    pending = sorted(arrivals)
    started = time.perf_counter()
    arrived, first = {}, {}
    while pending or core.has_unfinished():
        now = time.perf_counter() - started
        while pending and pending[0][0] <= now:
            arrival, name, num_tokens = pending.pop(0)
            core.add(request(name, num_tokens, arrival, core.ready.vocab_size, num_output))
            arrived[name] = arrival
        for output in core.step().outputs:
            if output.new_token_ids:
                first.setdefault(output.sequence_id, time.perf_counter() - started - arrived[output.sequence_id])
    return first


def fifo(budget: int, wanted: list[int], most: int, long_chunk: int) -> list[int]:
    """Give the oldest prompt all it can take, then the next."""
    shares = []
    for count in wanted:
        shares.append(min(count, most, budget))
        budget -= shares[-1]
    return shares


def p99(times: dict[str, float]) -> float:
    """Return the 99th percentile, of so few the largest."""
    return max(times.values())


def compare(core: EngineCore, args: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table."""
    long: Arrivals = [(0.0, "long", args.long)]
    short: Arrivals = [(1e-4 + index * args.gap, f"short {index}", args.short) for index in range(args.num_short)]

    def run(arrivals: Arrivals) -> dict[str, float]:
        return replay(core, arrivals, args.output)

    for arrivals in (long, short, long + short):  # record each shape of step once
        run(arrivals)
    alone, short_alone = run(long)["long"], p99(run(short))
    rows = []
    patched: Callable[..., Any] = mock.patch
    for name in ("shares", "fifo"):
        if name == "fifo":
            with patched("quire.scheduler.unified.share_tokens", fifo):
                run(long + short)
                together = run(long + short)
        else:
            together = run(long + short)
        long_time = together.pop("long")
        worst = p99(together)
        figures = [f"{short_alone:.3f}", f"{worst:.3f}", f"{worst / short_alone:.2f}"]
        rows.append([name, *figures, f"{alone:.3f}", f"{long_time:.3f}", f"{long_time / alone:.2f}"])
    return rows


def main() -> int:
    """Print the table; return 1 if, with shares, one of `BOUNDS` is exceeded where all prompts come at once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--shape", default="small", choices=["demo", *SHAPES])
    parser.add_argument("--long", type=int, default=12000)
    parser.add_argument("--short", type=int, default=80)
    parser.add_argument("--num-short", type=int, default=20)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--hf-overrides", type=json.loads, default={"max_position_embeddings": 32768})
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        core = EngineCore(
            EngineConfig.from_kwargs(
                **shape_options(args.shape, Path(folder)),
                hf_overrides=args.hf_overrides,
                max_num_batched_tokens=args.max_num_batched_tokens,
                kv_cache_memory_bytes=2**30,
            )
        )
        rows = compare(core, args)
        core.close()
    print_header(
        f"A prompt of {args.long} tokens beside {args.num_short} of {args.short}, {args.gap} s apart; {args.shape}, "
        f"{args.max_num_batched_tokens} tokens a step"
    )
    print_table(["", "short alone [s]", "beside", "times", "long alone [s]", "beside", "times"], rows)
    short_times, long_times = float(rows[0][3]), float(rows[0][6])
    return int(args.gap == 0 and (short_times > BOUNDS[0] or long_times > BOUNDS[1]))


if __name__ == "__main__":
    sys.exit(main())
