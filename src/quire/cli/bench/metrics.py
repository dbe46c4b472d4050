"""From the results of a load test to the metrics that are reported, under the names that `vllm bench serve` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.cli.bench.load import RequestResult
from quire.errors import ConfigError

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "gap between pieces",
    "e2el": "end-to-end latency",
}
GOODPUT_NAMES = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Read limits such as "ttft:500" (milliseconds); several may stand in one text, separated by commas or spaces.

    Raises:
        ConfigError: names the pair.
    """
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        name, _, text = pair.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in GOODPUT_NAMES or not value >= 0:
            allowed = ", ".join(GOODPUT_NAMES)
            raise ConfigError(
                f"goodput: {pair!r} must be NAME:MILLISECONDS with NAME one of {allowed}", param="goodput"
            )
        limits[name] = value
    return limits


def parse_names(text: str) -> list[str]:
    """Read the comma-separated metrics to report. Raises `ConfigError`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                f"percentile_metrics: {name!r} is not one of {', '.join(NAMES)}", param="percentile_metrics"
            )
    return names


def parse_percentiles(text: str) -> list[float]:
    """Read comma-separated percentiles, 0..100. Raises `ConfigError`."""
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ConfigError(
            f"metric_percentiles: {text!r} must be numbers from 0 to 100, separated by commas",
            param="metric_percentiles",
        )
    return values


def times_of(results: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Return the samples of each metric, in seconds, over the results that succeeded."""
    good = [item for item in results if item.success]
    return {
        "ttft": [item.ttft for item in good],
        "tpot": [item.tpot for item in good if item.output_len > 1],
        "itl": [gap for item in good for gap in item.itls],
        "e2el": [item.latency for item in good],
    }


def summarize(
    results: Sequence[RequestResult],
    duration: float,
    *,
    limits: Mapping[str, float],
    names: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return the figures of one run.

    Args:
        duration: from the first request sent to the last response, in seconds.
        limits: what a request must keep to count for goodput, in milliseconds (DistServe, Zhong et al. 2024, sec. 1).
        names, percentiles: which metrics get statistics, and which percentiles of them.
    """
    good = [item for item in results if item.success]
    total_input = sum(item.prompt_len for item in good)
    total_output = sum(item.output_len for item in good)
    kept = sum(_keeps(item, limits) for item in good)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": kept / duration if limits else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    samples = times_of(results)
    for name in names:
        result |= _statistics(name, [value * 1e3 for value in samples[name]], percentiles)
    return result


def _keeps(item: RequestResult, limits: Mapping[str, float]) -> bool:
    measured = {"ttft": item.ttft, "tpot": item.tpot, "e2el": item.latency}
    return all(measured[name] * 1e3 <= limit for name, limit in limits.items())


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    samples = np.asarray(values or [0.0])
    result = {
        f"mean_{name}_ms": float(samples.mean()),
        f"median_{name}_ms": float(np.median(samples)),
        f"std_{name}_ms": float(samples.std()),
    }
    for percentile in percentiles:
        result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(samples, percentile))
    return result


def _peaks(results: Sequence[RequestResult]) -> tuple[float, int]:
    """Return the most tokens that arrived within one second of the run, and the most requests under way at once."""
    if not results:
        return 0.0, 0
    begin = min(item.start for item in results)
    arrivals = []
    for item in results:
        arrivals.append(item.start + item.ttft)
        arrivals.extend(item.start + item.ttft + np.cumsum(item.itls))
    tokens = np.bincount([int(when - begin) for when in arrivals])
    # Ends sort before starts at the same instant: a request that follows another does not overlap it.
    changes = sorted([(item.start, 1) for item in results] + [(item.start + item.latency, -1) for item in results])
    under_way = np.cumsum([change for _, change in changes])
    return float(tokens.max()), int(under_way.max())
