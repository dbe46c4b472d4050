"""From logits to tokens: applies each row's options in a fixed order and draws with (seed, position) keyed numbers.

The order:

1. raw log-probabilities are taken (they describe the model, not the options);
2. the grammar's bitmask; allowed tokens; biases, minimum length and bad words; logits processors; repetition, presence
   and frequency penalties; DRY;
3. top-n-sigma, locally typical sampling, XTC, on the distribution before temperature;
4. temperature, or dynamic temperature; mirostat, which replaces what 3 and 5 truncate;
5. top-k, min-p, top-p and the draw, which are one backend op, with the temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.errors import ErrorData, GenerationError
from quire.kernels.backend import Array, Backend, Penalties, TopLogprobs
from quire.sampling.metadata import Bitmask, SamplingMetadata, SequenceState
from quire.sampling.penalties import TokenCounts
from quire.sampling.processors import ProcessorError
from quire.sampling.rng import uniforms
from quire.sampling.truncation import MirostatUpdate, truncate
from quire.step import TokenTopLogprobs

MAX_HOST_LOGITS = 2**22  # that steps 3 and 4 process at a time, which bounds their memory
NO_TOKEN_LEFT = ErrorData(
    "RequestError",
    "the options of the request, taken together, leave no token that may come next",
    code="request_refused",
)
NO_TOKEN_IN_GRAMMAR = ErrorData(
    "RequestError",
    "structured output and the other options of the request leave no token that may come next",
    param="structured_outputs",
    code="request_refused",
)


@dataclass(slots=True)
class SamplerOutput:
    """Sampled tokens int64 [R]; log-probabilities by row where requested; `errors`: why a row has no token.

    Tokens are meaningless, or -1, where logits are not finite, and -1 in rows with an error: those whose options and
    grammar leave no token, or whose logits processor failed.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenTopLogprobs] = field(default_factory=dict)
    errors: dict[int, ErrorData] = field(default_factory=dict)


class Sampler:
    """Samples one token per row of logits on a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def start(
        self, logits: Array, batch: SamplingMetadata, store: Callable[[Array], Array] = lambda tokens: tokens
    ) -> PendingSample:
        """Begin to sample from `logits` float32 [R, V], which may be overwritten.

        The device is waited for only where a row's state needs the host. `store` is given the tokens on the device; its
        result is what is fetched, with -1 in rows whose logits are not finite.
        """
        backend, states = self.backend, batch.states
        if batch.bitmask is None and not states:
            return PendingSample(backend.fetch(store(self._draw(logits, batch.options.temperature, batch))))
        with_logprobs = [r for r, state in states.items() if state.wants_logprobs]
        raw = logits[backend.from_numpy(_ids(with_logprobs))] if with_logprobs else None
        if batch.bitmask is not None:
            backend.apply_bitmask(logits, batch.bitmask.rows, batch.bitmask.bits)
        changed = [(r, state) for r, state in states.items() if state.changes_logits]
        errors = self._process_logits(logits, batch, changed) if changed else {}
        temperature, updates = self._truncate(logits, batch, changed)
        checked = batch.bitmask is not None or bool(changed)
        finite = backend.rows_finite(logits) if checked else None
        tokens = self._draw(logits, temperature, batch)
        drawn = backend.fetch(tokens) if updates else None
        if finite is not None and batch.bitmask is not None:
            tokens = self._or_end(tokens, finite, batch.bitmask)
        return PendingSample(
            fetched=backend.fetch(store(tokens)),
            errors=errors,
            bitmask=batch.bitmask,
            updates=updates,
            drawn=drawn,
            finite=None if finite is None else backend.fetch(finite),
            logprobs=[] if raw is None else self._logprobs(raw, with_logprobs, tokens, states),
        )

    def _draw(self, logits: Array, temperature: np.ndarray, batch: SamplingMetadata) -> Array:
        if not temperature.any():
            return self.backend.greedy(logits)
        options = batch.options._replace(temperature=temperature)
        return self.backend.sample(logits, options, uniforms(batch.seeds, batch.positions))

    def _or_end(self, tokens: Array, finite: Array, bitmask: Bitmask) -> Array:
        """Return `tokens`, replaced by the one that ends the text in rows whose logits are all -inf, if it may end."""
        end_ids, may_end = (np.zeros(tokens.shape[0], dtype=np.int64) for _ in range(2))
        end_ids[bitmask.rows], may_end[bitmask.rows] = bitmask.end_ids, bitmask.end_ids >= 0
        end_ids, may_end = self.backend.from_numpy(end_ids), self.backend.from_numpy(may_end)
        return tokens + (may_end - finite * may_end) * (end_ids - tokens)

    def _process_logits(
        self, logits: Array, batch: SamplingMetadata, rows: list[tuple[int, SequenceState]]
    ) -> dict[int, ErrorData]:
        """Do step 2, without the grammar's bitmask, on `rows`; return errors by row."""
        masked = [(r, state.allowed) for r, state in rows if state.allowed is not None]
        if masked:
            self.backend.apply_bitmask(logits, _ids([r for r, _ in masked]), np.stack([bits for _, bits in masked]))
        self._add_biases(
            logits, [(r, *state.biases(batch.output_ids[r], last_unknown=batch.last_unknown(r))) for r, state in rows]
        )
        self._ban_after_last(logits, batch, rows)
        errors = self._run_processors(logits, batch, rows)
        self._penalize(logits, batch, [(r, state, state.counts) for r, state in rows if state.counts is not None])
        dry = [(r, *state.dry.penalties()) for r, state in rows if state.dry is not None]
        self._add_biases(logits, [(r, ids, -penalties) for r, ids, penalties in dry])
        return errors

    def _add_biases(self, logits: Array, biases: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Add (row, token ids, values) to the logits."""
        if any(ids.size for _, ids, _ in biases):
            self.backend.add_bias(
                logits,
                np.concatenate([np.full(ids.size, r, dtype=np.int64) for r, ids, _ in biases]),
                np.concatenate([ids for _, ids, _ in biases]),
                np.concatenate([values for _, _, values in biases]),
            )

    def _ban_after_last(self, logits: Array, batch: SamplingMetadata, rows: list[tuple[int, SequenceState]]) -> None:
        """Ban the ends of bad words in rows whose last token is on the device only."""
        if batch.device_tokens is None:
            return
        bans = [
            (r, *pair)
            for r, state in rows
            if batch.last_unknown(r)
            for pair in state.bans_after_last(batch.output_ids[r])
        ]
        places, before, tokens = (_ids([ban[i] for ban in bans]) for i in range(3))
        last = batch.device_tokens.of(places)
        if last is not None:
            self.backend.ban_after(logits, places, tokens, last, before)

    def _penalize(
        self, logits: Array, batch: SamplingMetadata, rows: list[tuple[int, SequenceState, TokenCounts]]
    ) -> None:
        if not rows:
            return
        places = _ids([r for r, _, _ in rows])
        options = [state.params for _, state, _ in rows]
        self.backend.apply_penalties(
            logits,
            Penalties(
                places,
                np.cumsum([0, *(len(counts.ids) for _, _, counts in rows)], dtype=np.int64),
                np.concatenate([counts.ids for _, _, counts in rows]),
                np.concatenate([counts.counts for _, _, counts in rows]),
                np.array([params.repetition_penalty for params in options], dtype=np.float32),
                np.array([params.presence_penalty for params in options], dtype=np.float32),
                np.array([params.frequency_penalty for params in options], dtype=np.float32),
            ),
            None if batch.device_tokens is None else batch.device_tokens.of(places),
        )

    def _run_processors(
        self, logits: Array, batch: SamplingMetadata, rows: list[tuple[int, SequenceState]]
    ) -> dict[int, ErrorData]:
        """Run logits processors; return the messages of those that failed, by row."""
        errors: dict[int, ErrorData] = {}
        for r, state in rows:
            if state.processors is not None:
                try:
                    values = state.processors.apply(batch.output_ids[r], self._to_host(logits, _ids([r]))[0])
                except ProcessorError as error:
                    errors[r] = ErrorData.of(GenerationError(str(error)))
                else:
                    self.backend.put_rows(logits, _ids([r]), values[None])
        return errors

    def _truncate(
        self, logits: Array, batch: SamplingMetadata, rows: list[tuple[int, SequenceState]]
    ) -> tuple[np.ndarray, list[MirostatUpdate]]:
        """Do steps 3 and 4 on `rows`; return all rows' temperatures, and the updates of mirostat's state."""
        truncated = [(r, state.truncation) for r, state in rows if state.truncation is not None]
        if not truncated:
            return batch.options.temperature, []
        temperature, updates = batch.options.temperature.copy(), []
        size = max(1, MAX_HOST_LOGITS // logits.shape[1])
        for start in range(0, len(truncated), size):
            chunk = truncated[start : start + size]
            ids = _ids([r for r, _ in chunk])
            values, temperature[ids], found = truncate(
                self._to_host(logits, ids),
                [truncation for _, truncation in chunk],
                temperature[ids],
                batch.seeds[ids],
                batch.positions[ids],
            )
            self.backend.put_rows(logits, ids, values)
            for update in found:
                update.row = int(ids[update.row])
            updates.extend(found)
        return temperature, updates

    def _to_host(self, logits: Array, ids: np.ndarray) -> np.ndarray:
        return np.array(self.backend.to_numpy(logits[self.backend.from_numpy(ids)]), dtype=np.float32)

    def _logprobs(
        self, raw: Array, rows: list[int], tokens: Array, states: Mapping[int, SequenceState]
    ) -> list[_PendingTop | _PendingNamed]:
        """Launch the log-probabilities of `rows`, whose logits are `raw`."""
        pending: list[_PendingTop | _PendingNamed] = []
        groups: dict[bool, list[tuple[int, int]]] = {}  # rows with all tokens apart, or the others would be sorted, too
        for index, r in enumerate(rows):
            state = states[r]
            if state.logprob_ids is not None:
                pending.append(_PendingNamed(r, state.logprob_ids, self.backend.fetch(raw[index])))
            else:
                number = state.params.logprobs or 0
                groups.setdefault(number == -1, []).append((index, number))
        for members in groups.values():
            indices = _ids([index for index, _ in members])
            numbers = [raw.shape[1] if number < 0 else min(number, raw.shape[1]) for _, number in members]
            logits = raw if len(members) == len(rows) else raw[self.backend.from_numpy(indices)]
            ids = _ids(rows)[indices]
            top = self.backend.top_logprobs(logits, tokens[self.backend.from_numpy(ids)], max(numbers))
            pending.append(_PendingTop(ids.tolist(), numbers, top.fetch(self.backend)))
        return pending


class _PendingTop(NamedTuple):
    """Log-probabilities of the sampled token and the `numbers[i]` most likely ones of row `rows[i]`."""

    rows: list[int]
    numbers: list[int]
    fetched: Callable[[], TopLogprobs]

    def finish(self, tokens: np.ndarray, found: dict[int, TokenTopLogprobs]) -> None:
        top = self.fetched()
        for i, (r, number) in enumerate(zip(self.rows, self.numbers, strict=True)):
            found[r] = pack_logprobs(top, i, number)


class _PendingNamed(NamedTuple):
    """Log-probabilities of the sampled token and of tokens `ids` of row `row`, from its logits."""

    row: int
    ids: np.ndarray
    fetched: Callable[[], np.ndarray]

    def finish(self, tokens: np.ndarray, found: dict[int, TokenTopLogprobs]) -> None:
        found[self.row] = logprobs_of_ids(self.fetched(), int(tokens[self.row]), self.ids)


@dataclass(slots=True)
class PendingSample:
    """Tokens that the device is sampling; `Sampler.start` has launched all of it.

    Attributes:
        fetched: the tokens.
        errors, bitmask: as in `SamplerOutput` and `SamplingMetadata`; errors known so far.
        updates, drawn: mirostat's updates, and the tokens that were drawn before a grammar replaced any.
        finite: bool [R], of rows whose logits were changed.
        logprobs: those that were requested.
    """

    fetched: Callable[[], np.ndarray]
    errors: dict[int, ErrorData] = field(default_factory=dict)
    bitmask: Bitmask | None = None
    updates: Sequence[MirostatUpdate] = ()
    drawn: Callable[[], np.ndarray] | None = None
    finite: Callable[[], np.ndarray] | None = None
    logprobs: Sequence[_PendingTop | _PendingNamed] = ()

    def finish(self) -> SamplerOutput:
        """Wait for the device; to be called once."""
        tokens = self.fetched()
        if self.drawn is not None:
            drawn = self.drawn()
            for update in self.updates:
                update.apply(int(drawn[update.row]))
        if self.finite is not None:
            self._check(self.finite() | (tokens < 0))
        found: dict[int, TokenTopLogprobs] = {}
        for pending in self.logprobs:
            pending.finish(tokens, found)
        if self.errors:
            tokens = tokens.copy()
            tokens[list(self.errors)] = -1
        return SamplerOutput(tokens, found, self.errors)

    def _check(self, finite: np.ndarray) -> None:
        """Set the error of rows whose logits are all -inf, and whose text may not end."""
        if finite.all():
            return
        bitmask = self.bitmask
        end_ids = {} if bitmask is None else dict(zip(bitmask.rows.tolist(), bitmask.end_ids.tolist(), strict=True))
        for r in np.flatnonzero(~finite).tolist():
            if end_ids.get(r, -1) < 0:
                self.errors.setdefault(r, NO_TOKEN_IN_GRAMMAR if r in end_ids else NO_TOKEN_LEFT)


def pack_logprobs(top: TopLogprobs, row: int, k: int) -> TokenTopLogprobs:
    """Return row `row` of `top` with the sampled token and the k best."""
    return TokenTopLogprobs(
        top.token_ids[row, : k + 1].tolist(), top.logprobs[row, : k + 1].tolist(), int(top.ranks[row])
    )


def logprobs_of_ids(logits: np.ndarray, token: int, ids: np.ndarray) -> TokenTopLogprobs:
    """Return the log-probabilities of `token`, then of `ids`, by the logits float32 [V]."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = logits.astype(np.float64)
        values -= values.max()
        values -= np.log(np.exp(values).sum())
    whole = [token, *ids.tolist()]
    return TokenTopLogprobs(whole, values[whole].tolist(), 1 + int((logits > logits[token]).sum()))


def _ids(rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)
