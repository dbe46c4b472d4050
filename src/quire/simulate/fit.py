"""Fits a `FittedCost` to measured steps: non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.simulate.contents import StepContents
from quire.simulate.cost import DEVICE_FEATURES, HOST_FEATURES, token_weights

TOLERANCE = 1e-10
FAR_OFF = 0.1  # relative error from which a step counts less
NUM_REWEIGHTED = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """A step, how long it took [s], and the name of its workload."""

    contents: StepContents
    seconds: float
    workload: str = ""


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return x >= 0 that minimizes |matrix @ x - target|.

    The active-set method of Lawson and Hanson (1974, chapter 23). Columns are scaled to length one, so that seconds
    per byte and seconds per step are treated alike; a column of zeros gets 0.

    Args:
        matrix: float64 [M, N]. target: float64 [M].
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    count = scaled.shape[1]
    solution = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    threshold = TOLERANCE * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= threshold:
            break
        passive[best] = True
        solution = _descend(scaled, target, solution, passive, best)
    return np.where(lengths > 0, solution / np.where(lengths > 0, lengths, 1.0), 0.0)


def _descend(
    matrix: np.ndarray, target: np.ndarray, solution: np.ndarray, passive: np.ndarray, entered: int
) -> np.ndarray:
    """Move to the least squares solution over the passive columns, giving up those that would turn negative."""
    while passive.any():
        trial = np.zeros_like(solution)
        trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
        negative = passive & (trial <= 0)
        if not negative.any():
            return trial
        if negative[entered] and solution[entered] == 0:
            passive[entered] = False  # rounding: by its gradient it should have grown
            continue
        steps = solution[negative] / (solution[negative] - trial[negative])
        solution = solution + float(steps.min()) * (trial - solution)
        passive &= solution > TOLERANCE
        solution[~passive] = 0.0
    return np.zeros_like(solution)


def fit_device(
    steps: Sequence[Measured], sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Return knots, their seconds, and the rates of `DEVICE_FEATURES`, for `steps` that all have tokens.

    Of `sizes` those become knots that some step had as its number of tokens.
    """
    seen = {step.contents.num_tokens for step in steps}
    knots = tuple(size for size in sizes if size in seen) or (max(seen),)
    rows = [
        [*token_weights(step.contents.num_tokens, knots), *_values(step.contents, DEVICE_FEATURES)] for step in steps
    ]
    coefficients = _fit(rows, steps)
    return knots, tuple(coefficients[: len(knots)]), tuple(coefficients[len(knots) :])


def fit_host(steps: Sequence[Measured]) -> tuple[float, tuple[float, ...]]:
    """Return seconds per step and the rates of `HOST_FEATURES`."""
    coefficients = _fit([[1.0, *_values(step.contents, HOST_FEATURES)] for step in steps], steps)
    return coefficients[0], tuple(coefficients[1:])


def _values(contents: StepContents, names: Sequence[str]) -> list[float]:
    return [float(getattr(contents, name)) for name in names]


def _fit(rows: list[list[float]], steps: Sequence[Measured]) -> list[float]:
    """Fit with every step weighted so that one per cent counts alike, however short it is.

    Steps far off count less each time (iteratively reweighted least squares, with Huber's weights): something else was
    running on the machine.
    """
    seconds = np.array([step.seconds for step in steps])
    matrix = np.array(rows) / seconds[:, None]
    weights = np.ones(len(steps))
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(NUM_REWEIGHTED):
        coefficients = nnls(matrix * weights[:, None], weights)
        off = np.abs(matrix @ coefficients - 1.0)
        weights = np.sqrt(np.minimum(1.0, FAR_OFF / np.maximum(off, 1e-12)))
    return [float(value) for value in coefficients]
