"""From logits to tokens: applies each row's options in a fixed order and draws with (seed, position) keyed numbers.

Order: raw log-probabilities are taken first (they describe the model, not the options); then what a grammar allows,
allowed tokens, biases and barred tokens, penalties; then temperature, top-k, min-p, top-p and the draw, which are one
backend op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.kernels.backend import Array, Backend, TopLogprobs
from quire.sampling.extras import Extras
from quire.sampling.rng import uniforms
from quire.step import TokenTopLogprobs


class Bitmask(NamedTuple):
    """What grammars leave of the vocabulary: for places `rows` int64 [P] of the batch, `bits` int32 [P, words].

    See `Backend.apply_bitmask`.
    """

    rows: np.ndarray
    bits: np.ndarray


@dataclass(slots=True)
class SamplingBatch:
    """The options of R rows, as numpy arrays of that length.

    `positions` are the sequence positions the sampled tokens will take. `extras[r]` is None for most rows;
    `output_ids[r]` (tokens generated so far) is only read where extras are present. `mask` is None where no row has a
    grammar.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    extras: list[Extras | None]
    output_ids: list[np.ndarray]
    mask: Bitmask | None = None


@dataclass(slots=True)
class Sampled:
    """Chosen tokens int64 [R]; logprobs per row where asked for.

    Tokens are of no meaning where logits are not finite, and -1 where a grammar and other options leave none.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenTopLogprobs]


class Sampler:
    """Samples one token per row on a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def sample(self, logits: Array, batch: SamplingBatch) -> Sampled:
        """Sample from `logits` float32 [R, V], which may be overwritten."""
        wanting = [r for r, extras in enumerate(batch.extras) if extras is not None and extras.num_logprobs is not None]
        raw = logits[self.backend.from_numpy(np.array(wanting, dtype=np.int64))] if wanting else None
        if batch.mask is not None:
            self.backend.apply_bitmask(logits, batch.mask.rows, batch.mask.bits)
        self._apply_extras(logits, batch)
        empty = None if batch.mask is None else ~self.backend.to_numpy(self.backend.rows_finite(logits))
        tokens = self.backend.sample(
            logits,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            uniforms(batch.seeds, batch.positions) if batch.temperature.any() else np.zeros(len(batch.seeds)),
        )
        if empty is not None:
            tokens = np.where(empty, -1, tokens)
        return Sampled(tokens, self._logprobs(raw, wanting, np.maximum(tokens, 0), batch.extras))

    def _apply_extras(self, logits: Array, batch: SamplingBatch) -> None:
        rows = [(r, extras) for r, extras in enumerate(batch.extras) if extras is not None and extras.changes_logits]
        if not rows:
            return
        masked = [(r, extras.allowed) for r, extras in rows if extras.allowed is not None]
        if masked:
            self.backend.keep_only(logits, _ids([r for r, _ in masked]), np.stack([mask for _, mask in masked]))
        biases = [(r, *extras.biases(batch.output_ids[r])) for r, extras in rows]
        if any(ids.size for _, ids, _ in biases):
            self.backend.add_bias(
                logits,
                np.concatenate([np.full(ids.size, r, dtype=np.int64) for r, ids, _ in biases]),
                np.concatenate([ids for _, ids, _ in biases]),
                np.concatenate([values for _, _, values in biases]),
            )
        penalized = [(r, extras) for r, extras in rows if extras.has_penalties]
        if penalized:
            self.backend.apply_penalties(
                logits,
                _ids([r for r, _ in penalized]),
                np.stack([extras.prompt_mask for _, extras in penalized]),
                np.stack([extras.output_counts for _, extras in penalized]),
                np.array([extras.repetition for _, extras in penalized], dtype=np.float32),
                np.array([extras.presence for _, extras in penalized], dtype=np.float32),
                np.array([extras.frequency for _, extras in penalized], dtype=np.float32),
            )

    def _logprobs(
        self, raw: Array | None, wanting: list[int], tokens: np.ndarray, extras: list[Extras | None]
    ) -> dict[int, TokenTopLogprobs]:
        if raw is None:
            return {}
        numbers = [extra.num_logprobs or 0 for extra in (extras[r] for r in wanting) if extra is not None]
        top = self.backend.top_logprobs(raw, tokens[wanting], max(numbers))
        return {r: pack_logprobs(top, i, numbers[i]) for i, r in enumerate(wanting)}


def pack_logprobs(top: TopLogprobs, row: int, k: int) -> TokenTopLogprobs:
    """Return row `row` of `top` with the chosen token and the k best."""
    return TokenTopLogprobs(
        top.token_ids[row, : k + 1].tolist(), top.logprobs[row, : k + 1].tolist(), int(top.ranks[row])
    )


def _ids(rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)
