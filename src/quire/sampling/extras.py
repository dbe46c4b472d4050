"""What a request asks of its logits beyond temperature, top-k, top-p and min-p.

Most requests ask for nothing here and have no `Extras`, so that the common step pays nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import numpy as np

from quire.kernels.backend import NEG_INF
from quire.sampling.dry import Breakers, Dry
from quire.sampling.processors import LogitsProcessorFactory, Processors
from quire.sampling.seen import SeenTokens
from quire.sampling.truncation import Truncation
from quire.sampling_params import SamplingParams


class Extras:
    """Logit changes of one request, prepared once: biases, barred and allowed tokens, penalties, logprobs.

    Attributes:
        num_logprobs, num_prompt_logprobs: alternatives per position, or None; -1 is the whole vocabulary.
        logprob_ids: int64 ids whose log-probabilities are given instead of the likeliest ones', or None.
        prompt_logprob_start: first prompt position that is scored.
        allowed: bool [V] mask of the only tokens that may be sampled, or None.
        seen: the tokens that penalties go by, or None without penalties.
        dry, processors, truncation: those of rows that ask for them.
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
        dry_breakers: Breakers = (),
        sampler_state: float | None = None,
        factories: Mapping[str, LogitsProcessorFactory] | None = None,
    ) -> None:
        self.num_logprobs = params.logprobs
        self.num_prompt_logprobs = params.prompt_logprobs
        self.prompt_logprob_start = params.prompt_logprob_start or 0
        self.logprob_ids: np.ndarray | None = None
        if params.logprob_token_ids is not None:
            self.logprob_ids = np.array(params.logprob_token_ids, dtype=np.int64)
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
        self.seen: SeenTokens | None = None
        if self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0:
            self.seen = SeenTokens(token_ids, num_prompt_tokens, vocab_size)
        self.truncation = Truncation.of(params, sampler_state)
        self.dry: Dry | None = None
        if params.dry_multiplier > 0.0:
            self.dry = Dry(
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed_length=params.dry_allowed_length,
                last_n=params.dry_penalty_last_n,
                breakers=dry_breakers,
                token_ids=token_ids,
                vocab_size=vocab_size,
            )
        self.processors: Processors | None = None
        if params.logits_processors:
            shared = params.extra_args or {}
            wanted = [(item.name, {**shared, **item.args}) for item in params.logits_processors]
            self.processors = Processors(wanted, factories or {}, token_ids[:num_prompt_tokens], vocab_size)

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
        dry_breakers: Breakers = (),
        sampler_state: float | None = None,
        factories: Mapping[str, LogitsProcessorFactory] | None = None,
    ) -> Extras | None:
        """Return the request's extras, or None if it asks for nothing beyond plain sampling.

        Args:
            token_ids: prompt, and what was generated of the output. stop_ids, bad_words_ids, dry_breakers,
                sampler_state: as in `NewSequenceData`. factories: of logits processors, by name.
        """
        extras = cls(
            params,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            stop_ids=stop_ids,
            bad_words_ids=bad_words_ids,
            vocab_size=vocab_size,
            dry_breakers=dry_breakers,
            sampler_state=sampler_state,
            factories=factories,
        )
        return extras if extras.asks_for_anything else None

    def fork(self) -> Extras | None:
        """Return what a copy of the sequence has: counts of its own, and no log-probabilities of the prompt again."""
        twin = copy.copy(self)
        twin.num_prompt_logprobs = None
        if self.seen is not None:
            twin.seen = self.seen.copy()
        if self.dry is not None:
            twin.dry = self.dry.copy()
        if self.processors is not None:
            twin.processors = self.processors.copy()
        if self.truncation is not None:
            twin.truncation = self.truncation.copy()
        return twin if twin.asks_for_anything else None

    @property
    def asks_for_anything(self) -> bool:
        """Whether this goes beyond plain sampling."""
        return self.wants_logprobs or self.num_prompt_logprobs is not None or self.changes_logits

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of output tokens are asked for."""
        return self.num_logprobs is not None or self.logprob_ids is not None

    @property
    def needs_host(self) -> bool:
        """Whether the host must see logits, or the last token, before a token is drawn."""
        return self.truncation is not None or self.dry is not None or self.processors is not None

    @property
    def state(self) -> float | None:
        """What `ModelOutput.sampler_states` is to say of the sequence; None for nothing."""
        return None if self.truncation is None else self.truncation.state

    @property
    def changes_logits(self) -> bool:
        """Whether anything here alters the logits."""
        return bool(
            self.seen is not None
            or self.min_tokens
            or self.bad_words
            or self.bias_ids.size
            or self.allowed is not None
            or self.truncation is not None
            or self.dry is not None
            or self.processors is not None
        )

    def count(self, token_id: int) -> None:
        """Note a generated token, for the penalties."""
        if self.seen is not None:
            self.seen.add(token_id)
        if self.dry is not None:
            self.dry.add(token_id)

    def biases(self, output_ids: np.ndarray, *, late: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids int64 [E], values float32 [E]) to add to the logits, given the tokens generated so far.

        Where the last one is `late`, not known yet, it may bar `later` ones beside these.
        """
        barred = [words[-1] for words in self.bad_words if _ends_with(output_ids, words[:-1], late)]
        if len(output_ids) < self.min_tokens:
            barred.extend(self.stop_ids.tolist())
        if not barred:
            return self.bias_ids, self.bias_values
        ids = np.concatenate([self.bias_ids, np.array(barred, dtype=np.int64)])
        return ids, np.concatenate([self.bias_values, np.full(len(barred), NEG_INF, dtype=np.float32)])

    def later(self, output_ids: np.ndarray) -> list[tuple[int, int]]:
        """Return (last token, what must not follow it) of bad words that the text is one late token away from."""
        return [
            (words[-2], words[-1])
            for words in self.bad_words
            if len(words) > 1 and _ends_with(output_ids[:-1], words[:-2])
        ]


def _ends_with(ids: np.ndarray, tail: list[int], late: bool = False) -> bool:
    """Whether `ids` are known to end with `tail`; the last of them is not known if it is `late`."""
    known = not (late and tail)
    return known and len(ids) >= len(tail) and ids[len(ids) - len(tail) :].tolist() == tail
