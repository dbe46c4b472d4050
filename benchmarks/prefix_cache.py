"""Time to first token of a prompt that was computed before, against the first time.

    python benchmarks/prefix_cache.py [--shape small|demo|large] [--tokens 2048] [--bound 5]

Medians. Exits with 1 if a repeated prompt does not have its first token at least `--bound` times sooner.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from common import print_header, print_table
from plan_accuracy import SHAPES, shape_options

from quire import LLM, SamplingParams


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=["demo", *SHAPES])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--bound", type=float, default=5.0)
    args = parser.parse_args()
    blocks = (args.repeat + 2) * (args.tokens // 16 + 1)
    options = {
        "max_model_len": args.tokens + 16,
        "max_num_batched_tokens": args.tokens,
        "num_gpu_blocks_override": blocks,
        "swap_space": 0,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(**shape_options(args.shape, Path(folder)), **options, skip_tokenizer_init=args.shape != "demo") as llm,
    ):
        rng = np.random.default_rng(0)
        prompts = [rng.integers(10, llm.vocab_size - 1, args.tokens).tolist() for _ in range(args.repeat + 1)]
        for _ in range(2):
            first_token(llm, prompts[-1])  # records the shapes of steps
        cold = [first_token(llm, prompt) for prompt in prompts[:-1]]
        warm = [first_token(llm, prompt) for prompt in prompts[:-1]]
    print_header(f"A prompt of {args.tokens} tokens; {args.shape}")
    rows = [[name, f"{1000 * median(found):.1f}"] for name, found in (("first time", cold), ("again", warm))]
    print_table(["", "ms to first token"], rows)
    times = median(cold) / median(warm)
    print(f"{times:.1f} times sooner; bound {args.bound:g}")
    return 0 if times >= args.bound else 1


def first_token(llm: LLM, prompt: list[int]) -> float:
    """Return the seconds to the first token of a prompt."""
    began = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
