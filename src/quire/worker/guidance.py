"""What stands above sampling: grammars, and budgets of reasoning. `Guide` is one sequence's, `Guidance` a step's.

A guide masks what its sequence may say next, hears of each token, and appends tokens that have no alternative without
the model being asked (jump-forward, Zheng et al. 2023, "SGLang", section 4): they are computed in the next step,
together, like a piece of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.sampling.constraint import Constraint, MaskWriter
from quire.sampling.grammars import GrammarStore
from quire.sampling.sampler import Bitmask
from quire.sampling.thinking import ThinkingBudget
from quire.step import ModelOutput, NewSequenceData


class Guide:
    """What one sequence must keep to: a grammar, or a budget of reasoning, or both.

    Attributes:
        jumps: whether tokens without alternative may be appended without asking the model. Not where each token's
            log-probability is wanted, other options may bar it, or the sequence is a beam.
        min_tokens: so many generated tokens must come before the end, if the grammar has anything else to offer.
    """

    __slots__ = ("_stop_ids", "_vocab_size", "constraint", "jumps", "min_tokens", "thinking")

    def __init__(
        self,
        constraint: Constraint | None,
        thinking: ThinkingBudget | None,
        *,
        jumps: bool,
        vocab_size: int,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.constraint = constraint
        self.thinking = thinking
        self.jumps = jumps
        self.min_tokens = min_tokens
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)

    def fork(self) -> Guide:
        """Return the same for a copy of the sequence."""
        return Guide(
            None if self.constraint is None else self.constraint.fork(),
            None if self.thinking is None else self.thinking.fork(),
            jumps=self.jumps,
            vocab_size=self._vocab_size,
            stop_ids=tuple(self._stop_ids),
            min_tokens=self.min_tokens,
        )

    def take(self, token_ids: list[int]) -> None:
        """Note tokens that were appended to the sequence."""
        if self.constraint is not None:
            self.constraint.take(token_ids)
        if self.thinking is not None:
            for token_id in token_ids:
                self.thinking.take(token_id)

    def due(self) -> int | None:
        """Return the only token that may come next because the reasoning must end, or None."""
        ending = self._ending()
        return ending[0] if ending else None

    def go_on(self, token_id: int, room: int) -> list[int]:
        """Note a sampled token; return those, up to `room`, that follow without alternative. They are noted, too."""
        self.take([token_id])
        followed: list[int] = []
        while self.jumps and len(followed) < room:
            forced = self._forced()[: room - len(followed)]
            if not forced:
                break
            self.take(forced)
            if self.constraint is not None and self.constraint.error is not None:
                break
            followed += forced
        return followed

    def _ending(self) -> list[int]:
        """Return what must be appended to end the reasoning: nothing before the budget is used up.

        A grammar may want something else first, such as the rest of a character.
        """
        if self.thinking is None:
            return []
        ending = self.thinking.forced()
        if ending and self.constraint is not None and not self.constraint.allows(ending):
            return []
        return ending

    def _forced(self) -> list[int]:
        ending = self._ending()
        if ending:
            return ending
        if self.constraint is None:
            return []
        forced = self.constraint.forced()
        if self.thinking is not None and not self.thinking.over:
            forced = forced[:1]  # any of them may use up the budget
        for place, token_id in enumerate(forced):
            # How a sequence ends is the scheduler's business; and a grammar may name tokens that there are not.
            if token_id in self._stop_ids or token_id >= self._vocab_size:
                return forced[:place]
        return forced


class Rows(Protocol):
    """What `Guidance` needs of a batch; see `InputBatch`."""

    guides: list[Guide | None]
    row_of: dict[str, int]
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray

    def room(self, row: int) -> int:
        """Return how many tokens a row can take."""

    def add_tokens(self, row: int, tokens: list[int]) -> None:
        """Append tokens that were not sampled."""


class Guidance:
    """The guides of a batch at work: in each step `start`, then the model, then `finish`, `mask`, and `go_on`.

    Args:
        grammars: None where nobody asks for any.
        jump_forward: whether guides may append tokens without asking the model.
    """

    def __init__(
        self, grammars: GrammarStore | None, *, vocab_size: int, max_num_seqs: int, jump_forward: bool = True
    ) -> None:
        self._grammars = grammars
        self._jump_forward = jump_forward
        self._writer = MaskWriter(max_num_seqs, vocab_size)
        self._vocab_size = vocab_size
        self._ends = np.zeros(0, dtype=np.int64)  # of each mask, see `Bitmask`
        self._places: dict[int, int] = {}  # of the masks of this step, by row of the batch

    def guide_of(self, new: NewSequenceData) -> Guide | None:
        """Return the guide of a sequence that has come as far as `new` says; None if it needs none."""
        request = new.request
        if request.grammar is None and request.thinking is None:
            return None
        constraint = None
        if request.grammar is not None:
            assert self._grammars is not None, "this worker was given no store of grammars"
            constraint = Constraint(self._grammars.start(request.grammar))
            constraint.take(new.output_token_ids)
        params = request.sampling_params
        may_bar = params.allowed_token_ids is not None or bool(request.bad_words_ids) or bool(params.logits_processors)
        scored = params.logprobs is not None or params.logprob_token_ids is not None
        return Guide(
            constraint,
            None if request.thinking is None else ThinkingBudget(request.thinking, new.output_token_ids),
            jumps=self._jump_forward and not scored and not new.num_candidates and not may_bar,
            vocab_size=self._vocab_size,
            stop_ids=request.stop_ids,
            min_tokens=params.min_tokens,
        )

    def start(self, rows: list[int], batch: Rows) -> None:
        """Begin to compute the masks of the rows that are sampled in this step."""
        self._places = {}
        writing: list[tuple[Constraint, int]] = []
        for row in rows:
            guide = batch.guides[row]
            if guide is None:
                continue
            token_id = guide.due()
            if token_id is None and guide.constraint is None:
                continue
            place = self._places[row] = len(self._places)
            if token_id is not None:
                self._writer.bits[place] = 0
                _set(self._writer.bits[place], token_id)
            elif guide.constraint is not None:
                writing.append((guide.constraint, place))
        self._writer.start(writing)

    def finish(self, rows: np.ndarray, batch: Rows) -> dict[int, str]:
        """Wait for the masks. Return, by index into `rows` int64 [R], why a sequence cannot go on."""
        self._writer.wait()
        bits = self._writer.bits[: len(self._places)]
        self._ends = np.full(len(bits), -1, dtype=np.int64)
        for token_id in [] if self._grammars is None else self._grammars.end_ids[:1]:
            self._ends[_has(bits, token_id)] = token_id
        errors: dict[int, str] = {}
        for index, row in enumerate(rows.tolist()):
            guide = batch.guides[row]
            if guide is None or guide.constraint is None:
                continue
            error = guide.constraint.error
            if error is not None:
                errors[index] = error
            elif guide.min_tokens and batch.num_tokens[row] - batch.num_prompt_tokens[row] < guide.min_tokens:
                self._bar_end(bits[self._places[row]])
        return errors

    def _bar_end(self, bits: np.ndarray) -> None:
        """Clear the bits of tokens that end the text, unless there is no other."""
        without = bits.copy()
        for token_id in [] if self._grammars is None else self._grammars.end_ids:
            _clear(without, token_id)
        if without.any():
            bits[:] = without

    def mask(self, rows: np.ndarray) -> Bitmask | None:
        """Return the mask of those of `rows`, int64 [R] of the batch, that have one."""
        masked = [(index, self._places[row]) for index, row in enumerate(rows.tolist()) if row in self._places]
        if not masked:
            return None
        indices, places = np.array(masked, dtype=np.int64).T
        return Bitmask(indices, self._writer.bits[places], self._ends[places])

    def go_on(self, sequence_ids: list[str], batch: Rows, output: ModelOutput) -> None:
        """Note what was sampled for these sequences, as `output` and the batch have it, and append what must follow.

        What there is to say of a sequence is put into `output`: that it is complete, or cannot go on.
        """
        for sequence_id in sequence_ids:
            row = batch.row_of[sequence_id]
            guide, sampled = batch.guides[row], output.sampled_token_ids.get(sequence_id)
            if guide is None or sampled is None:
                continue
            followed = guide.go_on(sampled[0], batch.room(row))
            if followed:
                batch.add_tokens(row, followed)
                sampled += followed
            if guide.constraint is not None:
                error = guide.constraint.error
                if error is not None:
                    refuse(output, sequence_id, error)
                elif guide.constraint.complete:
                    output.completed.append(sequence_id)

    def close(self) -> None:
        """End threads."""
        self._writer.close()


def refuse(output: ModelOutput, sequence_id: str, error: str, *, at_fault: bool = True) -> None:
    """Note that a sequence cannot go on, and whether its request is at fault."""
    output.errors[sequence_id] = error
    if at_fault:
        output.refused.append(sequence_id)


def _has(bits: np.ndarray, token_id: int) -> np.ndarray:
    found: np.ndarray = (bits[:, token_id // 32] >> (token_id % 32)) & 1 == 1
    return found


def _set(bits: np.ndarray, token_id: int) -> None:
    bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))


def _clear(bits: np.ndarray, token_id: int) -> None:
    bits.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << (token_id % 32)) & 0xFFFFFFFF)
