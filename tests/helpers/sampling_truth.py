"""What each sampling option does to a distribution, written plainly from its definition, in float64 and Python loops.

`distribution` gives the probability of each token that a request would draw next, and `chi_square` says how well
counted draws agree with it. Nothing here shares code with the sampler.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.sampling_params import SamplingParams

OUT = -math.inf


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of logits; -inf is impossible."""
    top = max(logits)
    weights = np.array([math.exp(x - top) if x > OUT else 0.0 for x in logits])
    return weights / weights.sum()


def dry_penalties(params: SamplingParams, text: list[int], breakers: list[list[int]]) -> dict[int, float]:
    """What DRY takes off which tokens: by comparing the end of the text with every place before, token by token."""
    size = len(text)
    start = 0 if params.dry_penalty_last_n == -1 else max(0, size - params.dry_penalty_last_n)
    usable = size - start
    for end in range(start, size):
        for breaker in breakers:
            if end - len(breaker) + 1 >= start and text[end - len(breaker) + 1 : end + 1] == breaker:
                usable = size - 1 - end
    taken: dict[int, float] = {}
    for place in range(start, size - 1):
        length = 0
        while length < usable and place - length >= start and text[place - length] == text[size - 1 - length]:
            length += 1
        if length >= params.dry_allowed_length:
            amount = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            follower = text[place + 1]
            taken[follower] = max(taken.get(follower, 0.0), amount)
    return taken


def penalize(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    """Repetition, presence and frequency penalties, in place."""
    for token in range(len(logits)):
        if token in prompt or token in output:
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        if token in output:
            logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)


def keep_typical(logits: np.ndarray, mass: float) -> None:
    """Drop what is not among the tokens of the most ordinary surprise that together have `mass`."""
    probs = softmax(logits)
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    order = sorted((i for i in range(len(probs)) if probs[i] > 0), key=lambda i: abs(-math.log(probs[i]) - entropy))
    total = 0.0
    for token in order:
        if total >= mass:
            logits[token] = OUT
        total += probs[token]


def exclude_top(logits: np.ndarray, threshold: float) -> None:
    """Drop all tokens of at least this probability but the least likely of them."""
    probs = softmax(logits)
    likely = sorted((i for i in range(len(probs)) if probs[i] >= threshold), key=lambda i: (-probs[i], i))
    for token in likely[:-1]:
        logits[token] = OUT


def keep_nucleus(logits: np.ndarray, params: SamplingParams) -> None:
    """Top-k, min-p, top-p, in this order, on logits over temperature."""
    order = sorted((i for i in range(len(logits)) if logits[i] > OUT), key=lambda i: -logits[i])
    kept = [i for i in order if params.top_k <= 0 or logits[i] >= logits[order[min(params.top_k, len(order)) - 1]]]
    probs = softmax(logits)
    kept = [i for i in kept if probs[i] >= params.min_p * max(probs)]
    if params.top_p < 1:
        whole, total, few = sum(probs[i] for i in kept), 0.0, []
        for token in kept:
            if total >= params.top_p * whole:
                break
            few.append(token)
            total += probs[token]
        kept = few
    for token in order:
        if token not in kept:
            logits[token] = OUT


def keep_mirostat(logits: np.ndarray, version: int, mu: float) -> None:
    """What mirostat leaves of logits over temperature, when most surprise allowed is `mu` bits."""
    probs = softmax(logits)
    order = sorted((i for i in range(len(probs)) if probs[i] > 0), key=lambda i: (-probs[i], i))
    if version == 2:
        kept = [i for i in order if -math.log2(probs[i]) <= mu] or order[:1]
    else:
        few = [probs[i] for i in order[:100]]
        top = sum(math.log((i + 2) / (i + 1)) * math.log(few[i] / few[i + 1]) for i in range(len(few) - 1))
        bottom = sum(math.log((i + 2) / (i + 1)) ** 2 for i in range(len(few) - 1))
        s = top / bottom
        excess = s - 1
        k = (excess * 2**mu / (1 - len(logits) ** -excess)) ** (1 / s)
        kept = order[: max(1, int(k))]
    for token in order:
        if token not in kept:
            logits[token] = OUT


def temperature_of(logits: np.ndarray, params: SamplingParams) -> float:
    """The temperature, made dynamic if asked."""
    if params.dynatemp_range == 0:
        return params.temperature
    probs = softmax(logits)
    entropy = -sum(p * math.log(p) for p in probs if p > 0)
    share = entropy / math.log(sum(x > OUT for x in logits))
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    return low + (high - low) * share**params.dynatemp_exponent


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    *,
    stop_ids: list[int] | None = None,
    breakers: list[list[int]] | None = None,
    mu: float | None = None,
) -> np.ndarray:
    """Return the probability of each token to be drawn next, float64 [V]."""
    logits = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(logits)):
            logits[token] = logits[token] if token in params.allowed_token_ids else OUT
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[stop_ids or []] = OUT
    penalize(logits, params, prompt, output)
    if params.dry_multiplier:
        for token, amount in dry_penalties(params, prompt + output, breakers or []).items():
            logits[token] -= amount
    if params.top_n_sigma > 0:
        there = logits[logits > OUT]
        logits[logits < there.max() - params.top_n_sigma * there.std()] = OUT
    if params.typical_p < 1:
        keep_typical(logits, params.typical_p)
    without = logits.copy()
    exclude_top(without, params.xtc_threshold)
    chance = params.xtc_probability
    return (1 - chance) * _drawn(logits, params, mu) + chance * _drawn(without, params, mu)


def _drawn(logits: np.ndarray, params: SamplingParams, mu: float | None) -> np.ndarray:
    if params.temperature < 1e-5:
        return np.eye(len(logits))[int(np.argmax(logits))]
    logits = logits / temperature_of(logits, params)
    if params.mirostat:
        keep_mirostat(logits, params.mirostat, 2 * params.mirostat_tau if mu is None else mu)
    keep_nucleus(logits, params)
    return softmax(logits)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return how likely draws at least as far from `probs` as `counts` are, if they follow it (Pearson 1900).

    0 if anything impossible was drawn. Tokens expected fewer than five times count together.
    """
    total = counts.sum()
    if counts[probs == 0].any():
        return 0.0
    expected = probs * total
    often = expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    hoped = np.append(expected[often], expected[~often].sum())
    seen, hoped = seen[hoped > 0], hoped[hoped > 0]
    if len(hoped) < 2:
        return 1.0
    statistic = float(((seen - hoped) ** 2 / hoped).sum())
    freedom = (len(hoped) - 1) / 2
    return float(torch.special.gammaincc(torch.tensor(freedom, dtype=torch.float64), torch.tensor(statistic / 2)))
