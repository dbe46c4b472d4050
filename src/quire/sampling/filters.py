"""Which tokens stay, and how hot a row is drawn: numpy functions on rows of logits, float32 [n, V].

Each takes one value per row for each of its options, returns new logits with -inf where a token falls out, and leaves
at least one token in every row that has any. Logits of -inf have fallen out before and count for nothing. All look at
the distribution before temperature, as llama.cpp does, where temperature comes last; top-k, min-p and top-p, which
`Backend.sample` has, come after it. Probabilities are float64.

Rows with NaN or +inf give rows of no meaning, and no error: the caller drops them.
"""

from __future__ import annotations

import numpy as np

NEG_INF = np.float32(-np.inf)
RARE = 2.0**-20  # a probability


def probabilities(logits: np.ndarray, temperature: np.ndarray | None = None) -> np.ndarray:
    """Return softmax(logits / temperature) of each row, float64 [n, V]; temperatures float [n] are above 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        if temperature is not None:
            shifted /= temperature[:, None]
        weights = np.exp(shifted, out=shifted)
        weights /= weights.sum(axis=1, keepdims=True)
    return weights


def surprises(probs: np.ndarray) -> np.ndarray:
    """Return -log(p) in nats, +inf for what cannot happen."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return -np.log(probs)


def entropies(probs: np.ndarray) -> np.ndarray:
    """Return the entropy of each row [n] in nats."""
    surprise = surprises(probs)
    surprise[probs == 0.0] = 0.0
    return (probs * surprise).sum(axis=1)


def top_n_sigma(logits: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Keep tokens whose logit is within n standard deviations of the largest one.

    "Top-n-sigma: Not All Logits Are You Need" (Tang et al. 2024, alg. 1; llama.cpp pull request 11223). The deviation
    is that of the logits that are still there. n 0 keeps everything.
    """
    there = logits > NEG_INF
    count = np.maximum(there.sum(axis=1, keepdims=True), 1)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.where(there, logits, 0.0).astype(np.float64)
        mean = values.sum(axis=1, keepdims=True) / count
        variance = (np.where(there, values - mean, 0.0) ** 2).sum(axis=1, keepdims=True) / count
        lowest = logits.max(axis=1, keepdims=True) - n[:, None] * np.sqrt(variance)
        keep = (logits >= lowest) | (n == 0.0)[:, None]
    return np.where(keep, logits, NEG_INF)


def typical(logits: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Keep the fewest tokens that together have probability `mass`, those of the most ordinary surprise first.

    "Locally Typical Sampling" (Meister et al. 2022, eq. 9 and 10): tokens go in the order of how far their surprise is
    from the row's entropy; of equals the lower id goes first. mass 1 keeps everything.
    """
    probs = probabilities(logits)
    entropy = entropies(probs)
    keep = np.ones(logits.shape, dtype=bool)
    for row in np.flatnonzero(mass < 1.0).tolist():
        likely = np.flatnonzero(probs[row] >= RARE)  # mostly they decide, and they are few
        if not _keep_typical(keep[row], probs[row], likely, entropy[row], mass[row], -np.log(RARE) - entropy[row]):
            _keep_typical(keep[row], probs[row], np.flatnonzero(probs[row] > 0.0), entropy[row], mass[row], np.inf)
    return np.where(keep, logits, NEG_INF)


def _keep_typical(
    keep: np.ndarray, probs: np.ndarray, among: np.ndarray, entropy: float, mass: float, farthest: float
) -> bool:
    """Set `keep` bool [V] to the most typical of the tokens `among`; False if others may be more so.

    Args:
        farthest: all others are at least so far from the entropy.
    """
    distance = np.abs(surprises(probs[among]) - entropy)
    order = np.argsort(distance, kind="stable")
    summed = np.cumsum(probs[among[order]])
    count = 1 + int((summed < mass).sum())
    if farthest < np.inf and (count > len(among) or distance[order[count - 1]] >= farthest):
        return False
    keep[:] = False
    keep[among[order[:count]]] = True
    return True


def exclude_top(logits: np.ndarray, threshold: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """XTC: of the tokens with at least probability `threshold`, keep the least likely one only.

    "Exclude Top Choices" (text-generation-webui pull request 6335; llama.cpp pull request 9742): nothing happens where
    fewer than two tokens are that likely, nor in rows where `chosen`, bool [n], is False. Of equals the one with the
    highest id stays.
    """
    probs = probabilities(logits)
    likely = probs >= threshold[:, None]
    size = logits.shape[1]
    least = np.where(likely, probs, np.inf)
    stays = size - 1 - np.argmin(least[:, ::-1], axis=1)  # the last of the least likely
    likely[np.arange(len(logits)), stays] = False
    return np.where(likely & chosen[:, None], NEG_INF, logits)


def dynamic_temperature(logits: np.ndarray, low: np.ndarray, high: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Return each row's temperature, float64 [n]: `low` where the model is sure, `high` where it knows nothing.

    Entropy-based dynamic temperature (llama.cpp pull request 4972): low + (high - low) * (entropy / log(count)) **
    exponent, where count is the number of tokens that are still there.
    """
    count = (logits > NEG_INF).sum(axis=1)
    most = np.log(np.maximum(count, 2))
    with np.errstate(invalid="ignore"):
        share = np.clip(entropies(probabilities(logits)) / most, 0.0, 1.0)
        return low + (high - low) * share**exponent
