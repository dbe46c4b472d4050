"""`quire bench`: latency, throughput and quality of the offline engine, and a load generator for servers.

The result files have the keys of `vllm bench`, so that what reads those reads these, except those of `quality`, which
it lacks. What is measured, and how, stands in the module of each benchmark.
"""

from __future__ import annotations

import argparse
from typing import Any

from quire.cli.bench import latency, quality, serve, throughput

KINDS = {"latency": latency, "throughput": throughput, "quality": quality, "serve": serve}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command and its kinds."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure latency, throughput, quality, or a running server",
        description="Measure an engine or a server.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", title="kinds", required=True)
    for module in KINDS.values():
        module.add_parser(kinds)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one benchmark."""
    return KINDS[args.kind].run(args)
