"""Cold starts: seconds from the command to the first token on the GPU, with and without CUDA graphs, in processes of
their own; with Triton's cache of compiled kernels empty, and filled by the run before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import Table
from shapes import write_config

TOKENS, SMALL_TOKENS = 64, 3  # after the first
SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 16}  # so that the first, and largest, step is a small one
SECONDS = 200  # that a start may take
PROGRAM = """
import json, sys, time
from quire import LLM, SamplingParams
options, tokens = json.loads(sys.argv[1]), int(sys.argv[2])
started = time.perf_counter()
llm = LLM(**options)
loaded = time.perf_counter()
params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
llm.generate({"prompt_token_ids": list(range(2, 18))}, params, use_tqdm=False)
first = time.perf_counter()
params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
llm.generate({"prompt_token_ids": list(range(2, 18))}, params, use_tqdm=False)
again = time.perf_counter()
print("TIMES", loaded - started, first - loaded, (again - first) / tokens)
"""


def _start(options: dict[str, object], tokens: int, environment: dict[str, str]) -> tuple[float, ...] | str:
    """Return seconds: to the first token, of it loading and the first request; of each token after; or what failed."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(options), str(tokens)]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"stopped after {SECONDS} s"
    whole = time.perf_counter() - started
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("TIMES")]
    if not found:
        print(done.stderr[-3000:])
        return "failed"
    loading, first, each = map(float, found[0])
    return whole - each * tokens, loading, first, each


def measure_cold(*, small: bool = False, keep: Callable[[list[Table]], None]) -> list[Table]:
    """Return a table of a few starts of the 0.6B and 8B shapes; `keep` is called whenever there is more."""
    table = Table(
        "Cold start",
        (
            "model",
            "kernels compiled before",
            "graphs",
            "to the first token s",
            "of it loading s",
            "next tokens ms each",
        ),
    )
    shapes = ("qwen3-0.6b",) if small else ("qwen3-0.6b", "llama-3.1-8b")
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            model = write_config(shape, Path(folder), small=small)
            cache = Path(folder) / f"cache-{shape}"
            for compiled, eager in ((False, False), (True, False), (True, True)):
                options = {"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
                options |= {"max_model_len": 32 if small else 4096, "enforce_eager": eager, "swap_space": 0}
                options |= {"dtype": "float32", "num_gpu_blocks_override": 32, **SMALL} if small else {}
                environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
                times = _start(options, SMALL_TOKENS if small else TOKENS, environment)
                if isinstance(times, str):
                    table.add(shape, "yes" if compiled else "no", "no" if eager else "yes", times, "", "")
                    continue
                total, loading, first, each = times
                table.add(
                    shape,
                    "yes" if compiled else "no",
                    "no" if eager else "yes",
                    f"{total:.1f}",
                    f"{loading:.1f}",
                    f"{each * 1e3:.2f}",
                    model=shape,
                    compiled=compiled,
                    graphs=not eager,
                    first_token_seconds=total,
                    loading_seconds=loading,
                    request_seconds=first,
                    token_seconds=each,
                )
                keep([table])
    return [table]
