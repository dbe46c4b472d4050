"""From the answers of a load test to the figures that are reported, under the names that `vllm bench serve` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.cli.bench.load import Answer
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


def times_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Return the samples of each metric, in seconds, over the answers that succeeded."""
    good = [answer for answer in answers if answer.success]
    return {
        "ttft": [answer.ttft for answer in good],
        "tpot": [answer.tpot for answer in good if answer.output_len > 1],
        "itl": [gap for answer in good for gap in answer.itls],
        "e2el": [answer.latency for answer in good],
    }


def summarize(
    answers: Sequence[Answer],
    duration: float,
    *,
    limits: Mapping[str, float],
    names: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Return the figures of one run.

    Args:
        duration: from the first request sent to the last answer, in seconds.
        limits: what a request must keep to count for goodput, in milliseconds (DistServe, Zhong et al. 2024, sec. 1).
        names, percentiles: which metrics get statistics, and which percentiles of them.
    """
    good = [answer for answer in answers if answer.success]
    total_input = sum(answer.prompt_len for answer in good)
    total_output = sum(answer.output_len for answer in good)
    kept = sum(_keeps(answer, limits) for answer in good)
    peak_tokens, peak_requests = _peaks(good)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "request_goodput": kept / duration if limits else None,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }
    samples = times_of(answers)
    for name in names:
        result |= _statistics(name, [value * 1e3 for value in samples[name]], percentiles)
    return result


def _keeps(answer: Answer, limits: Mapping[str, float]) -> bool:
    measured = {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.latency}
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


def _peaks(answers: Sequence[Answer]) -> tuple[float, int]:
    """Return the most tokens that arrived within one second of the run, and the most requests under way at once."""
    if not answers:
        return 0.0, 0
    begin = min(answer.start for answer in answers)
    arrivals = []
    for answer in answers:
        arrivals.append(answer.start + answer.ttft)
        arrivals.extend(answer.start + answer.ttft + np.cumsum(answer.itls))
    tokens = np.bincount([int(when - begin) for when in arrivals])
    # Ends sort before starts at the same instant: a request that follows another does not overlap it.
    changes = sorted(
        [(answer.start, 1) for answer in answers] + [(answer.start + answer.latency, -1) for answer in answers]
    )
    under_way = np.cumsum([change for _, change in changes])
    return float(tokens.max()), int(under_way.max())
