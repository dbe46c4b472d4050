"""`Constraint`: where one sequence stands in its grammar. `MaskWriter`: what the grammars of a step allow, as bits.

Masks depend on tokens that are known before the model runs, so they are computed while it does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher

from quire.kernels.backend import Array, Backend, TopLogprobs
from quire.sampling.sampler import Bitmask
from quire.structured.lark import GRAMMAR_FAILED, first_line

MOST_THREADS = 8  # they run beside the model, which has use for all cores


class Constraint:
    """A sequence's place in its grammar."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def fork(self) -> Constraint:
        """Return the same for a copy of the sequence."""
        return Constraint(self.matcher.deep_copy())

    def take(self, token_ids: list[int]) -> None:
        """Note tokens that were appended. Those that the grammar does not allow, or its limits, are an `error`."""
        if token_ids:
            self.matcher.consume_tokens(token_ids)

    @property
    def error(self) -> str | None:
        """Why no more can be said of what is allowed, or None."""
        if not self.matcher.is_error():
            return None
        return f"{GRAMMAR_FAILED}{first_line(self.matcher.get_error())}"

    @property
    def complete(self) -> bool:
        """Whether the text satisfies the grammar and nothing may follow but its end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def accepting(self) -> bool:
        """Whether the text satisfies the grammar as it is."""
        return self.matcher.is_accepting() and not self.matcher.is_error()

    def allows(self, token_ids: list[int]) -> bool:
        """Whether these tokens may come next, one after the other."""
        return self.matcher.validate_tokens(token_ids) == len(token_ids)

    def forced(self) -> list[int]:
        """Return the tokens that must come next: the only text possible, spelled as the tokenizer would.

        The last ones of it, which could be spelled together with what follows, are not among them.
        """
        return [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()


class MaskWriter:
    """Writes the masks of up to `max_rows` constraints at a time into `bits`, int32 [max_rows, ceil(V / 32)]."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        # One more than the vocabulary: for texts without end, see `GrammarVocabulary`.
        self.bits = np.zeros((max_rows, vocab_size // 32 + 1), dtype=np.int32)
        self._vocab_size = vocab_size
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, constraints: Sequence[tuple[Constraint, int]]) -> None:
        """Begin to write masks: of each constraint into its row of `bits`. `wait` must follow."""
        if not constraints:
            return
        if self._executor is None or self._thread is None:
            self._executor = LLExecutor(max(1, min((os.cpu_count() or 1) // 4, MOST_THREADS)))
            self._thread = ThreadPoolExecutor(1, "quire-masks")
        width = 4 * self.bits.shape[1]
        matchers = [(constraint.matcher, row) for constraint, row in constraints]
        self._running = self._thread.submit(
            self._executor.unsafe_compute_mask_ptr, matchers, self.bits.ctypes.data, width, len(self.bits)
        )

    def wait(self) -> None:
        """Return when the masks are there."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def masked_logprobs(backend: Backend, logits: Array, mask: Bitmask, k: int) -> TopLogprobs:
    """Return the k most likely tokens that `mask` leaves in each row, with the log-probabilities they have without it.

    `logits` float32 [R, V] are overwritten. The best one takes the place of the chosen token. Where fewer are left, the
    others have -inf.
    """
    raw = backend.take_rows(logits, backend.from_numpy(np.arange(logits.shape[0], dtype=np.int64)))
    backend.apply_bitmask(logits, mask.rows, mask.bits)
    best = backend.greedy(logits)
    top = backend.top_logprobs(logits, best, k)
    whole = backend.top_logprobs(raw, best, 0)
    shift = whole.logprobs[:, :1] - top.logprobs[:, :1]  # by how much the mask has made all of them more likely
    return TopLogprobs(top.token_ids, top.logprobs + shift, whole.ranks)
