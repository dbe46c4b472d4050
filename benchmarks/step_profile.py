"""Where the time of one step goes: its program as a whole, then each of its instructions by itself, by op.

A step is sequences x tokens x context, such as 16x1x192 for decoding and 1x1024x1024 for a prompt. Alone, an
instruction also pays for being started from Python, some 6 us, which it does not in the program: the last line gives
what groups of instructions take when run one after the other.

    python benchmarks/step_profile.py --model FOLDER [--quantization int8] [--steps 1x1x192,16x1x192,1x1024x1024]
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from common import print_header, print_table

from quire.checkpoint.hf_config import load_model_info
from quire.kernels import cpu as kernels
from quire.kernels.backend import LayerCache
from quire.kernels.cpu import team
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.jit import Op
from quire.kernels.cpu.threads import Program
from quire.models.loader import load_model
from quire.worker.graphs import StepGraphs
from quire.worker.input_batch import StepInputs

BLOCKS, BLOCK_SIZE = 4096, 16
GROUPS = {"products": "linear", "attention": "attend"}


def main() -> None:
    """Record the steps, time them, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--steps", default="1x1x192,16x1x192,1x1024x1024")
    args = parser.parse_args()
    print_header(f"One step of {args.model.name}, {args.quantization or 'bfloat16'}")
    backend = CPUBackend("bfloat16", "bfloat16", quantization=args.quantization)
    model = load_model(load_model_info(args.model), backend, max_model_len=2048)
    layers = model.kv_cache_spec().layers
    caches = [backend.new_kv_cache(BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_size) for layer in layers]
    for cache in caches:  # memory that was never written would be read from one page of zeros
        cache.keys[:] = 0
        cache.values[:] = 0
    layer_caches = [LayerCache(cache) for cache in caches]
    graphs = StepGraphs(model, backend, layer_caches, max_tokens=4096, max_num_seqs=64, max_blocks=256)
    programs: list[Program] = []
    remember(programs)
    for step in args.steps.split(","):
        graphs.run(layout(*(int(part) for part in step.split("x"))))
        profile(step, programs[-1])


def remember(programs: list[Program]) -> None:
    """Note every program that is recorded from now on."""
    make = Program.__init__

    def noting(self: Program, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        programs.append(self)

    Program.__init__ = noting  # type: ignore[method-assign]


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


def profile(step: str, program: Program, repeat: int = 7) -> None:
    """Time a program and its instructions."""
    modules = [
        importlib.import_module(f"{kernels.__name__}.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)
    ]
    ops = [value for module in modules for value in vars(module).values() if isinstance(value, Op) and value.is_loaded]
    names = {op.address: op.name for op in ops}
    rows = program.rows
    called = [names[int(row[team.OP])] for row in rows]

    def seconds(chosen: np.ndarray, times: int) -> float:
        part = Program(np.ascontiguousarray(rows[chosen]), [], program._runner)
        return float(np.median([clock(part) for _ in range(times)]))

    table: dict[str, list[float]] = defaultdict(list)
    for index, name in enumerate(called):
        table[name].append(seconds(np.array([index]), 3))
    print(f"{step}: {clock_many(program, repeat) * 1e3:.2f} ms, {len(rows)} instructions\n")
    ordered = sorted(table.items(), key=lambda item: -sum(item[1]))
    cells = [[name, f"{len(t)}", f"{sum(t) * 1e3:.2f}", f"{sum(t) / len(t) * 1e6:.1f}"] for name, t in ordered]
    print_table(("op", "instructions", "ms, alone", "us each"), cells)
    for title, word in GROUPS.items():
        chosen = np.array([word in name for name in called])
        print(f"only {title}: {seconds(chosen, repeat) * 1e3:.2f} ms")
    chosen = np.array([not any(word in name for word in GROUPS.values()) for name in called])
    print(f"all but these: {seconds(chosen, repeat) * 1e3:.2f} ms\n")


def clock(program: Program) -> float:
    """Return the seconds of one run."""
    started = time.perf_counter()
    program.run()
    return time.perf_counter() - started


def clock_many(program: Program, repeat: int) -> float:
    """Return the median of some runs."""
    return float(np.median([clock(program) for _ in range(repeat)]))


if __name__ == "__main__":
    main()
