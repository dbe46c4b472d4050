"""Quire beside `transformers.generate` on the same checkpoint and machine, in turns, in one run.

Each engine has a process of its own (PyTorch's and Numba's threads disturb each other in one), and only one of them
works at a time. Both see the same random prompts, generate greedily and never stop early. Medians of the repetitions;
the ratio is Quire's speed over that of transformers. A gap under 15 percent means nothing.

    python benchmarks/vs_transformers.py [--model FOLDER | --shape 576,1536,30,9,3] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import print_header, print_table

# name: (requests, prompt tokens, output tokens)
WORKLOADS = {"one request": (1, 128, 128), "16 requests": (16, 128, 64), "long prompt": (1, 1024, 1)}
ENGINES = ("quire", "transformers")
Generate = Callable[[list[list[int]], int], int]


def main() -> None:
    """Run the workloads on both engines and print a table, or be one of the engines."""
    args = parse_args()
    if args.engine:
        work(args.engine, args.model, args.dtype, args.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_llama(Path(folder), [int(part) for part in args.shape.split(",")], args.dtype)
        compare(args, model)


def peak_memory() -> int:
    """Return the most memory this process has had, in bytes (Linux).

    Not from getrusage: that figure survives exec, so a child begins with what its parent had.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; default: a random Llama of --shape")
    parser.add_argument("--shape", default="576,1536,30,9,3", help="hidden,intermediate,layers,heads,kv heads")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths, for a quick look")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(args: argparse.Namespace, model: str) -> None:
    """Start both engines, let them work in turns, print medians and ratios."""
    print_header(f"Quire and transformers, {Path(model).name if args.model else args.shape}, {args.dtype}")
    engines = {name: Engine(name, model, args) for name in ENGINES}
    rows = []
    for title, (count, input_len, output_len) in WORKLOADS.items():
        lengths = [max(1, int(length * args.scale)) for length in (input_len, output_len)]
        times: dict[str, list[float]] = {name: [] for name in ENGINES}
        for repetition in range(args.repeat + 1):
            for name, engine in engines.items():
                seconds = engine.run(count, *lengths, seed=repetition)
                if repetition:  # the first one warms up
                    times[name].append(seconds)
        tokens = count * (lengths[1] if output_len > 1 else lengths[0])
        speeds = {name: tokens / statistics.median(times[name]) for name in ENGINES}
        milliseconds = [f"{statistics.median(times[name]) * 1e3:.1f}" for name in ENGINES]
        ratio = speeds["quire"] / speeds["transformers"]
        shape = f"{title}, {lengths[0]} in, {lengths[1]} out"
        rows.append([shape, *milliseconds, *(f"{speeds[name]:.1f}" for name in ENGINES), f"{ratio:.2f}"])
    columns = [f"{name} {unit}" for unit in ("ms", "tokens/s") for name in ENGINES]
    print_table(("workload", *columns, "ratio"), rows)
    for name, engine in engines.items():
        print(f"{name}: peak memory {engine.close() / 1e6:.0f} MB")


class Engine:
    """One engine in a child process, spoken to by lines of JSON."""

    def __init__(self, name: str, model: str, args: argparse.Namespace) -> None:
        words = [sys.executable, __file__, "--engine", name, "--model", model]
        words += ["--dtype", args.dtype, "--threads", str(args.threads)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, count: int, input_len: int, output_len: int, *, seed: int) -> float:
        """Generate for fresh prompts; return the seconds it took."""
        return float(self._ask([count, input_len, output_len, seed]))

    def close(self) -> float:
        """End the process; return the most memory it had, in bytes."""
        memory = float(self._ask([]))
        self._process.wait()
        return memory

    def _ask(self, question: list[int]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args[3]} ended: see above")  # type: ignore[index]
        return answer


def work(name: str, model: str, dtype: str, threads: int) -> None:
    """Be one engine: answer each line of standard input with the seconds it took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print goes to standard error
    generate, vocab_size = {"quire": load_quire, "transformers": load_transformers}[name](model, dtype, threads)
    import random

    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            print(peak_memory(), file=out, flush=True)
            return
        count, input_len, output_len, seed = question
        rng = random.Random(seed)
        prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(count)]
        started = time.perf_counter()
        generated = generate(prompts, output_len)
        seconds = time.perf_counter() - started
        assert generated == count * output_len, "an answer ended early"
        print(seconds, file=out, flush=True)


def load_quire(model: str, dtype: str, threads: int) -> tuple[Generate, int]:
    """Load Quire's offline engine, without the prefix cache."""
    from quire import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype=dtype,
        num_threads=threads,
        enable_prefix_caching=False,
        max_num_seqs=64,
        generation_config="none",
    )

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, json.loads(Path(model, "config.json").read_text())["vocab_size"]


def load_transformers(model: str, dtype: str, threads: int) -> tuple[Generate, int]:
    """Load the same checkpoint with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], output_len: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = loaded.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
            )
        return int(output[:, ids.shape[1] :].numel())

    return generate, loaded.config.vocab_size


def make_llama(folder: Path, shape: list[int], dtype: str) -> str:
    """Write a Llama with random weights and a tokenizer of made-up words; return its folder."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads = shape
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return str(folder)


if __name__ == "__main__":
    main()
