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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.kernels.backend import Array, Backend, TopLogprobs
from quire.kernels.flying import LateTokens
from quire.sampling.extras import Extras
from quire.sampling.processors import ProcessorError
from quire.sampling.rng import uniforms
from quire.sampling.seen import SeenTokens
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
    grammar. The last of a row's `output_ids` is not read where `late` has it; those rows' extras do not need the host.
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
    late: LateTokens | None = None

    def is_late(self, row: int) -> bool:
        """Whether the last token of a row is not known here."""
        return self.late is not None and bool(self.late.places[row] >= 0)


@dataclass(slots=True)
class Sampled:
    """Chosen tokens int64 [R]; logprobs per row where asked for; `errors` says of rows why they have no token.

    Tokens are of no meaning, or -1, where logits are not finite, and -1 in rows with an error: those whose options and
    grammar leave no token, or whose logits processor failed.
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
        return self.start(logits, batch).finish()

    def draw(self, logits: Array, batch: SamplingBatch) -> Array:
        """Return tokens int64 [R], which stay on the device, of rows without extras or mask."""
        if not batch.temperature.any():
            return self.backend.greedy(logits)
        return self._draw(logits, batch.temperature, batch)

    def _draw(self, logits: Array, temperature: np.ndarray, batch: SamplingBatch) -> Array:
        return self.backend.sample(
            logits,
            temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            uniforms(batch.seeds, batch.positions) if temperature.any() else np.zeros(len(batch.seeds)),
        )

    def start(
        self, logits: Array, batch: SamplingBatch, keep: Callable[[Array], Array] = lambda tokens: tokens
    ) -> Drawing:
        """Do what `sample` does, without waiting for the device, unless rows have processors or `Truncation`s.

        `keep` is given the tokens as they are on the device; what it returns is fetched, with -1 in rows that had bad
        logits.
        """
        backend = self.backend
        wanting = [r for r, extras in enumerate(batch.extras) if extras is not None and extras.wants_logprobs]
        raw = logits[backend.from_numpy(_ids(wanting))] if wanting else None
        if batch.mask is not None:
            backend.apply_bitmask(logits, batch.mask.rows, batch.mask.bits)
        changing = [
            (r, extras) for r, extras in enumerate(batch.extras) if extras is not None and extras.changes_logits
        ]
        errors = self._apply_extras(logits, batch, changing)
        temperature, lessons = self._truncate(logits, batch, changing)
        checked = batch.mask is not None or bool(changing)
        finite = backend.rows_finite(logits) if checked else None
        tokens = self._draw(logits, temperature, batch)
        drawn = backend.fetch(tokens) if lessons else None
        if finite is not None and batch.mask is not None:
            tokens = self._or_ends(tokens, finite, batch.mask)
        return Drawing(
            tokens=tokens,
            errors=errors,
            mask=batch.mask,
            lessons=lessons,
            drawn=drawn,
            fetched=backend.fetch(keep(tokens)),
            finite=None if finite is None else backend.fetch(finite),
            logprobs=[] if raw is None else self._logprobs(raw, wanting, tokens, batch.extras),
        )

    def _or_ends(self, tokens: Array, finite: Array, mask: Bitmask) -> Array:
        """Return `tokens` with those that end a text in rows whose logits are all -inf, where it may end."""
        ends, may_end = (np.zeros(tokens.shape[0], dtype=np.int64) for _ in range(2))
        ends[mask.rows], may_end[mask.rows] = mask.ends, mask.ends >= 0
        ends, may_end = self.backend.from_numpy(ends), self.backend.from_numpy(may_end)
        return tokens + (may_end - finite * may_end) * (ends - tokens)

    def _apply_extras(self, logits: Array, batch: SamplingBatch, rows: list[tuple[int, Extras]]) -> dict[int, str]:
        """Do step 2 on `rows`; return what went wrong in which."""
        if not rows:
            return {}
        masked = [(r, extras.allowed) for r, extras in rows if extras.allowed is not None]
        if masked:
            self.backend.keep_only(logits, _ids([r for r, _ in masked]), np.stack([mask for _, mask in masked]))
        self._add(logits, [(r, *extras.biases(batch.output_ids[r], late=batch.is_late(r))) for r, extras in rows])
        self._bar_later(logits, batch, [(r, extras) for r, extras in rows if extras.bad_words and batch.is_late(r)])
        errors = self._process(logits, batch, rows)
        self._penalize(logits, batch, [(r, extras, extras.seen) for r, extras in rows if extras.seen is not None])
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

    def _bar_later(self, logits: Array, batch: SamplingBatch, rows: list[tuple[int, Extras]]) -> None:
        """Bar what must not follow the last tokens of `rows`, which are late."""
        bars = [(r, *pair) for r, extras in rows for pair in extras.later(batch.output_ids[r])]
        places, before, tokens = (_ids([bar[i] for bar in bars]) for i in range(3))
        late = None if batch.late is None else batch.late.of(places)
        if late is not None:
            self.backend.bar_after(logits, places, tokens, late, before)

    def _penalize(self, logits: Array, batch: SamplingBatch, rows: list[tuple[int, Extras, SeenTokens]]) -> None:
        """Apply the penalties of rows by the tokens that they have seen."""
        if not rows:
            return
        places = _ids([r for r, _, _ in rows])
        self.backend.apply_penalties(
            logits,
            places,
            np.cumsum([0, *(len(seen.ids) for _, _, seen in rows)], dtype=np.int64),
            np.concatenate([seen.ids for _, _, seen in rows]),
            np.concatenate([seen.counts for _, _, seen in rows]),
            np.array([extras.repetition for _, extras, _ in rows], dtype=np.float32),
            np.array([extras.presence for _, extras, _ in rows], dtype=np.float32),
            np.array([extras.frequency for _, extras, _ in rows], dtype=np.float32),
            None if batch.late is None else batch.late.of(places),
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
        self, raw: Array, wanting: list[int], tokens: Array, extras: list[Extras | None]
    ) -> list[_Best | _Named]:
        """Start what `Drawing.logprobs` is to hold, for rows `wanting`, whose logits are `raw`."""
        begun: list[_Best | _Named] = []
        groups: dict[bool, list[tuple[int, int]]] = {}  # so that those who want all do not make the others sort
        for place, r in enumerate(wanting):
            own = extras[r]
            assert own is not None
            if own.logprob_ids is not None:
                begun.append(_Named(r, own.logprob_ids, self.backend.fetch(raw[place])))
            else:
                groups.setdefault(own.num_logprobs == -1, []).append((place, own.num_logprobs or 0))
        for members in groups.values():
            places = _ids([place for place, _ in members])
            numbers = [raw.shape[1] if number < 0 else min(number, raw.shape[1]) for _, number in members]
            rows = raw if len(members) == len(wanting) else raw[self.backend.from_numpy(places)]
            ids = _ids(wanting)[places]
            top = self.backend.top_logprobs(rows, tokens[self.backend.from_numpy(ids)], max(numbers))
            begun.append(_Best(ids.tolist(), numbers, top.fetch(self.backend)))
        return begun


class _Best(NamedTuple):
    """Log-probabilities on their way: of the token and the `numbers[i]` likeliest ones of row `rows[i]`."""

    rows: list[int]
    numbers: list[int]
    fetched: Callable[[], TopLogprobs]

    def take(self, tokens: np.ndarray, found: dict[int, TokenTopLogprobs]) -> None:
        top = self.fetched()
        for i, (r, number) in enumerate(zip(self.rows, self.numbers, strict=True)):
            found[r] = pack_logprobs(top, i, number)


class _Named(NamedTuple):
    """Log-probabilities of the token and of tokens `ids` of row `row`, by its logits, which are on their way."""

    row: int
    ids: np.ndarray
    fetched: Callable[[], np.ndarray]

    def take(self, tokens: np.ndarray, found: dict[int, TokenTopLogprobs]) -> None:
        found[self.row] = logprobs_of_ids(self.fetched(), int(tokens[self.row]), self.ids)


@dataclass(slots=True)
class Drawing:
    """Tokens that are being drawn; `Sampler.start` has launched all of it.

    Attributes:
        tokens: int64 [R] of the backend, what the next step can read before the host knows it; where rows turn out to
            have an error, of no meaning, but in the vocabulary.
        errors, mask: of the rows, as `Sampled` and `SamplingBatch` have them; errors that are known so far.
        lessons: what mirostat is to learn of `drawn`, the tokens as they were drawn.
        fetched, finite, logprobs: what is on its way to the host: the tokens; bool [R], of rows that were checked.
    """

    tokens: Array
    errors: dict[int, str]
    mask: Bitmask | None
    lessons: list[Lesson]
    drawn: Callable[[], np.ndarray] | None
    fetched: Callable[[], np.ndarray]
    finite: Callable[[], np.ndarray] | None
    logprobs: Sequence[_Best | _Named]

    def finish(self) -> Sampled:
        """Wait for the device; to be called once."""
        tokens = self.fetched()
        if self.drawn is not None:
            drawn = self.drawn()
            for lesson in self.lessons:
                lesson.learn(int(drawn[lesson.row]))
        if self.finite is not None:
            self._check(self.finite() | (tokens < 0))
        found: dict[int, TokenTopLogprobs] = {}
        for begun in self.logprobs:
            begun.take(tokens, found)
        if self.errors:
            tokens = tokens.copy()
            tokens[list(self.errors)] = -1
        return Sampled(tokens, found, self.errors)

    def _check(self, finite: np.ndarray) -> None:
        """Note an error for rows whose logits are all -inf, and whose text may not end."""
        if finite.all():
            return
        ends = {} if self.mask is None else dict(zip(self.mask.rows.tolist(), self.mask.ends.tolist(), strict=True))
        for r in np.flatnonzero(~finite).tolist():
            if ends.get(r, -1) < 0:
                self.errors.setdefault(r, NO_TOKEN_IN_GRAMMAR if r in ends else NO_TOKEN_LEFT)


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
