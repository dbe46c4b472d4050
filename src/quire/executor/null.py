"""An executor without a model: each sampled token is a fixed function of the sequence. For tests and host-cost runs."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from quire.executor.base import Executor
from quire.step import (
    ForkData,
    KVCacheSpec,
    LayerKVSpec,
    ModelOutput,
    PendingOutput,
    PooledData,
    SchedulerOutput,
    TokenTopLogprobs,
)


@dataclass(slots=True)
class _Known:
    """State of a sequence: how many tokens it has, the last of them, whether it is a beam, or pooled."""

    count: int
    last: int
    num_candidates: int
    pools: bool = False


class NullExecutor(Executor):
    """Returns token `(last token + 1) mod vocab_size` for each sequence that reached its end, and verifies drafts.

    The i-th fork (from 1) that draws from one parent in a step gets the token i further on. A beam's candidates are the
    tokens after its last one, each half as likely as the one before. What is pooled is the last token's number. Loads
    from disk end at once, and well. It keeps only a count of known tokens per sequence, so that a step costs
    microseconds.
    """

    def __init__(self, vocab_size: int = 1000) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._known: dict[str, _Known] = {}

    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec([LayerKVSpec(num_kv_heads=1, head_size=8, dtype="float32")])

    def available_memory(self) -> int:
        return 2**30

    def sleep(self, level: int) -> int:
        """Forget all sequences; there is nothing to free."""
        self._known.clear()
        return 0

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Sample every sequence whose last known token is computed in this step."""
        computed, drafts = self._take_in(plan)
        output = ModelOutput(sampled_token_ids={}, loaded=dict.fromkeys(plan.loading_block_ids, True))
        for sequence_id, count in plan.num_scheduled_tokens.items():
            known = self._known[sequence_id]
            if computed[sequence_id] + count == known.count:
                if known.pools:
                    output.pooled[sequence_id] = PooledData(struct.pack("<f", known.last), [1])
                elif known.num_candidates:
                    output.candidates[sequence_id] = self._candidates(known)
                else:
                    known.last = (known.last + 1) % self.vocab_size
                    known.count += 1
                    output.sampled_token_ids[sequence_id] = [known.last]
        for sequence_id, draft_token_ids in drafts.items():
            self._verify(self._known[sequence_id], draft_token_ids, output.sampled_token_ids.get(sequence_id))
        if plan.forks:
            self._draw_forks([fork for fork in plan.forks if fork.samples], output)
        return output

    def _verify(self, known: _Known, drafts: Sequence[int], sampled: list[int] | None) -> None:
        """Append to `sampled` the tokens that drafts confirm, all of which count as known so far; None: no token."""
        known.count -= len(drafts)
        for draft in drafts:
            if sampled is None or known.last != draft:
                break
            known.last = (known.last + 1) % self.vocab_size
            known.count += 1
            sampled.append(known.last)

    def _take_in(self, plan: SchedulerOutput) -> tuple[dict[str, int], dict[str, Sequence[int]]]:
        """Apply the step's changes; return the number of computed tokens of each sequence, and drafts of some."""
        known = self._known
        for sequence_id in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            known.pop(sequence_id, None)
        for fork in plan.forks:
            if not fork.samples:
                self._fork(fork)
        computed: dict[str, int] = {}
        drafts: dict[str, Sequence[int]] = {}
        for new in plan.new_sequences:
            computed[new.sequence_id] = new.num_computed_tokens
            known[new.sequence_id] = _Known(
                new.num_tokens,
                (new.output_token_ids or new.request.prompt_token_ids)[-1],
                new.num_candidates,
                new.request.pooling is not None,
            )
        for data in plan.continuing:
            computed[data.sequence_id] = data.num_computed_tokens
            if data.draft_token_ids:
                drafts[data.sequence_id] = data.draft_token_ids
                known[data.sequence_id].count += len(data.draft_token_ids)
            if data.new_token_ids:
                grown = known[data.sequence_id]
                grown.count += len(data.new_token_ids)
                grown.last = data.new_token_ids[-1]
        return computed, drafts

    def _fork(self, fork: ForkData) -> _Known:
        parent = self._known[fork.parent_id]
        child = self._known[fork.sequence_id] = _Known(parent.count, parent.last, parent.num_candidates)
        return child

    def _draw_forks(self, forks: list[ForkData], output: ModelOutput) -> None:
        """Make the forks that sample; their parents have sampled already."""
        drawn: dict[str, int] = {}
        for fork in forks:
            drawn[fork.parent_id] = drawn.get(fork.parent_id, 0) + 1
            (token,) = output.sampled_token_ids[fork.parent_id]
            child = self._fork(fork)  # in its count is the token that the parent drew
            child.last = (token + drawn[fork.parent_id]) % self.vocab_size
            output.sampled_token_ids[fork.sequence_id] = [child.last]

    def _candidates(self, known: _Known) -> TokenTopLogprobs:
        number = min(known.num_candidates, self.vocab_size)
        tokens = [(known.last + 1 + place) % self.vocab_size for place in range(number)]
        logprobs = [-math.log(2.0) * (place + 1) for place in range(number)]
        return TokenTopLogprobs([tokens[0], *tokens], [logprobs[0], *logprobs], 1)
