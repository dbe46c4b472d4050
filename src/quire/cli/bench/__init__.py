"""`quire bench`: latency, throughput and quality of the offline engine, and a load generator for servers.

The result files have the keys of `vllm bench`, so that what reads those reads these, except those of `quality`, which
it lacks. What is measured, and how, stands in the module of each benchmark.
"""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.bench import latency, quality, serve, throughput
from quire.cli.flags import add_debug_flag

BENCHMARKS = {
    "latency": (latency.COMMAND, "time of one batch"),
    "throughput": (throughput.COMMAND, "tokens per second of many requests"),
    "quality": (quality.COMMAND, "perplexity with quantized weights and caches"),
    "serve": (serve.COMMAND, "a running server under load"),
}


class BenchCommand:
    """The command whose first argument names a benchmark, which is a command itself."""

    def add_parser(self, subparsers: Any, prog: str, summary: str) -> None:
        """Register the command and its benchmarks."""
        parser: argparse.ArgumentParser = subparsers.add_parser(
            prog.split()[-1], help=summary, description="Measure an engine or a server."
        )
        add_debug_flag(parser)
        benchmarks = parser.add_subparsers(dest="kind", metavar="KIND", title="kinds", required=True)
        for name, (command, text) in BENCHMARKS.items():
            command.add_parser(benchmarks, f"{prog} {name}", text)

    def main(self, args: argparse.Namespace) -> int:
        """Run one benchmark."""
        return BENCHMARKS[args.kind][0].main(args)


COMMAND = BenchCommand()
