"""What constrains sampling from outside: grammars (structured output) and budgets of reasoning.

`Guide` is what one sequence must follow, `Guidance` the guides of a step. A guide masks the next token, accepts each
sampled token, and appends tokens that have no alternative without asking the model (jump-forward, Zheng et al. 2023,
"SGLang", section 4): they are computed together in the next step, like a chunk of a prompt.

Bitmasks depend on final tokens only, so they are computed while the model runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher

from quire.errors import ErrorData
from quire.kernels.backend import Array, Backend, TopLogprobs
from quire.sampling.grammars import GrammarStore
from quire.sampling.metadata import Bitmask
from quire.sampling.thinking import ThinkingBudget
from quire.step import ModelOutput, NewSequenceData
from quire.structured.lark import first_line, grammar_failed
from quire.worker.input_batch import InputBatch

MAX_THREADS = 8  # they run beside the model, which has use for all cores


class BitmaskWriter:
    """Writes the bitmasks of up to `max_rows` grammars at a time into `bits`, int32 [max_rows, ceil(V / 32)]."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        # One more than the vocabulary: for texts without end, see `GrammarVocabulary`.
        self.bits = np.zeros((max_rows, vocab_size // 32 + 1), dtype=np.int32)
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def start(self, matchers: Sequence[tuple[LLMatcher, int]]) -> None:
        """Begin to write the bitmask of each matcher into its row of `bits`. `wait` must follow."""
        if not matchers:
            return
        if self._executor is None or self._thread is None:
            self._executor = LLExecutor(max(1, min((os.cpu_count() or 1) // 4, MAX_THREADS)))
            self._thread = ThreadPoolExecutor(1, "quire-masks")
        width = 4 * self.bits.shape[1]
        self._running = self._thread.submit(
            self._executor.unsafe_compute_mask_ptr, list(matchers), self.bits.ctypes.data, width, len(self.bits)
        )

    def wait(self) -> None:
        """Return when the bitmasks are written."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


def masked_logprobs(backend: Backend, logits: Array, bitmask: Bitmask, k: int) -> TopLogprobs:
    """Return the k most likely tokens that `bitmask` allows in each row, with their unmasked log-probabilities.

    `logits` float32 [R, V] are overwritten. The best one stands for the sampled token. Where fewer are allowed, the
    rest have -inf.
    """
    raw = backend.take_rows(logits, backend.from_numpy(np.arange(logits.shape[0], dtype=np.int64)))
    backend.apply_bitmask(logits, bitmask.rows, bitmask.bits)
    best = backend.greedy(logits)
    top = backend.top_logprobs(logits, best, k)
    unmasked = backend.top_logprobs(raw, best, 0)
    shift = unmasked.logprobs[:, :1] - top.logprobs[:, :1]  # the mask has made all allowed ones more likely by this
    return TopLogprobs(top.token_ids, top.logprobs + shift, unmasked.ranks)


class Guide:
    """What one sequence must follow: a grammar, a budget of reasoning, or both.

    Args:
        matcher: the sequence's position in its grammar, or None.
        jump_forward: whether tokens without alternative may be appended without asking the model. Not where each
            token's log-probability is requested, other options may ban it, or the sequence is a beam.
        min_tokens: the end is banned before so many generated tokens, if the grammar allows anything else.
    """

    __slots__ = ("_jump_forward", "_stop_ids", "_vocab_size", "matcher", "min_tokens", "thinking")

    def __init__(
        self,
        matcher: LLMatcher | None,
        thinking: ThinkingBudget | None,
        *,
        jump_forward: bool,
        vocab_size: int,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.matcher = matcher
        self.thinking = thinking
        self.min_tokens = min_tokens
        self._jump_forward = jump_forward
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)

    def fork(self) -> Guide:
        """Return an independent copy."""
        return Guide(
            None if self.matcher is None else self.matcher.deep_copy(),
            None if self.thinking is None else self.thinking.fork(),
            jump_forward=self._jump_forward,
            vocab_size=self._vocab_size,
            stop_ids=tuple(self._stop_ids),
            min_tokens=self.min_tokens,
        )

    def accept(self, token_ids: list[int]) -> None:
        """Append tokens of the sequence. Those that its grammar or the limits do not allow are an `error`."""
        if self.matcher is not None and token_ids:
            self.matcher.consume_tokens(token_ids)
        if self.thinking is not None:
            for token_id in token_ids:
                self.thinking.accept(token_id)

    @property
    def error(self) -> ErrorData | None:
        """Why the grammar cannot go on, or None."""
        if self.matcher is None or not self.matcher.is_error():
            return None
        return grammar_failed(first_line(self.matcher.get_error()))

    @property
    def complete(self) -> bool:
        """Whether the text satisfies its grammar and only its end may follow."""
        return self.matcher is not None and self.matcher.is_stopped() and not self.matcher.is_error()

    def advance(self, token_id: int, room: int) -> list[int]:
        """Accept a sampled token; return those, up to `room`, that must follow. They are accepted, too."""
        self.accept([token_id])
        appended: list[int] = []
        while self._jump_forward and len(appended) < room:
            forced = self._forced_tokens()[: room - len(appended)]
            if not forced:
                break
            self.accept(forced)
            if self.error is not None:
                break
            appended += forced
        return appended

    def end_of_thinking(self) -> list[int]:
        """Return the tokens that must come next to end the reasoning: none before the budget is used up.

        A grammar may require something else first, such as the rest of a character.
        """
        if self.thinking is None:
            return []
        end = self.thinking.forced_tokens()
        if end and self.matcher is not None and self.matcher.validate_tokens(end) < len(end):
            return []
        return end

    def _forced_tokens(self) -> list[int]:
        """Return the tokens that must come next: the end of the reasoning, or the only text that the grammar allows.

        Of such a text the last tokens, which could merge with what follows, are left out.
        """
        end = self.end_of_thinking()
        if end or self.matcher is None or self.matcher.is_stopped():
            return end
        forced: list[int] = self.matcher.compute_ff_tokens()
        if self.thinking is not None and not self.thinking.over:
            forced = forced[:1]  # any of them may use up the budget
        for index, token_id in enumerate(forced):
            # How a sequence ends is decided by the scheduler; and a grammar may name tokens that do not exist.
            if token_id in self._stop_ids or token_id >= self._vocab_size:
                return forced[:index]
        return forced


class Guidance:
    """The guides of a batch: in each step `start`, then the model, then `finish`, `bitmask`, and `advance`.

    Args:
        grammars: None where no sequence has any.
        jump_forward: whether guides may append tokens without asking the model.
    """

    def __init__(
        self, grammars: GrammarStore | None, *, vocab_size: int, max_num_seqs: int, jump_forward: bool = True
    ) -> None:
        self._grammars = grammars
        self._jump_forward = jump_forward
        self._writer = BitmaskWriter(max_num_seqs, vocab_size)
        self._vocab_size = vocab_size
        self._end_ids = np.zeros(0, dtype=np.int64)  # of each bitmask, see `Bitmask`
        self._index_of: dict[int, int] = {}  # of the bitmasks of this step, by row of the batch

    def guide_of(self, new: NewSequenceData) -> Guide | None:
        """Return the guide of a sequence, advanced by its output so far; None if it needs none."""
        request, output_ids = new.request, new.output_token_ids
        if request.grammar is None and request.thinking is None:
            return None
        matcher = None
        if request.grammar is not None:
            assert self._grammars is not None, "this worker has no grammar store"
            matcher = self._grammars.start(request.grammar)
            if output_ids:
                matcher.consume_tokens(list(output_ids))
        params = request.sampling_params
        may_ban = params.allowed_token_ids is not None or bool(request.bad_words_ids) or bool(params.logits_processors)
        with_logprobs = params.returns_logprobs
        return Guide(
            matcher,
            None if request.thinking is None else ThinkingBudget(request.thinking, output_ids),
            jump_forward=self._jump_forward and not (with_logprobs or new.num_candidates or may_ban),
            vocab_size=self._vocab_size,
            stop_ids=request.stop_ids,
            min_tokens=params.min_tokens,
        )

    def start(self, rows: list[int], batch: InputBatch) -> None:
        """Begin to compute the bitmasks of the rows that are sampled in this step."""
        self._index_of = {}
        matchers: list[tuple[LLMatcher, int]] = []
        for row in rows:
            guide = batch.guides.get(row)
            if guide is None:
                continue
            end = guide.end_of_thinking()
            if not end and guide.matcher is None:
                continue
            index = self._index_of[row] = len(self._index_of)
            if end:
                self._writer.bits[index] = 0
                _set(self._writer.bits[index], end[0])
            elif guide.matcher is not None:
                matchers.append((guide.matcher, index))
        self._writer.start(matchers)

    def finish(self, rows: np.ndarray, batch: InputBatch) -> dict[int, ErrorData]:
        """Wait for the bitmasks. Return, by index into `rows` int64 [R], why a sequence cannot go on."""
        self._writer.wait()
        bits = self._writer.bits[: len(self._index_of)]
        all_end_ids = [] if self._grammars is None else self._grammars.end_ids()
        self._end_ids = np.full(len(bits), -1, dtype=np.int64)
        for token_id in all_end_ids[:1]:
            self._end_ids[_has(bits, token_id)] = token_id
        errors: dict[int, ErrorData] = {}
        for index, row in enumerate(rows.tolist()):
            guide = batch.guides.get(row)
            if guide is None or guide.matcher is None:
                continue
            error = guide.error
            if error is not None:
                errors[index] = error
            elif guide.min_tokens and batch.num_tokens[row] - batch.num_prompt_tokens[row] < guide.min_tokens:
                own = bits[self._index_of[row]]
                without_end = own.copy()
                for token_id in all_end_ids:
                    _clear(without_end, token_id)
                if without_end.any():
                    own[:] = without_end
        return errors

    def bitmask(self, rows: np.ndarray) -> Bitmask | None:
        """Return the bitmasks of those of `rows`, int64 [R] of the batch, that have one."""
        masked = [(index, self._index_of[row]) for index, row in enumerate(rows.tolist()) if row in self._index_of]
        if not masked:
            return None
        indices, own = np.array(masked, dtype=np.int64).T
        return Bitmask(indices, self._writer.bits[own], self._end_ids[own])

    def advance(self, sequence_ids: Sequence[str], batch: InputBatch, output: ModelOutput) -> None:
        """Accept the tokens that `output` has for these sequences, and append those that must follow to both.

        Sequences whose grammar is complete, or cannot go on, are named in `output`.
        """
        for sequence_id in sequence_ids:
            row = batch.row_of[sequence_id]
            guide, sampled = batch.guides.get(row), output.sampled_token_ids.get(sequence_id)
            if guide is None or sampled is None:
                continue
            appended = guide.advance(sampled[0], batch.room(row))
            if appended:
                batch.append_tokens(row, appended)
                sampled += appended
            error = guide.error
            if error is not None:
                output.errors[sequence_id] = error
            elif guide.complete:
                output.completed.append(sequence_id)

    def close(self) -> None:
        """End threads."""
        self._writer.close()


def _has(bits: np.ndarray, token_id: int) -> np.ndarray:
    found: np.ndarray = (bits[:, token_id // 32] >> (token_id % 32)) & 1 == 1
    return found


def _set(bits: np.ndarray, token_id: int) -> None:
    bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))


def _clear(bits: np.ndarray, token_id: int) -> None:
    bits.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)
