"""Beam search decides which beams go on, which have finished, and when it is over, from ids and log-probabilities.

Nothing here knows of models, blocks or sequences. The engine hands over the most likely next tokens of every running
beam, gets back which tokens go on from which beam, and maps those onto its sequences (`place`).

Beams and scores are those of `transformers`' `generate(num_beams=k, num_return_sequences=k, do_sample=False)`, with
three differences. Sums are kept in double precision, not in float32. A vocabulary too small for `k` different beams
gives fewer beams, not copies of one with a score near -1e9. And tokens of probability zero are never taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from quire.sampling_params import BeamSearchParams
from quire.step import BeamOutput


class Step(NamedTuple):
    """Says how the running beams go on: (index of the parent, token appended to it), the best one first.

    The next `advance` expects candidates in this order. With `over` the search has ended, and `running` is empty.
    """

    running: list[tuple[int, int]]
    over: bool


class Placement(NamedTuple):
    """Says how the sequences of the parents become those of their children, with as few copies as possible.

    Attributes:
        in_place: (parent, child): the parent's sequence goes on as this child, which is its best.
        forks: (parent, child): the child needs a copy of the parent's sequence, as it was before this step's tokens.
        ended: parents without children.
    """

    in_place: list[tuple[int, int]]
    forks: list[tuple[int, int]]
    ended: list[int]


def place(running: Sequence[tuple[int, int]], num_parents: int) -> Placement:
    """Return how `num_parents` sequences become `Step.running`; children are named by their index in it."""
    placement = Placement([], [], [])
    continued = [False] * num_parents
    for child, (parent, _) in enumerate(running):
        (placement.forks if continued[parent] else placement.in_place).append((parent, child))
        continued[parent] = True
    placement.ended.extend(parent for parent in range(num_parents) if not continued[parent])
    return placement


class _History(NamedTuple):
    """The last token of a beam, and what came before it, which beams share."""

    token_id: int
    before: _History | None


class _Running(NamedTuple):
    """A beam that goes on: the sum of its log-probabilities, and its tokens (None: only the prompt)."""

    logprob: float
    history: _History | None


class _Finished(NamedTuple):
    """A beam that has ended."""

    score: float
    logprob: float
    history: _History
    reason: str

    def output(self) -> BeamOutput:
        """Return it with its tokens in order."""
        token_ids = []
        node: _History | None = self.history
        while node is not None:
            token_ids.append(node.token_id)
            node = node.before
        return BeamOutput(token_ids[::-1], self.logprob, self.score, self.reason)


class BeamSearch:
    """One search, begun with the prompt as its only beam, moved on by `advance` until it says that it is over.

    In each step all continuations of all running beams are ranked by the sum of their log-probabilities, equal ones by
    their parent's rank. The `beam_width` best that do not end become the running beams. Those that end, by a stop id or
    at `max_tokens`, become finished beams if they are among the `beam_width` best of all continuations; the
    `beam_width` finished ones of the highest score are kept. The score is the sum over length ** length_penalty, where
    the length counts generated tokens, the stop id too. Once so many have finished, the search is over if the best
    running beam cannot rank before the worst of them, as `early_stopping` judges. A search of width 1 is greedy: it
    ends with its first finished beam.

    Args:
        params: its `max_tokens` and `ignore_eos` are not read; the next two arguments say what came of them.
        stop_ids: the token ids that end a beam. max_tokens: length of the longest beams, at least 1.

    Attributes:
        num_candidates: how many of a beam's next tokens must be known. From one beam come at most `beam_width` running
            ones, and no stop id more than once. (`transformers` ranks max(2, 1 + number of stop ids) * beam_width of
            all beams together, among which there are always enough that do not end; it looks at no others.)
        over: whether the search has ended.
    """

    def __init__(self, params: BeamSearchParams, *, stop_ids: Collection[int], max_tokens: int) -> None:
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._ends_when_full = params.early_stopping is True or params.beam_width == 1
        self._judged_by_longest = params.early_stopping == "never" and params.length_penalty > 0
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._running = [_Running(0.0, None)]
        self._finished: list[_Finished] = []
        self.num_candidates = self._width + len(self._stop_ids)
        self.over = False

    def advance(self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Step:
        """Move all beams on by a token and return which go on.

        `candidates` has, for each running beam in the order of the last `Step`, the ids of its `num_candidates` most
        likely next tokens (or all there are) and their log-probabilities, falling; each token once.
        """
        assert not self.over, "the search is over"
        assert len(candidates) == len(self._running), f"candidates for {len(candidates)} of {len(self._running)} beams"
        self._num_tokens += 1
        at_limit = self._num_tokens >= self._max_tokens
        running: list[_Running] = []
        origins: list[tuple[int, int]] = []
        for rank, (logprob, parent, token_id) in enumerate(self._ranked(candidates)):
            if rank >= self._width and (at_limit or len(running) == self._width):
                break
            stopped = token_id in self._stop_ids
            if not (stopped or at_limit):
                running.append(_Running(logprob, _History(token_id, self._running[parent].history)))
                origins.append((parent, token_id))
            elif rank < self._width:
                history = _History(token_id, self._running[parent].history)
                self._finish(logprob, history, "stop" if stopped else "length")
        self._running = running
        self._finished = self._best(self._finished)
        self.over = not running or (len(self._finished) == self._width and not self._can_improve())
        if self.over:
            self._running = []
            return Step([], True)
        return Step(origins, False)

    def beams(self) -> list[BeamOutput]:
        """Return the finished beams, the best first, `beam_width` of them if the vocabulary allows.

        In a search that is not over yet, the running beams count as ended here by their length.
        """
        cut = [
            _Finished(self._score(beam.logprob, self._num_tokens), beam.logprob, beam.history, "length")
            for beam in self._running
            if beam.history is not None
        ]
        return [beam.output() for beam in self._best(self._finished + cut)]

    def _ranked(self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Iterator[tuple[float, int, int]]:
        """Yield (sum of log-probabilities, parent, token id) of all continuations, the best first.

        Only as many are looked at as are taken: each beam's own are in order already.
        """
        streams = [
            _continuations(parent, beam.logprob, token_ids, logprobs)
            for parent, (beam, (token_ids, logprobs)) in enumerate(zip(self._running, candidates, strict=True))
        ]
        return heapq.merge(*streams, key=itemgetter(0), reverse=True)

    def _finish(self, logprob: float, history: _History, reason: str) -> None:
        self._finished.append(_Finished(self._score(logprob, self._num_tokens), logprob, history, reason))

    def _best(self, finished: list[_Finished]) -> list[_Finished]:
        """Return the `beam_width` of the highest score, the best first; of equal ones those that finished earlier."""
        return sorted(finished, key=attrgetter("score"), reverse=True)[: self._width]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._length_penalty)

    def _can_improve(self) -> bool:
        """Whether a running beam may still rank before the worst finished one, now that enough have finished."""
        if self._ends_when_full:
            return False
        length = self._max_tokens if self._judged_by_longest else self._num_tokens
        return self._score(self._running[0].logprob, length) > self._finished[-1].score


def _continuations(
    parent: int, logprob: float, token_ids: Sequence[int], logprobs: Sequence[float]
) -> Iterator[tuple[float, int, int]]:
    """Yield (sum of log-probabilities, parent, token id) of one beam's continuations, the best first."""
    for token_id, step_logprob in zip(token_ids, logprobs, strict=True):
        if step_logprob == float("-inf"):
            return
        yield logprob + step_logprob, parent, token_id
