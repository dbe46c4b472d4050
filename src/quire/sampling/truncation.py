"""What the samplers that few requests ask for do to a batch: `filters` and `mirostat`, applied to their own rows.

A row's options are a `Truncation`; rows without one are never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.sampling.filters import NEG_INF, dynamic_temperature, exclude_top, probabilities, top_n_sigma, typical
from quire.sampling.mirostat import Mirostat
from quire.sampling.rng import uniforms
from quire.sampling_params import SamplingParams

XTC_PURPOSE = 1  # of random numbers, see `uniforms`


@dataclass(slots=True)
class Truncation:
    """Options of one row, as in `SamplingParams`; `low` and `high` bound a dynamic temperature, equal without one."""

    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    low: float
    high: float
    exponent: float
    mirostat: Mirostat | None = None

    @classmethod
    def of(cls, params: SamplingParams, state: float | None = None) -> Truncation | None:
        """Return what a request asks for, or None for nothing; `state` is what `Truncation.state` was before."""
        asked = (
            params.top_n_sigma > 0.0
            or params.typical_p < 1.0
            or params.xtc_probability > 0.0
            or params.dynatemp_range > 0.0
            or params.mirostat
        )
        if not asked:
            return None
        return cls(
            params.top_n_sigma,
            params.typical_p,
            params.xtc_probability,
            params.xtc_threshold,
            max(0.0, params.temperature - params.dynatemp_range),
            params.temperature + params.dynatemp_range,
            params.dynatemp_exponent,
            Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta, state) if params.mirostat else None,
        )

    def copy(self) -> Truncation:
        """Return what a fork of the sequence begins with."""
        twin = Truncation(
            self.top_n_sigma,
            self.typical_p,
            self.xtc_probability,
            self.xtc_threshold,
            self.low,
            self.high,
            self.exponent,
        )
        twin.mirostat = None if self.mirostat is None else self.mirostat.copy()
        return twin

    @property
    def state(self) -> float | None:
        """What must be kept of the row from token to token: mirostat's mu."""
        return None if self.mirostat is None else self.mirostat.mu


@dataclass(slots=True)
class Lesson:
    """What mirostat learns of the token that is drawn for row `row`, from the logits [V] it is drawn from."""

    row: int
    mirostat: Mirostat
    logits: np.ndarray
    temperature: float

    def learn(self, token: int) -> None:
        """Take in the token."""
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = (self.logits.astype(np.float64) - float(self.logits.max())) / self.temperature
            norm = np.log(np.exp(scaled).sum())
        self.mirostat.learn(float(norm - scaled[token]) / math.log(2.0))


def truncate(
    logits: np.ndarray,
    options: Sequence[Truncation],
    temperature: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, list[Lesson]]:
    """Apply each row's options to float32 logits [n, V].

    Args:
        temperature, seeds, positions: of the rows [n], see `SamplingBatch`.

    Returns:
        The logits to draw from, the temperatures [n] to draw with, and lessons with row numbers in 0..n-1.
    """
    sigma, mass, chance, threshold = (
        np.array([getattr(item, name) for item in options], dtype=np.float64)
        for name in ("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold")
    )
    if sigma.any():
        logits = top_n_sigma(logits, sigma)
    if (mass < 1.0).any():
        rows = np.flatnonzero(mass < 1.0)
        logits[rows] = typical(logits[rows], mass[rows])
    if chance.any():
        chosen = uniforms(seeds, positions, XTC_PURPOSE) < chance
        rows = np.flatnonzero(chosen)
        logits[rows] = exclude_top(logits[rows], threshold[rows], chosen[rows])
    dynamic = np.array([index for index, item in enumerate(options) if item.high > item.low], dtype=np.int64)
    if dynamic.size:
        low, high, exponent = (
            np.array([getattr(options[index], name) for index in dynamic.tolist()])
            for name in ("low", "high", "exponent")
        )
        temperature = temperature.copy()
        found = dynamic_temperature(logits[dynamic], low, high, exponent)
        temperature[dynamic] = np.nan_to_num(found, nan=1.0)
    lessons = []
    for row, item in enumerate(options):
        if item.mirostat is not None:
            heat = float(temperature[row]) or 1e-6  # a dynamic temperature can reach 0
            kept = item.mirostat.keep(probabilities(logits[row : row + 1], np.array([heat]))[0])
            logits[row, ~kept] = NEG_INF
            lessons.append(Lesson(row, item.mirostat, logits[row], heat))
    return logits, temperature, lessons
