"""Mirostat: keeps the surprise of a text near a target by choosing, token by token, how many tokens to draw from.

"Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (Basu et al. 2021): algorithm 1 is
version 1, algorithm 2 version 2. Its memory is one number per sequence, mu, which begins at twice the target.
"""

from __future__ import annotations

import math

import numpy as np

ESTIMATED_TOKENS = 100  # the likeliest ones, from which version 1 estimates Zipf's exponent
MOST_BITS = 1000.0  # 2 ** -1000 is still a number


class Mirostat:
    """The memory and options of one sequence.

    Attributes:
        version: 1 or 2. tau: target surprise in bits. eta: learning rate. mu: most surprise allowed now, in bits.
    """

    __slots__ = ("eta", "mu", "tau", "version")

    def __init__(self, version: int, tau: float, eta: float, mu: float | None = None) -> None:
        self.version = version
        self.tau = tau
        self.eta = eta
        self.mu = 2.0 * tau if mu is None else mu

    def copy(self) -> Mirostat:
        """Return what a fork of the sequence begins with."""
        return Mirostat(self.version, self.tau, self.eta, self.mu)

    def keep(self, probs: np.ndarray) -> np.ndarray:
        """Return bool [V]: the tokens to draw from, given the probabilities float64 [V] after temperature.

        At least the likeliest is among them, and no impossible one is.
        """
        if self.version == 1:
            return self._keep_by_rank(probs)
        kept = probs >= 2.0 ** -min(max(self.mu, 0.0), MOST_BITS)
        kept[np.argmax(probs)] = True
        return kept

    def _keep_by_rank(self, probs: np.ndarray) -> np.ndarray:
        size = len(probs)
        few = min(ESTIMATED_TOKENS, size)
        ranked = np.sort(np.partition(probs, size - few)[size - few :])[::-1]
        count = most_tokens(ranked, size, self.mu)
        least = np.partition(probs, size - count)[size - count]
        kept = probs > least
        kept[np.flatnonzero(probs == least)[: count - int(kept.sum())]] = True  # of equals, the first
        kept &= probs > 0.0
        kept[np.argmax(probs)] = True
        return kept

    def learn(self, surprise: float) -> None:
        """Correct mu by the surprise, in bits, that the token drawn had among those kept."""
        if math.isfinite(surprise):  # otherwise the row is of no meaning, and its sequence ends
            self.mu -= self.eta * (surprise - self.tau)


def most_tokens(ranked: np.ndarray, vocab_size: int, mu: float) -> int:
    """Return how many of the likeliest tokens have a mean surprise of about `mu` (algorithm 1, eq. 30).

    Args:
        ranked: falling probabilities of the likeliest tokens, from which Zipf's exponent is estimated.
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
