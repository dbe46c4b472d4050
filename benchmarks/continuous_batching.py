"""Continuous batching against static batches of the same size: throughput with lengths as those of real chats.

    python benchmarks/continuous_batching.py [--shape small|demo|large] [--requests 200] [--batch 16] [--bound 2]

Lengths are drawn from log-normal distributions whose medians and spreads are about those of ShareGPT, scaled down to
the context. All rows of a static batch are computed until its longest answer has ended, and then the next one begins,
as where batches are scheduled as a whole; tokens behind the end of an answer do not count. Exits with 1 if continuous
batching has less than `--bound` times the tokens per second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import print_header, print_table
from plan_accuracy import SHAPES, shape_options

from quire import LLM, SamplingParams

SPREAD = 1.0  # of the logarithm of lengths


def main() -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small", choices=["demo", *SHAPES])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--bound", type=float, default=2.0)
    args = parser.parse_args()
    options = {"max_num_seqs": args.batch, "max_model_len": 1024, "enable_prefix_caching": False, "swap_space": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(**shape_options(args.shape, Path(folder)), **options, skip_tokenizer_init=args.shape != "demo") as llm,
    ):
        requests = draw(args.requests, llm)
        together(llm, requests[: 2 * args.batch])  # records the shapes of steps
        continuous = together(llm, requests)
        batches = [requests[start : start + args.batch] for start in range(0, len(requests), args.batch)]
        static = sum(together(llm, padded(batch)) for batch in batches)
    tokens = sum(params.max_tokens or 0 for _, params in requests)
    print_header(f"{args.requests} requests, {tokens} tokens, {args.batch} at a time; {args.shape}")
    rows = [
        [name, f"{seconds:.2f}", f"{tokens / seconds:.0f}"]
        for name, seconds in (("static batches", static), ("continuous", continuous))
    ]
    print_table(["", "s", "tokens/s"], rows)
    times = static / continuous
    print(f"{times:.2f} times the throughput; bound {args.bound:g}")
    return 0 if times >= args.bound else 1


def draw(count: int, llm: LLM) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts of random tokens and how many are generated behind each."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(llm.max_model_len / 24), SPREAD, count), 4, llm.max_model_len / 2)
    outputs = np.clip(rng.lognormal(np.log(llm.max_model_len / 16), SPREAD, count), 2, llm.max_model_len / 2 - 1)
    return [
        (
            rng.integers(10, llm.vocab_size - 1, int(prompt)).tolist(),
            SamplingParams(max_tokens=int(output), ignore_eos=True, temperature=0.0, detokenize=False),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def padded(batch: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], SamplingParams]]:
    """Return the requests of a batch, each as long as the longest."""
    longest = max(params.max_tokens or 0 for _, params in batch)
    return [(prompt, params.clone(max_tokens=longest)) for prompt, params in batch]


def together(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> float:
    """Return the seconds until all of these requests have ended."""
    began = time.perf_counter()
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
