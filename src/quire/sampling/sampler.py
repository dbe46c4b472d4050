"""From logits to tokens: applies each row's options in a fixed order and draws with (seed, position) keyed numbers.

The order:

1. raw log-probabilities are taken (they describe the model, not the options);
2. what a grammar allows; allowed tokens; biases and barred tokens; logits processors; repetition, presence and
   frequency penalties; DRY;
3. top-n-sigma, locally typical sampling, XTC, on the distribution before temperature;
4. temperature, or dynamic temperature; mirostat, which replaces what 3 and 5 truncate;
5. top-k, min-p, top-p and the draw, which are one backend op, with the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.kernels.backend import Array, Backend, TopLogprobs
from quire.sampling.extras import Extras
from quire.sampling.processors import ProcessorError
from quire.sampling.rng import uniforms
from quire.sampling.truncation import Lesson, truncate
from quire.step import TokenTopLogprobs

MOST_LOGITS = 2**22  # that steps 3 and 4 look at together, which bounds their memory
NO_TOKEN_LEFT = "the options of the request, taken together, leave no token that may come next"
NO_TOKEN_IN_GRAMMAR = "structured output and the other options of the request leave no token that may come next"
REFUSALS = (NO_TOKEN_LEFT, NO_TOKEN_IN_GRAMMAR)


class Bitmask(NamedTuple):
    """What grammars leave of the vocabulary: for places `rows` int64 [P] of the batch, `bits` int32 [P, words].

    See `Backend.apply_bitmask`. `ends` int64 [P] are the tokens that are taken where other options leave none: they end
    the text, if it may end here; -1 if not.
    """

    rows: np.ndarray
    bits: np.ndarray
    ends: np.ndarray


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
    """Chosen tokens int64 [R]; logprobs per row where asked for; `errors` says of rows why they have no token.

    Tokens are of no meaning where logits are not finite, and -1 in rows with an error: those whose options and grammar
    leave no token, or whose logits processor failed.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenTopLogprobs]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples one token per row on a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def sample(self, logits: Array, batch: SamplingBatch) -> Sampled:
        """Sample from `logits` float32 [R, V], which may be overwritten."""
        wanting = [r for r, extras in enumerate(batch.extras) if extras is not None and extras.wants_logprobs]
        raw = logits[self.backend.from_numpy(_ids(wanting))] if wanting else None
        if batch.mask is not None:
            self.backend.apply_bitmask(logits, batch.mask.rows, batch.mask.bits)
        changing = [
            (r, extras) for r, extras in enumerate(batch.extras) if extras is not None and extras.changes_logits
        ]
        errors = self._apply_extras(logits, batch, changing)
        temperature, lessons = self._truncate(logits, batch, changing)
        checked = batch.mask is not None or bool(changing)
        empty = ~self.backend.to_numpy(self.backend.rows_finite(logits)) if checked else None
        tokens = self.backend.sample(
            logits,
            temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            uniforms(batch.seeds, batch.positions) if temperature.any() else np.zeros(len(batch.seeds)),
        )
        for lesson in lessons:
            lesson.learn(int(tokens[lesson.row]))
        if empty is not None and empty.any():
            tokens = self._without_choice(tokens, empty, batch.mask, errors)
        if errors:
            tokens = tokens.copy()
            tokens[list(errors)] = -1
        return Sampled(tokens, self._logprobs(raw, wanting, np.maximum(tokens, 0), batch.extras), errors)

    def _without_choice(
        self, tokens: np.ndarray, empty: np.ndarray, mask: Bitmask | None, errors: dict[int, str]
    ) -> np.ndarray:
        """Return `tokens` with those that end a text in rows whose logits are all -inf; the others get an error."""
        ends = {} if mask is None else dict(zip(mask.rows.tolist(), mask.ends.tolist(), strict=True))
        tokens = tokens.copy()
        for r in np.flatnonzero(empty).tolist():
            tokens[r] = ends.get(r, -1)
            if tokens[r] < 0:
                errors.setdefault(r, NO_TOKEN_IN_GRAMMAR if r in ends else NO_TOKEN_LEFT)
        return tokens

    def _apply_extras(self, logits: Array, batch: SamplingBatch, rows: list[tuple[int, Extras]]) -> dict[int, str]:
        """Do step 2 on `rows`; return what went wrong in which."""
        if not rows:
            return {}
        masked = [(r, extras.allowed) for r, extras in rows if extras.allowed is not None]
        if masked:
            self.backend.keep_only(logits, _ids([r for r, _ in masked]), np.stack([mask for _, mask in masked]))
        self._add(logits, [(r, *extras.biases(batch.output_ids[r])) for r, extras in rows])
        errors = self._process(logits, batch, rows)
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
        repeating = [(r, *extras.dry.penalties()) for r, extras in rows if extras.dry is not None]
        self._add(logits, [(r, ids, -taken) for r, ids, taken in repeating])
        return errors

    def _add(self, logits: Array, biases: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Add to the logits of rows: (row, token ids, values)."""
        if any(ids.size for _, ids, _ in biases):
            self.backend.add_bias(
                logits,
                np.concatenate([np.full(ids.size, r, dtype=np.int64) for r, ids, _ in biases]),
                np.concatenate([ids for _, ids, _ in biases]),
                np.concatenate([values for _, _, values in biases]),
            )

    def _process(self, logits: Array, batch: SamplingBatch, rows: list[tuple[int, Extras]]) -> dict[int, str]:
        """Run logits processors; return the messages of those that failed, by row."""
        errors: dict[int, str] = {}
        for r, extras in rows:
            if extras.processors is not None:
                try:
                    values = extras.processors.apply(batch.output_ids[r], self._rows(logits, _ids([r]))[0])
                except ProcessorError as error:
                    errors[r] = str(error)
                else:
                    self.backend.put_rows(logits, _ids([r]), values[None])
        return errors

    def _truncate(
        self, logits: Array, batch: SamplingBatch, rows: list[tuple[int, Extras]]
    ) -> tuple[np.ndarray, list[Lesson]]:
        """Do steps 3 and 4 on `rows`; return all rows' temperatures, and what is to be learned of the tokens."""
        asking = [(r, extras.truncation) for r, extras in rows if extras.truncation is not None]
        if not asking:
            return batch.temperature, []
        temperature, lessons = batch.temperature.copy(), []
        at_once = max(1, MOST_LOGITS // logits.shape[1])
        for start in range(0, len(asking), at_once):
            piece = asking[start : start + at_once]
            ids = _ids([r for r, _ in piece])
            values, temperature[ids], learned = truncate(
                self._rows(logits, ids),
                [options for _, options in piece],
                temperature[ids],
                batch.seeds[ids],
                batch.positions[ids],
            )
            self.backend.put_rows(logits, ids, values)
            for lesson in learned:
                lesson.row = int(ids[lesson.row])
            lessons.extend(learned)
        return temperature, lessons

    def _rows(self, logits: Array, ids: np.ndarray) -> np.ndarray:
        """Return a copy of rows as numpy."""
        return np.array(self.backend.to_numpy(logits[self.backend.from_numpy(ids)]), dtype=np.float32)

    def _logprobs(
        self, raw: Array | None, wanting: list[int], tokens: np.ndarray, extras: list[Extras | None]
    ) -> dict[int, TokenTopLogprobs]:
        if raw is None:
            return {}
        found: dict[int, TokenTopLogprobs] = {}
        groups: dict[bool, list[tuple[int, int]]] = {}  # so that those who want all do not make the others sort
        for place, r in enumerate(wanting):
            own = extras[r]
            assert own is not None
            if own.logprob_ids is not None:
                row = self.backend.to_numpy(raw[place])
                found[r] = logprobs_of_ids(row, int(tokens[r]), own.logprob_ids)
            else:
                groups.setdefault(own.num_logprobs == -1, []).append((place, own.num_logprobs or 0))
        for members in groups.values():
            places = _ids([place for place, _ in members])
            numbers = [raw.shape[1] if number < 0 else min(number, raw.shape[1]) for _, number in members]
            rows = raw if len(members) == len(wanting) else raw[self.backend.from_numpy(places)]
            chosen = tokens[np.array(wanting)[places]]
            top = self.backend.top_logprobs(rows, chosen, max(numbers))
            for i, number in enumerate(numbers):
                found[wanting[places[i]]] = pack_logprobs(top, i, number)
        return found


def pack_logprobs(top: TopLogprobs, row: int, k: int) -> TokenTopLogprobs:
    """Return row `row` of `top` with the chosen token and the k best."""
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
