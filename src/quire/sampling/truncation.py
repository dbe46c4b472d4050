"""The samplers of llama.cpp that most requests leave off, as numpy functions on rows of logits, float32 [n, V].

`truncate` applies them. Each filter takes one value per row for each of its options and returns logits with -inf where
a token is removed; at least one token stays in every row that has any, and removed ones (-inf) count for nothing. They
read the distribution before temperature, as in llama.cpp, where temperature comes last; top-k, min-p and top-p, which
are part of `Backend.sample`, come after it. Probabilities are float64.

Rows with NaN or +inf give meaningless rows and no error: the caller drops them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.sampling.rng import uniforms
from quire.sampling_params import SamplingParams

NEG_INF = np.float32(-np.inf)
RARE = 2.0**-20  # a probability below which a token seldom decides what is typical
ZIPF_TOKENS = 100  # the most likely ones, from which mirostat 1 estimates Zipf's exponent
MAX_BITS = 1000.0  # 2 ** -1000 is still a number
XTC_PURPOSE = 1  # of random numbers, see `uniforms`


@dataclass(slots=True)
class Truncation:
    """The options of one sequence, of which some are on, and its state."""

    params: SamplingParams
    mirostat: Mirostat | None = None

    @classmethod
    def of(cls, params: SamplingParams, state: float | None = None) -> Truncation | None:
        """Return the truncation of a request, None where all are off; `state` continues from a `Truncation.state`."""
        mirostat = None
        if params.mirostat:
            mirostat = Mirostat(params.mirostat, params.mirostat_tau, params.mirostat_eta, state)
        is_on = (
            params.top_n_sigma > 0.0
            or params.typical_p < 1.0
            or params.xtc_probability > 0.0
            or params.dynatemp_range > 0.0
            or params.mirostat
        )
        return cls(params, mirostat) if is_on else None

    def copy(self) -> Truncation:
        """Return an independent copy, for a fork."""
        return Truncation(self.params, copy.copy(self.mirostat))

    @property
    def state(self) -> float | None:
        """What must survive a preemption: mirostat's mu."""
        return None if self.mirostat is None else self.mirostat.mu


@dataclass(slots=True)
class MirostatUpdate:
    """The correction of mu by the token that will be sampled in row `row`, from `logits` [V]."""

    row: int
    mirostat: Mirostat
    logits: np.ndarray
    temperature: float

    def apply(self, token: int) -> None:
        """Correct mu by the surprise of the sampled token."""
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = (self.logits.astype(np.float64) - float(self.logits.max())) / self.temperature
            norm = np.log(np.exp(scaled).sum())
        self.mirostat.update(float(norm - scaled[token]) / math.log(2.0))


def truncate(
    logits: np.ndarray,
    rows: Sequence[Truncation],
    temperature: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, list[MirostatUpdate]]:
    """Apply each row's options to float32 logits [n, V].

    Args:
        temperature, seeds, positions: of the rows [n], see `SamplingMetadata`.

    Returns:
        The logits to draw from, the temperatures [n] to draw with, and updates with row numbers in 0..n-1.
    """
    options = [row.params for row in rows]
    sigma, mass, chance, threshold = (
        np.array([getattr(params, name) for params in options], dtype=np.float64)
        for name in ("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold")
    )
    if sigma.any():
        logits = top_n_sigma(logits, sigma)
    if (mass < 1.0).any():
        on = np.flatnonzero(mass < 1.0)
        logits[on] = typical(logits[on], mass[on])
    if chance.any():
        chosen = uniforms(seeds, positions, XTC_PURPOSE) < chance
        on = np.flatnonzero(chosen)
        logits[on] = exclude_top(logits[on], threshold[on], chosen[on])
    dynamic = [(index, params) for index, params in enumerate(options) if params.dynatemp_range > 0.0]
    if dynamic:
        on = np.array([index for index, _ in dynamic])
        found = dynamic_temperature(
            logits[on],
            np.array([max(0.0, params.temperature - params.dynatemp_range) for _, params in dynamic]),
            np.array([params.temperature + params.dynatemp_range for _, params in dynamic]),
            np.array([params.dynatemp_exponent for _, params in dynamic]),
        )
        temperature = temperature.copy()
        temperature[on] = np.nan_to_num(found, nan=1.0)
    updates = []
    for index, row in enumerate(rows):
        if row.mirostat is not None:
            nonzero = float(temperature[index]) or 1e-6  # a dynamic temperature can reach 0
            keep = row.mirostat.keep(probabilities(logits[index : index + 1], np.array([nonzero]))[0])
            logits[index, ~keep] = NEG_INF
            updates.append(MirostatUpdate(index, row.mirostat, logits[index], nonzero))
    return logits, temperature, updates


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
    """Return -log(p) in nats, +inf for p = 0."""
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
    is that of the remaining logits. n 0 keeps everything.
    """
    remaining = logits > NEG_INF
    count = np.maximum(remaining.sum(axis=1, keepdims=True), 1)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.where(remaining, logits, 0.0).astype(np.float64)
        mean = values.sum(axis=1, keepdims=True) / count
        variance = (np.where(remaining, values - mean, 0.0) ** 2).sum(axis=1, keepdims=True) / count
        lowest = logits.max(axis=1, keepdims=True) - n[:, None] * np.sqrt(variance)
        keep = (logits >= lowest) | (n == 0.0)[:, None]
    return np.where(keep, logits, NEG_INF)


def typical(logits: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Keep the fewest tokens that together have probability `mass`, the most typical first.

    "Locally Typical Sampling" (Meister et al. 2022, eq. 9 and 10): tokens are ordered by the distance of their surprise
    from the row's entropy; of equals the lower id comes first. mass 1 keeps everything.
    """
    probs = probabilities(logits)
    entropy = entropies(probs)
    keep = np.ones(logits.shape, dtype=bool)
    for row in np.flatnonzero(mass < 1.0).tolist():
        likely = np.flatnonzero(probs[row] >= RARE)  # these few decide almost always
        if not _keep_typical(keep[row], probs[row], likely, entropy[row], mass[row], -np.log(RARE) - entropy[row]):
            _keep_typical(keep[row], probs[row], np.flatnonzero(probs[row] > 0.0), entropy[row], mass[row], np.inf)
    return np.where(keep, logits, NEG_INF)


def _keep_typical(
    keep: np.ndarray, probs: np.ndarray, among: np.ndarray, entropy: float, mass: float, farthest: float
) -> bool:
    """Set `keep` bool [V] to the most typical of the tokens `among`; return False if others may be more typical.

    Args:
        farthest: the least distance of any other token from the entropy.
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

    "Exclude Top Choices" (text-generation-webui pull request 6335; llama.cpp pull request 9742): rows where fewer
    than two tokens are that likely stay as they are, and so do those where `chosen`, bool [n], is False. Of equals the
    one with the highest id stays.
    """
    probs = probabilities(logits)
    likely = probs >= threshold[:, None]
    size = logits.shape[1]
    least = np.where(likely, probs, np.inf)
    stays = size - 1 - np.argmin(least[:, ::-1], axis=1)  # the last of the least likely
    likely[np.arange(len(logits)), stays] = False
    return np.where(likely & chosen[:, None], NEG_INF, logits)


def dynamic_temperature(logits: np.ndarray, low: np.ndarray, high: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """Return each row's temperature, float64 [n]: from `low` at entropy 0 to `high` at the largest entropy.

    Entropy-based dynamic temperature (llama.cpp pull request 4972): low + (high - low) * (entropy / log(count)) **
    exponent, where count is the number of remaining tokens.
    """
    count = (logits > NEG_INF).sum(axis=1)
    most = np.log(np.maximum(count, 2))
    with np.errstate(invalid="ignore"):
        share = np.clip(entropies(probabilities(logits)) / most, 0.0, 1.0)
        return low + (high - low) * share**exponent


class Mirostat:
    """Keeps the surprise of a text near a target by choosing, token by token, how many tokens to sample from.

    "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (Basu et al. 2021): algorithm 1 is
    version 1, algorithm 2 version 2.

    Attributes:
        version: 1 or 2. tau: target surprise in bits. eta: learning rate.
        mu: the most surprise allowed now, in bits: the state, which begins at twice the target.
    """

    __slots__ = ("eta", "mu", "tau", "version")

    def __init__(self, version: int, tau: float, eta: float, mu: float | None = None) -> None:
        self.version = version
        self.tau = tau
        self.eta = eta
        self.mu = 2.0 * tau if mu is None else mu

    def keep(self, probs: np.ndarray) -> np.ndarray:
        """Return bool [V]: the tokens to sample from, given the probabilities float64 [V] after temperature.

        The most likely one is always among them, one of probability 0 never.
        """
        if self.version == 1:
            return self._keep_by_rank(probs)
        kept = probs >= 2.0 ** -min(max(self.mu, 0.0), MAX_BITS)
        kept[np.argmax(probs)] = True
        return kept

    def _keep_by_rank(self, probs: np.ndarray) -> np.ndarray:
        size = len(probs)
        sample_size = min(ZIPF_TOKENS, size)
        ranked = np.sort(np.partition(probs, size - sample_size)[size - sample_size :])[::-1]
        count = mirostat_top_k(ranked, size, self.mu)
        least = np.partition(probs, size - count)[size - count]
        kept = probs > least
        kept[np.flatnonzero(probs == least)[: count - int(kept.sum())]] = True  # of equals, the first
        kept &= probs > 0.0
        kept[np.argmax(probs)] = True
        return kept

    def update(self, surprise: float) -> None:
        """Correct mu by the surprise, in bits, of the sampled token among those kept."""
        if math.isfinite(surprise):  # otherwise the row is meaningless, and its sequence ends with an error
            self.mu -= self.eta * (surprise - self.tau)


def mirostat_top_k(ranked: np.ndarray, vocab_size: int, mu: float) -> int:
    """Return how many of the most likely tokens have a mean surprise of about `mu` (algorithm 1, eq. 30).

    Args:
        ranked: probabilities of the most likely tokens in falling order, from which Zipf's exponent is estimated.
    """
    ranked = ranked[ranked > 0.0]
    if len(ranked) < 2:
        return 1
    rank = np.arange(1, len(ranked), dtype=np.float64)
    steps = np.log((rank + 1.0) / rank)
    falls = np.log(ranked[:-1] / ranked[1:])
    exponent = float((steps * falls).sum() / (steps * steps).sum())
    if exponent <= 0.0:
        return vocab_size  # all equally likely: no number of tokens is too many
    excess = exponent - 1.0
    # (excess * 2^mu / (1 - N^-excess)) ^ (1 / exponent), by logarithms; its limit at excess 0 has 1 / log(N).
    if abs(excess) < 1e-9:
        scale = 1.0 / math.log(vocab_size) if vocab_size > 1 else 1.0
    else:
        scale = excess / -math.expm1(-excess * math.log(vocab_size)) if vocab_size > 1 else 1.0
    logarithm = (math.log(scale) + mu * math.log(2.0)) / exponent
    if logarithm >= math.log(vocab_size):
        return vocab_size
    return max(1, int(math.exp(logarithm)))
