"""Where the time of one step goes: the step as a whole, then its instructions by op, as the profiler traces them.

A step is sequences x tokens x context, such as 16x1x192 for decoding and 1x1024x1024 for a prompt. The time of an op
is the mean of its threads, which wait for each other beside that; reading the clock is in it.

    python benchmarks/step_profile.py --model FOLDER [--quantization int8] [--steps 1x1x192,16x1x192,1x1024x1024]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import print_header, print_table

from quire.checkpoint.hf_config import load_model_info
from quire.kernels.backend import LayerCache
from quire.kernels.cpu.backend import CPUBackend
from quire.models.loader import load_model
from quire.worker.graphs import StepGraphs
from quire.worker.input_batch import StepInputs

BLOCKS, BLOCK_SIZE = 4096, 16


def main() -> None:
    """Record the steps, time them, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--steps", default="1x1x192,16x1x192,1x1024x1024")
    args = parser.parse_args()
    print_header(f"One step of {args.model.name}, {args.quantization or 'bfloat16'}")
    backend = CPUBackend("bfloat16", "bfloat16", quantization=args.quantization)
    longest = max(int(step.split("x")[2]) for step in args.steps.split(","))
    model = load_model(load_model_info(args.model), backend, max_model_len=longest)
    layers = model.kv_cache_spec().layers
    caches = [backend.new_kv_cache(BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_size) for layer in layers]
    for cache in caches:  # memory that was never written would be read from one page of zeros
        cache.keys[:] = 0
        cache.values[:] = 0
    layer_caches = [LayerCache(cache) for cache in caches]
    graphs = StepGraphs(model, backend, layer_caches, max_tokens=4096, max_num_seqs=64, max_blocks=256)
    for step in args.steps.split(","):
        inputs = layout(*(int(part) for part in step.split("x")))
        graphs.run(inputs)  # is recorded
        profile(step, backend, lambda inputs=inputs: graphs.run(inputs))


def layout(sequences: int, tokens: int, context: int) -> StepInputs:
    """Return a step of random tokens in random blocks, each sequence sampled."""
    rng = np.random.default_rng(0)
    tables = rng.permutation(BLOCKS)[: sequences * -(-context // BLOCK_SIZE)].reshape(sequences, -1).astype(np.int32)
    positions = np.tile(np.arange(context - tokens, context), sequences)
    blocks = tables[np.repeat(np.arange(sequences), tokens), positions // BLOCK_SIZE].astype(np.int64)
    return StepInputs(
        sequence_ids=[],
        rows=np.arange(sequences),
        num_scheduled=np.full(sequences, tokens),
        input_ids=rng.integers(300, 15900, sequences * tokens),
        positions=positions,
        cu_query_lens=np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32),
        seq_lens=np.full(sequences, context, np.int32),
        block_tables=tables[None],
        slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)[None],
        num_logits=np.ones(sequences, np.int64),
        logits_indices=np.arange(1, sequences + 1) * tokens - 1,
    )


class OpTimes:
    """A trace of which only sums are kept: events and seconds by op, over all threads."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    def name_thread(self, thread: int, name: str) -> None:
        """Do nothing."""

    def add(self, name: str, begin: int, end: int, *, thread: int = 0, **args: Any) -> None:
        """Add an event."""
        sums = self.sums[name]
        sums[0] += 1
        sums[1] += (end - begin) / 1e9
        sums[2] += args["share_of_bandwidth"]


def profile(step: str, backend: CPUBackend, run: Callable[[], object], repeat: int = 7) -> None:
    """Time a step, and trace it."""
    seconds = median([clock(run) for _ in range(repeat)])
    times = OpTimes()
    backend.start_profile(times)
    for _ in range(repeat):
        run()
    backend.stop_profile(Path())
    print(f"{step}: {seconds * 1e3:.2f} ms\n")
    ordered = sorted(times.sums.items(), key=lambda item: -item[1][1])
    cells = [
        [
            name,
            f"{count / repeat:.0f}",
            f"{total / repeat / backend.num_threads * 1e3:.2f}",
            f"{total / count * 1e6:.1f}",
            f"{share / count:.0%}",
        ]
        for name, (count, total, share) in ordered
    ]
    print_table(("op", "events", "ms", "us each", "of bandwidth"), cells)


def clock(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
