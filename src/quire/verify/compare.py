"""Where two sides part: largest errors, and the first attention layer that sees something else.

Errors are relative to the largest expected value. Scores of queries and keys are compared rather than these themselves,
since a head's values may lie in another order on each side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.verify.oracle import LayerTrace


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest expected value; infinity where shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        error = np.abs(actual.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Relative errors of one attention layer: what it stores of a token, its scores, and what came out.

    `first_scores` are those of the first token with itself, which no rotation changes.
    """

    layer: int
    values: float
    scores: float
    first_scores: float
    output: float

    def worst(self) -> float:
        """The largest."""
        return max(self.values, self.scores, self.output)


def layer_errors(ours: list[LayerTrace], theirs: list[LayerTrace]) -> list[LayerErrors]:
    """Compare layer by layer."""
    found = []
    for layer, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        our_scores, their_scores = scores_of(our), scores_of(their)
        width = their.values.shape[2]  # a cache may pad values
        found.append(
            LayerErrors(
                layer,
                relative_error(our.values[..., :width], their.values),
                relative_error(our_scores, their_scores),
                relative_error(our_scores[:, :1, :1], their_scores[:, :1, :1]),
                relative_error(our.output[..., :width], their.output),
            )
        )
    return found


def scores_of(trace: LayerTrace) -> np.ndarray:
    """Return queries times keys of each head, zero above the diagonal, [Hq, T, T]."""
    keys = np.repeat(trace.keys, trace.queries.shape[1] // trace.keys.shape[1], axis=1)
    return np.tril(np.einsum("qhd,khd->hqk", trace.queries, keys))


def first_difference(errors: list[LayerErrors], tolerance: float) -> str | None:
    """Say in a sentence which layer differs first and in what; None where none does."""
    for at in errors:
        if at.worst() <= tolerance:
            continue
        if at.values > tolerance and at.scores > tolerance:
            return f"layer {at.layer}: queries, keys and values differ: {_before(at.layer)}"
        if at.values > tolerance:
            return f"layer {at.layer}: values differ, scores agree: the value projection"
        if at.scores > tolerance and at.first_scores <= tolerance:
            return (
                f"layer {at.layer}: scores differ from the second token on, values agree: rotary positions "
                "(rope_theta, rope_scaling, how much of a head is rotated)"
            )
        if at.scores > tolerance:
            return (
                f"layer {at.layer}: scores differ, values agree: query and key projections, their norms, or the scale"
            )
        return f"layer {at.layer}: scores and values agree, attention's output differs: window, mask, softcap or sinks"
    return None


def _before(layer: int) -> str:
    if layer == 0:
        return "the embedding, the first norm, or the projections"
    return f"what layer {layer - 1} adds after its attention (output projection, feed-forward layer), or norms"
