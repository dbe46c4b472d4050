"""What a request asks of its logits beyond temperature, top-k, top-p and min-p.

Most requests ask for nothing here and have no `Extras`, so that the common step pays nothing.
"""

from __future__ import annotations

import copy

import numpy as np

from quire.kernels.backend import NEG_INF
from quire.sampling_params import SamplingParams


class Extras:
    """Logit changes of one request, prepared once: biases, barred and allowed tokens, penalties, logprobs.

    Attributes:
        num_logprobs, num_prompt_logprobs: alternatives per position, or None.
        allowed: bool [V] mask of the only tokens that may be sampled, or None.
        has_penalties: whether `prompt_mask` (bool [V]) and `output_counts` (int32 [V]) are kept.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        token_ids: list[int],
        num_prompt_tokens: int,
        stop_ids: list[int],
        bad_words_ids: list[list[int]],
        vocab_size: int,
    ) -> None:
        self.num_logprobs = params.logprobs
        self.num_prompt_logprobs = params.prompt_logprobs
        self.min_tokens = params.min_tokens if stop_ids else 0
        self.stop_ids = np.array(sorted(set(stop_ids)), dtype=np.int64)
        self.bad_words = [words for words in bad_words_ids if words]
        bias = params.logit_bias or {}
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias_values = np.array(list(bias.values()), dtype=np.float32)
        self.allowed: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            self.allowed = np.zeros(vocab_size, dtype=bool)
            self.allowed[params.allowed_token_ids] = True
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.has_penalties = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        if self.has_penalties:
            self.prompt_mask = np.zeros(vocab_size, dtype=bool)
            self.prompt_mask[token_ids[:num_prompt_tokens]] = True
            self.output_counts = np.bincount(
                np.array(token_ids[num_prompt_tokens:], dtype=np.int64), minlength=vocab_size
            ).astype(np.int32)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        token_ids: list[int],
        num_prompt_tokens: int,
        stop_ids: list[int],
        bad_words_ids: list[list[int]],
        vocab_size: int,
    ) -> Extras | None:
        """Return the request's extras, or None if it asks for nothing beyond plain sampling."""
        extras = cls(
            params,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            stop_ids=stop_ids,
            bad_words_ids=bad_words_ids,
            vocab_size=vocab_size,
        )
        return extras if extras.asks_for_anything else None

    def fork(self) -> Extras | None:
        """Return what a copy of the sequence has: counts of its own, and no log-probabilities of the prompt again."""
        twin = copy.copy(self)
        twin.num_prompt_logprobs = None
        if self.has_penalties:
            twin.output_counts = self.output_counts.copy()
        return twin if twin.asks_for_anything else None

    @property
    def asks_for_anything(self) -> bool:
        """Whether this goes beyond plain sampling."""
        wants_logprobs = self.num_logprobs is not None or self.num_prompt_logprobs is not None
        return wants_logprobs or self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether anything here alters the logits."""
        return bool(
            self.has_penalties or self.min_tokens or self.bad_words or self.bias_ids.size or self.allowed is not None
        )

    def count(self, token_id: int) -> None:
        """Note a generated token, for the penalties."""
        if self.has_penalties:
            self.output_counts[token_id] += 1

    def biases(self, output_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids int64 [E], values float32 [E]) to add to the logits, given the tokens generated so far."""
        barred = [words[-1] for words in self.bad_words if _ends_with(output_ids, words[:-1])]
        if len(output_ids) < self.min_tokens:
            barred.extend(self.stop_ids.tolist())
        if not barred:
            return self.bias_ids, self.bias_values
        ids = np.concatenate([self.bias_ids, np.array(barred, dtype=np.int64)])
        return ids, np.concatenate([self.bias_values, np.full(len(barred), NEG_INF, dtype=np.float32)])


def _ends_with(ids: np.ndarray, tail: list[int]) -> bool:
    return len(ids) >= len(tail) and ids[len(ids) - len(tail) :].tolist() == tail
