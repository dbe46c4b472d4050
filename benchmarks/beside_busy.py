"""Decode speed alone and beside busy processes, in turns: what threads that wait politely are worth.

Busy processes compute in a loop and use whatever they are given. With as many of them as cores, half of the machine is
the engine's fair share.

    python benchmarks/beside_busy.py [--model quire-demo] [--dtype auto] [--quantization int8] [--busy 2] [--repeat 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import print_header, print_table

from quire import LLM, SamplingParams

BUSY = "while True: sum(i * i for i in range(100000))"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--busy", type=int, default=2, help="busy processes")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in one measurement")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    print_header(
        f"Decoding beside {args.busy} busy processes, {Path(args.model).name}, {args.quantization or args.dtype}"
    )
    llm = LLM(args.model, dtype=args.dtype, quantization=args.quantization, max_model_len=512, generation_config="none")
    decode(llm, args.tokens)
    alone, beside = [], []
    for _ in range(args.repeat):
        alone.append(decode(llm, args.tokens))
        processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.busy)]
        try:
            time.sleep(0.5)  # until they run
            beside.append(decode(llm, args.tokens))
        finally:
            for process in processes:
                process.kill()
                process.wait()
    speeds = [statistics.median(times) for times in (alone, beside)]
    row = [f"{speed:.1f}" for speed in speeds] + [f"{speeds[1] / speeds[0]:.2f}"]
    print_table(("one request", "alone, tok/s", f"beside {args.busy}, tok/s", "ratio"), [["decode", *row]])


def decode(llm: LLM, tokens: int) -> float:
    """Generate for a fresh prompt; return tokens a second after the first one."""
    times = []
    for count in (1, tokens):
        prompt = {"prompt_token_ids": [random.randrange(64) for _ in range(64)]}
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        times.append(time.perf_counter() - started)
    return (tokens - 1) / (times[1] - times[0])


if __name__ == "__main__":
    main()
