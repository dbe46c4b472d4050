"""Time to first token of a long prompt: cold, after a restart with the disk tier, and after one without it.

    python benchmarks/disk_restart.py [--model quire-demo] [--length 8000] [--repeat 3] [--json FILE]
    python benchmarks/disk_restart.py --model FOLDER --load-format dummy     # FOLDER needs a config.json only

Every engine is a process of its own, which first says a token to another prompt. Before an engine is started, the files
of the disk tier are written out and dropped from the system's cache, so that they are read from the disk; with
--from-memory they may come from that cache, as after a restart of the engine but not of the machine. All engines of a
repetition must give the same token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import print_header, print_table

SPARE = 8  # tokens of the context that stay free
WARM_UP = 64  # tokens of the other prompt


def main() -> None:
    """Measure in turns; print a table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--length", type=int, default=8000, help="tokens of the prompt, or what the context holds")
    parser.add_argument("--space", default="8GiB", help="kv_disk_space")
    parser.add_argument("--folder", type=Path, help="where the disk tier is made, if not among temporary files")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any engine option")
    parser.add_argument("--from-memory", action="store_true", help="leave the files in the system's cache")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return answer(json.loads(args.child), args.length)
    options = {"model": args.model, "load_format": args.load_format, "skip_tokenizer_init": True}
    for text in args.option:
        name, _, value = text.partition("=")
        options[name.replace("-", "_")] = int(value) if value.isdecimal() else value
    run(options, args.length)  # kernels may have to be compiled
    rounds = [one_round(options, args) for _ in range(args.repeat)]
    report(rounds, args)
    return None


def one_round(options: dict[str, Any], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what the three engines say, by their names."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        disk = {**options, "kv_disk_space": args.space, "kv_disk_dir": folder}
        cold = run(disk, args.length)
        if not args.from_memory:
            drop_from_cache(Path(folder))
        found = {"cold": cold, "restart, disk tier": run(disk, args.length)}
    found["restart, no disk tier"] = run(options, args.length)
    if len({item["token"] for item in found.values()}) > 1:
        raise SystemExit(f"the engines do not agree: {found}")
    return found


def run(options: dict[str, Any], length: int) -> dict[str, Any]:
    """Start an engine for one answer and end it in order."""
    command = [sys.executable, __file__, "--length", str(length), "--child", json.dumps(options)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def answer(options: dict[str, Any], length: int) -> None:
    """Say one token to the prompt, in a process of its own; print what it took."""
    import numpy as np

    from quire import LLM, SamplingParams

    one = SamplingParams(temperature=0.0, max_tokens=1)
    rng = np.random.default_rng(0)
    with LLM(**options) as llm:
        length = min(length, llm.max_model_len - SPARE)
        prompt = rng.integers(10, llm.vocab_size, length).tolist()
        other = rng.integers(10, llm.vocab_size, min(WARM_UP, length)).tolist()
        llm.generate({"prompt_token_ids": other}, one, use_tqdm=False)
        [output] = llm.generate({"prompt_token_ids": prompt}, one, use_tqdm=False)
        times = output.metrics
        assert times.first_token_time is not None
        found = {
            "seconds": times.first_token_time - times.arrival_time,
            "length": length,
            "cached": output.num_cached_tokens,
            "token": output.outputs[0].token_ids[0],
        }
    print(json.dumps(found))


def drop_from_cache(folder: Path) -> None:
    """Write the files of `folder` out and let the system forget what it holds of them in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def report(rounds: list[dict[str, dict[str, Any]]], args: argparse.Namespace) -> None:
    """Print medians, and each round's ratio; write them as JSON if asked."""
    names = list(rounds[0])
    print_header(f"Time to first token after a restart, {Path(args.model).name}, {rounds[0]['cold']['length']} tokens")
    rows = []
    for name in names:
        seconds = statistics.median(one[name]["seconds"] for one in rounds)
        ratio = statistics.median(one[name]["seconds"] / one["cold"]["seconds"] for one in rounds)
        rows.append([name, f"{seconds * 1000:.0f}", str(rounds[0][name]["cached"]), f"{ratio:.1%}"])
    print_table((f"median of {len(rounds)}", "ms", "tokens cached", "of cold"), rows)
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=2) + "\n")


if __name__ == "__main__":
    main()
