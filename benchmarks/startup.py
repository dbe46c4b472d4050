"""From the command to the first token: `quire generate` and `quire serve` started again and again; imports; disk.

The time runs from before the process is made until the first byte of output. The first start may compile kernels and
is reported by itself; the others are what users meet every day.

    python benchmarks/startup.py [--model quire-demo] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

from common import print_header, print_table

IMPORTS = ("quire", "quire.cli.main", "quire.frontend.llm", "quire.server.run")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    print_header(f"Start-up, {Path(args.model).name}")
    first = first_byte(args.model, args.prompt)
    others = [first_byte(args.model, args.prompt) for _ in range(args.repeat)]
    rows = [["first token, first start", f"{first:.2f}"]]
    rows.append([f"first token, median of {args.repeat} more", f"{statistics.median(others):.2f}"])
    served = [first_served_token(args.model, args.prompt) for _ in range(args.repeat)]
    for what, seconds in zip(("ready", "first streamed token"), zip(*served, strict=True), strict=True):
        rows.append([f"serve, {what}, median of {args.repeat}", f"{statistics.median(seconds):.2f}"])
    rows += [[f"import {name}", f"{import_time(name, args.repeat):.3f}"] for name in IMPORTS]
    rows.append(["python -c pass", f"{import_time('sys', args.repeat):.3f}"])
    print_table(("what", "seconds"), rows)
    print(f"site-packages: {folder_bytes(Path(sysconfig.get_path('purelib'))) / 1e6:.0f} MB")


def first_byte(model: str, prompt: str) -> float:
    """Start `quire generate` for one token; return the seconds until something is on its standard output."""
    words = [sys.executable, "-m", "quire", "generate", model, "--prompt", prompt, "--max-tokens", "1"]
    started = time.perf_counter()
    with subprocess.Popen([*words, "--temperature", "0", "--ignore-eos"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit("quire generate failed: see above")
    return seconds


def first_served_token(model: str, prompt: str) -> tuple[float, float]:
    """Start `quire serve`; return the seconds until it says ready, and until the first event of a stream."""
    words = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--log-level", "error"]
    started = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split("url=")[1].strip()
            name = process.stdout.readline().split("model=")[1].strip()
            ready = time.perf_counter() - started
            body = json.dumps({"model": name, "prompt": prompt, "max_tokens": 8, "stream": True}).encode()
            request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as response:
                response.readline()
                return ready, time.perf_counter() - started
        finally:
            process.terminate()


def import_time(module: str, repeat: int) -> float:
    """Return the median seconds of an interpreter that imports `module` and ends."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main()
