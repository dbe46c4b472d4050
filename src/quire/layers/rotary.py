"""Rotary position embeddings: tables of cosines and sines for every type of context extension ("rope scaling").

A paged cache holds keys that were rotated once, by their position. So each position has one rotation, whatever the
length of its sequence, and two types differ from libraries that recompute frequencies as a sequence grows:
"dynamic" takes the base that fits `max_len`, "longrope" takes the long factors if `max_len` exceeds the original
context, the short ones otherwise. With `max_len` at the original context (the default, see `ModelInfo.max_model_len`)
both are exact for every sequence; with a longer one they are exact for sequences that reach `max_len` (dynamic) or
exceed the original context (longrope).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quire.checkpoint.rope import RopeParameters
from quire.kernels.backend import Array, Backend, HeadNorms, KVCache


class RotaryEmbedding:
    """Rotates queries and keys by their position; layers with equal parameters share it.

    Dimension i is rotated with dimension i + rotary_dim / 2, or if `interleaved` dimension 2 i with 2 i + 1.
    """

    def __init__(
        self, backend: Backend, rope: RopeParameters, head_size: int, max_len: int, *, interleaved: bool = False
    ) -> None:
        self.backend, self.head_size, self.interleaved = backend, head_size, interleaved
        self.cos_sin = backend.from_numpy(cos_sin_table(rope, max_len))
        self.query_scales = None
        if rope.query_growth:
            scales = 1 + rope.query_growth * np.log1p(np.arange(max_len) // rope.original_max_position_embeddings)
            self.query_scales = backend.from_numpy(scales.astype(np.float32).reshape(-1, 1))

    def __call__(self, positions: Array, q: Array, k: Array) -> None:
        """Rotate q [T, Hq*D] and k [T, Hkv*D] in place."""
        self.backend.rotary_embedding(positions, q, k, self.cos_sin, self.head_size, self.interleaved)
        self._scale(positions, q)

    def write(
        self,
        positions: Array,
        q: Array,
        k: Array,
        v: Array,
        cache: KVCache,
        slot_mapping: Array,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Array]:
        """Rotate q and k in place, after norms if there are any, store k and v in a layer's cache; return q and k."""
        q, k = self.backend.rotary_write_kv(
            positions, q, k, v, self.cos_sin, self.head_size, self.interleaved, cache, slot_mapping, norms
        )
        self._scale(positions, q)
        return q, k

    def _scale(self, positions: Array, q: Array) -> None:
        if self.query_scales is not None:
            q *= self.backend.take_rows(self.query_scales, positions)


def rotary_embeddings(
    backend: Backend, ropes: Sequence[RopeParameters], head_size: int, max_len: int, *, interleaved: bool = False
) -> list[RotaryEmbedding]:
    """Return one for each layer; layers with equal parameters share one."""
    made = {
        rope: RotaryEmbedding(backend, rope, head_size, max_len, interleaved=interleaved)
        for rope in dict.fromkeys(ropes)
    }
    return [made[rope] for rope in ropes]


def cos_sin_table(rope: RopeParameters, max_len: int) -> np.ndarray:
    """Return float32 [max_len, rotary_dim]: cosines of the angles, then sines, both times the attention scaling.

    Angles are products of float32 numbers, as in training code; at large positions their rounding matters.
    """
    frequencies = inverse_frequencies(rope, max_len).astype(np.float32)
    angles = np.outer(np.arange(max_len, dtype=np.float32), frequencies)
    half = angles.shape[1]
    table = np.empty((max_len, 2 * half), np.float32)
    np.cos(angles, out=table[:, :half])
    np.sin(angles, out=table[:, half:])
    table *= np.float32(attention_scaling(rope))
    return table


def inverse_frequencies(rope: RopeParameters, max_len: int) -> np.ndarray:
    """Return the angle per position of each rotated pair, float64 [rotary_dim / 2]."""
    exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
    plain = rope.theta**-exponents
    match rope.rope_type:
        case "linear":  # Chen et al. 2023: positions divided by the factor
            return plain / rope.factor
        case "dynamic":
            return _dynamic_base(rope, max_len) ** -exponents
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":  # Ding et al. 2024: one searched factor per frequency
            beyond = max_len > rope.original_max_position_embeddings
            return plain / np.array(rope.long_factor if beyond else rope.short_factor)
    return plain


def attention_scaling(rope: RopeParameters) -> float:
    """Return the factor of cos and sin that keeps the spread of attention logits over longer contexts."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "yarn":  # Peng et al. 2023, section 3.4
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)
    if rope.rope_type == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
    return 1.0


def _dynamic_base(rope: RopeParameters, max_len: int) -> float:
    """NTK-aware base for sequences of `max_len`; theta itself as long as they fit the trained context."""
    trained = rope.max_position_embeddings
    if max_len <= trained:
        return rope.theta
    stretch = rope.factor * max_len / trained - (rope.factor - 1)
    return rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(rope: RopeParameters, plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: high frequencies stay, low ones are divided by the factor, those between are blended."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)  # full turns over the original context
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: RopeParameters, plain: np.ndarray) -> np.ndarray:
    """YaRN (Peng et al. 2023, section 3.2): high frequencies stay, low ones are divided by the factor, with a ramp."""
    size = rope.rotary_dim

    def dimension(turns: float) -> float:
        """Dimension whose wave makes so many turns over the original context."""
        context = rope.original_max_position_embeddings
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
