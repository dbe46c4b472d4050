"""Summarizes a `RunLog`: latencies, goodput, hit rates, queues; as a mapping for JSON, as text, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.simulate.driver import Record, RunLog
from quire.simulate.run import SimulatedRun

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "second", "tpot", "e2e")
COLUMNS: dict[str, Callable[[Record], Any]] = {
    "number": lambda record: record.request.number,
    "tenant": lambda record: record.request.tenant,
    "priority": lambda record: record.request.priority,
    "prompt_tokens": lambda record: record.request.num_prompt_tokens,
    "output_tokens": lambda record: record.request.num_output_tokens,
    "arrival": lambda record: record.request.arrival,
    "first_scheduled": lambda record: record.first_scheduled,
    "first_token": lambda record: record.first_token,
    "finish": lambda record: record.finish,
    "generated": lambda record: record.num_generated,
    "cached": lambda record: record.num_cached,
    "preemptions": lambda record: record.num_preemptions,
    "error": lambda record: record.error,
}


def summarize(log: RunLog, *, slo_ttft: float | None = None, slo_tpot: float | None = None) -> dict[str, Any]:
    """Return the figures of one replay: times in seconds, rates per second, shares from 0 to 1.

    Args:
        slo_ttft, slo_tpot: most seconds that a request may take to be counted as good (DistServe, Zhong et al. 2024,
            section 1); a request that failed is not.
    """
    good = [record for record in log.records if record.finish is not None and record.error is None]
    duration = max(log.duration, 1e-12)
    prompt = sum(record.request.num_prompt_tokens for record in good)
    output = sum(record.num_generated for record in good)
    result: dict[str, Any] = {
        "requests": len(log.records),
        "completed": len(good),
        "failed": len(log.records) - len(good),
        "duration": log.duration,
        "request_throughput": len(good) / duration,
        "prompt_throughput": prompt / duration,
        "output_throughput": output / duration,
        **_latencies(good),
        "goodput": _goodput(good, len(log.records), duration, slo_ttft, slo_tpot),
        "cache": _cache(log),
        "preemptions": log.stats.num_preemptions,
        "swapped_out": log.stats.num_swapped_out,
        "steps": log.stats.num_steps,
        "tokens_per_step": log.stats.num_scheduled_tokens / max(log.stats.num_steps, 1),
        "running": {"mean": log.running / duration, "max": log.max_running},
        "waiting": {"mean": log.waiting / duration, "max": log.max_waiting},
        "kv_usage": {"mean": log.usage / duration, "max": log.max_usage},
    }
    tenants = sorted({record.request.tenant for record in log.records})
    if len(tenants) > 1:
        result["tenants"] = {
            tenant: _latencies([record for record in good if record.request.tenant == tenant]) for tenant in tenants
        }
    return result


def summarize_run(run: SimulatedRun, **limits: float | None) -> dict[str, Any]:
    """Return `summarize` of a simulated replay, and what only that knows."""
    result = summarize(run.log, **limits)
    result["utilization"] = run.executor.busy_seconds / max(run.log.duration, 1e-12)
    result["new_shapes"] = run.executor.num_new_shapes
    for name in ("num_blocks", "block_size", "max_model_len"):
        result[name] = getattr(run.ready, name)
    return result


def _latencies(records: Sequence[Record]) -> dict[str, dict[str, float] | None]:
    latencies: dict[str, dict[str, float] | None] = {}
    for name in LATENCIES:
        values = [value for record in records if (value := getattr(record, name)) is not None]
        latencies[name] = _statistics(values)
    return latencies


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles, or None of nothing."""
    if not values:
        return None
    points = np.percentile(values, PERCENTILES)
    return {
        "mean": float(np.mean(values)),
        **{f"p{name}": float(point) for name, point in zip(PERCENTILES, points, strict=True)},
        "max": float(max(values)),
    }


def _goodput(
    good: Sequence[Record], total: int, duration: float, slo_ttft: float | None, slo_tpot: float | None
) -> dict[str, float] | None:
    """Return which share of all requests met both limits, and how many did a second; None without limits."""
    if slo_ttft is None and slo_tpot is None:
        return None
    kept = 0
    for record in good:
        misses_ttft = slo_ttft is not None and record.ttft is not None and record.ttft > slo_ttft
        misses_tpot = slo_tpot is not None and record.tpot is not None and record.tpot > slo_tpot
        kept += not misses_ttft and not misses_tpot
    return {"share": kept / max(total, 1), "rate": kept / duration}


def _cache(log: RunLog) -> dict[str, float]:
    """Return hit rates as shares of the prompt tokens looked up, by the tier that had them."""
    stats = log.stats
    queries = max(stats.prefix_cache_queries, 1)
    below = stats.host_cache_hits + stats.disk_cache_hits
    return {
        "queried_tokens": stats.prefix_cache_queries,
        "hit_rate": stats.prefix_cache_hits / queries,
        "device_hit_rate": (stats.prefix_cache_hits - below) / queries,
        "host_hit_rate": stats.host_cache_hits / queries,
        "disk_hit_rate": stats.disk_cache_hits / queries,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the figures of `summarize_run` as text."""
    cache = result["cache"]
    lines = [
        f"{result['completed']} of {result['requests']} requests completed in {result['duration']:.3f} s "
        f"({result['steps']} steps of {result['tokens_per_step']:.1f} tokens)",
        "",
        _row("milliseconds", ["mean", *(f"p{name}" for name in PERCENTILES), "max"]),
    ]
    names = {
        "ttft": "time to first token",
        "second": "from that to the second",
        "tpot": "time per output token after it",
        "e2e": "arrival to end",
    }
    for name, words in names.items():
        lines.append(_row(words, _milliseconds(result[name])))
    for tenant, latencies in result.get("tenants", {}).items():
        for name in ("ttft", "e2e"):
            lines.append(_row(f"  {tenant or '(no tenant)'}: {name}", _milliseconds(latencies[name])))
    rows: list[tuple[str, str]] = [
        ("requests per second", f"{result['request_throughput']:.3f}"),
        ("prompt tokens per second", f"{result['prompt_throughput']:.1f}"),
        ("output tokens per second", f"{result['output_throughput']:.1f}"),
    ]
    if result["goodput"] is not None:
        share, rate = result["goodput"]["share"], result["goodput"]["rate"]
        rows.append(("within the limits", f"{share:.1%} of requests, {rate:.3f} per second"))
    rows.append(("prompt tokens found in the cache", f"{cache['hit_rate']:.2%}"))
    if cache["host_hit_rate"] or cache["disk_hit_rate"]:
        tiers = (f"{tier} {cache[tier + '_hit_rate']:.2%}" for tier in ("device", "host", "disk"))
        rows.append(("  by tier", ", ".join(tiers)))
    rows.append(("preemptions, of these swapped out", f"{result['preemptions']}, {result['swapped_out']}"))
    for name, words in (("running", "sequences running"), ("waiting", "requests waiting")):
        rows.append((f"{words}, mean and most", f"{result[name]['mean']:.2f}, {result[name]['max']}"))
    usage = result["kv_usage"]
    rows.append(
        (f"of {result['num_blocks']} KV blocks in use, mean and most", f"{usage['mean']:.1%}, {usage['max']:.1%}")
    )
    rows.append(("share of the time in steps", f"{result['utilization']:.1%}"))
    return "\n".join([*lines, "", *(f"  {words:<44}{value}" for words, value in rows)])


def _milliseconds(statistics: Mapping[str, float] | None) -> list[str]:
    names = ("mean", *(f"p{name}" for name in PERCENTILES), "max")
    return ["-"] * len(names) if statistics is None else [f"{statistics[name] * 1e3:.2f}" for name in names]


def _row(words: str, cells: Sequence[str]) -> str:
    return f"  {words:<32}" + "".join(f"{cell:>13}" for cell in cells)


def as_csv(records: Sequence[Record]) -> str:
    """Return one line per request; times in seconds, empty where it did not come to that."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records:
        cells = (value(record) for value in COLUMNS.values())
        writer.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in cells])
    return text.getvalue()
