"""What `cpu_peers.py` prints: medians and ratios of the runs, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import print_table

from peers.workloads import MEASURES, OFFLINE, SERVED

OURS = "quire"


def median(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the median of a figure of the runs."""
    return statistics.median(run[key] for run in runs)


def ratios(values: Mapping[str, float], more_is_better: bool) -> dict[str, str]:
    """Return Quire's figure over each peer's, and over that of the best of them, marked by a star."""
    peers = {name: value for name, value in values.items() if name != OURS}
    cells = dict.fromkeys(values, "")
    if OURS in values and peers:
        best = (max if more_is_better else min)(peers, key=lambda name: peers[name])
        cells |= {name: f"{values[OURS] / value:.2f}{' *' if name == best else ''}" for name, value in peers.items()}
    return cells


def print_workload(name: str, title: str, results: Mapping[str, Any]) -> None:
    """Print a workload's table from the runs of each engine."""
    results = {engine: runs for engine, runs in results.items() if runs}
    if not results:
        return
    measure = MEASURES[OFFLINE[name].measure] if name in OFFLINE else MEASURES["output"]
    column = "value" if name in OFFLINE else "rate"
    values = {engine: median(runs, column) for engine, runs in results.items()}
    compared = ratios(values, measure.more_is_better)
    extra = {"W1": [("first token ms", "first")], "W2": [("first token ms", "first")]}.get(name, [])
    if name in SERVED:
        extra = [("first token ms", "ttft"), ("ms per token", "tpot")]
    rows = []
    for engine, runs in results.items():
        spread = f"{min(run[column] for run in runs):.4g}-{max(run[column] for run in runs):.4g}"
        cells = [engine, f"{values[engine]:.4g}", spread, compared[engine]]
        cells += [f"{1e3 * median(runs, key):.1f}" for _, key in extra]
        rows.append([*cells, str(len(runs)), f"{max(run['foreign'] for run in runs):.0%}"])
    better = "more" if measure.more_is_better else "less"
    print(f"{name}: {title}. Quire / peer, {better} is better; * is the best peer\n")
    header = ("engine", measure.unit, "range", "quire / peer", *(title for title, _ in extra), "runs", "others' CPU")
    print_table(header, rows)


def print_starts(title: str, engines: Mapping[str, Mapping[str, Any]]) -> None:
    """Print each engine's version, start and memory."""
    started = {name: entry for name, entry in engines.items() if "starts" in entry}
    compared = ratios({name: min(entry["starts"]) for name, entry in started.items()}, False)
    rows = []
    for name, entry in started.items():
        times = [f"{entry['starts'][0]:.2f}", f"{min(entry['starts']):.2f}", compared[name]]
        sizes = [f"{entry.get('memory', {}).get(key, 0) / 1e6:.0f}" for key in ("peak", "anonymous")]
        rows.append([name, *times, *sizes, entry.get("version", "")])
    if rows:
        print(f"{title}. Seconds from the start of the process to the first token; the ratio is of the best starts,")
        print("less is better. Peak: resident memory (VmHWM) with mapped files; anonymous: without (RssAnon)\n")
        header = ("engine", "first start s", "best start s", "quire / peer", "peak MB", "anonymous MB", "version")
        print_table(header, rows)
    for name, entry in engines.items():
        if "failed" in entry:
            print(f"{name} failed: {entry['failed']}\n")


def print_limit(run: Mapping[str, Any], bits: int) -> None:
    """Print which share of the machine's measured bandwidth one request's decoding makes use of."""
    runs = run["workloads"].get("W1", {}).get(OURS)
    if not runs:
        return
    limit = run["bandwidth"] / (run["parameters"] * bits / 8)
    share = median(runs, "value") / limit
    bandwidth, parameters = run["bandwidth"] / 1e9, run["parameters"] / 1e6
    print(f"Memory is read at {bandwidth:.1f} GB/s here and now. {parameters:.0f} M parameters of {bits} bits,")
    print(f"each read once a token, allow {limit:.1f} tokens/s at that; W1 of Quire reaches {share:.0%} of it\n")


def print_server_cost(workloads: Mapping[str, Mapping[str, Any]]) -> None:
    """Print how Quire's server compares with its offline engine."""
    offline, alone, served, served_alone = (workloads.get(name, {}).get(OURS) for name in ("W2", "W1", *SERVED))
    if offline and served:
        share = median(served, "rate") / median(offline, "value")
        print(f"Quire's server generates {share:.2f} times the tokens/s of W2 (more is better)")
    if alone and served_alone:
        ratio = median(served_alone, "tpot") * median(alone, "value")
        print(f"Quire's server takes {ratio:.2f} times as long as W1 for a token of one stream (less is better)\n")


def print_run(run: Mapping[str, Any], bits: int) -> None:
    """Print everything measured for one shape and precision."""
    print(f"\n## {run['shape']}, {run['precision']}\n")
    titles: dict[str, str] = {name: workload.title for name, workload in OFFLINE.items()} | SERVED
    for name, title in titles.items():
        print_workload(name, title, run["workloads"].get(name, {}))
        if name == "W1":
            print_limit(run, bits)
    print_server_cost(run["workloads"])
    print_starts("Start and memory", run["engines"])
    print_starts("Start and memory of the servers", run["servers"])
