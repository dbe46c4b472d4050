"""The sampling options and state of sequences: `SamplingStates` of the persistent batch, `SamplingMetadata` of a step.

The numbers that nearly every request sets are columns; everything else is a `SequenceState`, which most rows do not
have, so that the common step does not pay for it. What the options do to logits is `sampler.py`'s business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.kernels.backend import NEG_INF, DeviceTokens, SamplingOptions
from quire.sampling.penalties import Dry, TokenCounts
from quire.sampling.processors import LogitsProcessorFactory, Processors
from quire.sampling.truncation import Truncation
from quire.step import NewSequenceData


class SequenceState:
    """The options of one sequence beyond temperature, top-k, top-p and min-p, prepared, with their state.

    Args:
        vocab_size: the number of logits. factories: of logits processors, by name.

    Attributes:
        params: as the request has them.
        num_prompt_logprobs: alternatives per prompt position, -1 for the whole vocabulary; None for none, and in forks.
        logprob_ids: int64 ids whose log-probabilities are returned instead of the most likely ones', or None.
        allowed: bitmask int32 [ceil(V / 32)] of the only tokens that may be sampled, or None.
        counts, dry, processors, truncation: those of rows that use them.
        wants_logprobs: whether log-probabilities of output tokens are returned.
        changes_logits: whether any option changes the logits.
        needs_host: whether the host must see the logits, or the last token, before the next one is sampled.
        uses_history: whether the next token's logits depend on the tokens before it by more than the model.
    """

    def __init__(
        self, new: NewSequenceData, vocab_size: int, factories: Mapping[str, LogitsProcessorFactory] | None = None
    ) -> None:
        request = new.request
        self.params = params = request.sampling_params
        self.num_prompt_logprobs = params.prompt_logprobs
        self.logprob_ids: np.ndarray | None = None
        if params.logprob_token_ids is not None:
            self.logprob_ids = np.array(params.logprob_token_ids, dtype=np.int64)
        self.min_tokens = params.min_tokens if request.stop_ids else 0
        self.stop_ids = np.array(sorted(set(request.stop_ids)), dtype=np.int64)
        self.bad_words = [words for words in request.bad_words_ids if words]
        bias = params.logit_bias or {}
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias_values = np.array(list(bias.values()), dtype=np.float32)
        self.allowed: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            mask = np.zeros((vocab_size + 31) // 32 * 32, dtype=bool)
            mask[params.allowed_token_ids] = True
            self.allowed = np.packbits(mask, bitorder="little").view(np.int32)
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = TokenCounts(new.token_ids, new.num_prompt_tokens, vocab_size)
        self.truncation = Truncation.of(params, new.sampler_state)
        self.dry: Dry | None = None
        if params.dry_multiplier > 0.0:
            self.dry = Dry(
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed_length=params.dry_allowed_length,
                last_n=params.dry_penalty_last_n,
                breakers=request.dry_breakers,
                token_ids=new.token_ids,
                vocab_size=vocab_size,
            )
        self.processors: Processors | None = None
        if params.logits_processors:
            shared = params.extra_args or {}
            chosen = [(item.name, {**shared, **item.args}) for item in params.logits_processors]
            self.processors = Processors(chosen, factories or {}, request.prompt_token_ids, vocab_size)
        self.wants_logprobs = params.logprobs is not None or self.logprob_ids is not None
        self.needs_host = self.truncation is not None or self.dry is not None or self.processors is not None
        self.uses_history = self.needs_host or self.counts is not None or bool(self.min_tokens or self.bad_words)
        self.changes_logits = self.uses_history or bool(self.bias_ids.size) or self.allowed is not None

    @property
    def is_needed(self) -> bool:
        """Whether there is any option beyond plain sampling."""
        return self.wants_logprobs or self.num_prompt_logprobs is not None or self.changes_logits

    def fork(self) -> SequenceState:
        """Return the state of a fork: independent, and without the log-probabilities of the prompt."""
        twin = copy.copy(self)
        twin.num_prompt_logprobs = None
        for name in ("counts", "dry", "processors", "truncation"):
            state = getattr(self, name)
            setattr(twin, name, None if state is None else state.copy())
        return twin

    @property
    def sampler_state(self) -> float | None:
        """The sequence's entry of `ModelOutput.sampler_states`; None for none."""
        return None if self.truncation is None else self.truncation.state

    def append(self, token_id: int) -> None:
        """Count a generated token for the penalties."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.dry is not None:
            self.dry.add(token_id)

    def biases(self, output_ids: np.ndarray, *, last_unknown: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids int64 [E], values float32 [E]) to add to the logits, -inf for banned tokens.

        With `last_unknown` the last of `output_ids` is on the device only; see `bans_after_last` for its part.
        """
        banned = []
        for words in self.bad_words:
            prefix = words[:-1]
            if not prefix or (not last_unknown and _ends_with(output_ids, prefix)):
                banned.append(words[-1])
        if len(output_ids) < self.min_tokens:
            banned.extend(self.stop_ids.tolist())
        if not banned:
            return self.bias_ids, self.bias_values
        ids = np.concatenate([self.bias_ids, np.array(banned, dtype=np.int64)])
        return ids, np.concatenate([self.bias_values, np.full(len(banned), NEG_INF, dtype=np.float32)])

    def bans_after_last(self, output_ids: np.ndarray) -> list[tuple[int, int]]:
        """Return pairs (a, b): if the last output token, which is not known here, is a, bad words ban b after it."""
        return [
            (words[-2], words[-1])
            for words in self.bad_words
            if len(words) > 1 and _ends_with(output_ids[:-1], words[:-2])
        ]


def _ends_with(ids: np.ndarray, suffix: list[int]) -> bool:
    return len(ids) >= len(suffix) and ids[len(ids) - len(suffix) :].tolist() == suffix


class Bitmask(NamedTuple):
    """What grammars allow in rows `rows` int64 [P] of a step: `bits` int32 [P, words], see `Backend.apply_bitmask`.

    Where the other options of a row leave no token, `end_ids` int64 [P] is sampled, which ends the text; -1 where the
    text may not end.
    """

    rows: np.ndarray
    bits: np.ndarray
    end_ids: np.ndarray


@dataclass(slots=True)
class SamplingMetadata:
    """The options of R rows of logits, as numpy arrays [R].

    Attributes:
        positions: the sequence positions that the sampled tokens take.
        states, output_ids: by row, of rows that have a state: it, and the tokens generated so far.
        bitmask: None where no row has a grammar.
        device_tokens: the last tokens of `output_ids` that only the device knows, in rows whose state does not need the
            host.
    """

    options: SamplingOptions
    seeds: np.ndarray
    positions: np.ndarray
    states: dict[int, SequenceState]
    output_ids: dict[int, np.ndarray]
    bitmask: Bitmask | None = None
    device_tokens: DeviceTokens | None = None

    def last_unknown(self, row: int) -> bool:
        """Whether only the device knows the last output token of a row."""
        return self.device_tokens is not None and bool(self.device_tokens.indices[row] >= 0)


class SamplingStates:
    """The sampling options and state of up to `max_num_seqs` rows of the persistent batch.

    Attributes:
        options: top_k int64, the others float32; seeds int64: [max_num_seqs].
        states: by row, of those with options beyond these.
    """

    def __init__(
        self, max_num_seqs: int, vocab_size: int, factories: Mapping[str, LogitsProcessorFactory] | None = None
    ) -> None:
        dtypes = np.float32, np.int64, np.float32, np.float32
        self.options = SamplingOptions(*(np.zeros(max_num_seqs, dtype) for dtype in dtypes))
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.states: dict[int, SequenceState] = {}
        self._vocab_size, self._factories = vocab_size, factories

    def add(self, row: int, new: NewSequenceData) -> None:
        """Take the options of a sequence; the only place where they are read."""
        params = new.request.sampling_params
        self.options.temperature[row] = 0.0 if params.greedy else params.temperature
        self.options.top_k[row] = max(params.top_k, 0)
        self.options.top_p[row] = params.top_p
        self.options.min_p[row] = params.min_p
        self.seeds[row] = new.seed
        state = SequenceState(new, self._vocab_size, self._factories)
        if state.is_needed:
            self.states[row] = state

    def fork(self, parent: int, row: int, seed: int) -> None:
        """Give a row the options of another, and a seed of its own."""
        for column in self.options:
            column[row] = column[parent]
        self.seeds[row] = seed
        if parent in self.states:
            state = self.states[parent].fork()
            if state.is_needed:
                self.states[row] = state

    def remove(self, row: int) -> None:
        """Free the state of a row."""
        self.states.pop(row, None)

    def append(self, row: int, token_ids: Iterable[int]) -> None:
        """Count generated tokens of a row."""
        state = self.states.get(row)
        if state is not None:
            for token_id in token_ids:
                state.append(token_id)

    def metadata(
        self, rows: np.ndarray, positions: np.ndarray, output_ids: Callable[[int], np.ndarray]
    ) -> SamplingMetadata:
        """Return the options of `rows` int64 [R], whose tokens take `positions` int64 [R].

        `output_ids` returns the tokens generated in a row of the batch.
        """
        stateful = {r: row for r, row in enumerate(rows.tolist()) if row in self.states} if self.states else {}
        return SamplingMetadata(
            options=SamplingOptions(*(column[rows] for column in self.options)),
            seeds=self.seeds[rows],
            positions=positions,
            states={r: self.states[row] for r, row in stateful.items()},
            output_ids={r: output_ids(row) for r, row in stateful.items()},
        )
