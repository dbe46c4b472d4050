"""`InputBatch`: the persistent batch, a row for each sequence, and `StepInputs`: the model's inputs that it builds.

Arrays are allocated once; a step only touches the rows it schedules, and free rows are reused. Building a step's inputs
is vectorized numpy: the only Python loop is over the scheduled sequences, never over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.sampling.metadata import SamplingStates
from quire.sampling.processors import LogitsProcessorFactory
from quire.step import ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput

if TYPE_CHECKING:
    from quire.worker.guidance import Guide  # memory planning builds batches, too, without grammars


@dataclass(slots=True)
class StepInputs:
    """The inputs of one step as host arrays: T tokens, S sequences, R rows of logits, G groups of layers.

    Attributes:
        rows: int64 [S], rows of the batch. num_scheduled: int64 [S], tokens of each sequence in this step.
        input_ids: int32 [T]. positions: int64 [T]; or [axes, T] where a model has several and they differ.
        cu_query_lens, seq_lens, block_tables [G, S, blocks], slot_mapping [G, T]: see `AttentionMetadata`.
        num_logits: int64 [S], rows of logits of each sequence: 0 unless its last token is computed in this step,
            otherwise 1 and one more for each draft token that is verified.
        logits_indices: int64 [R], the tokens whose logits are computed, in the order of the sequences.
        adapter_slots: int64 [S], the LoRA slot of each sequence, -1 for none; None without LoRA.
        extra: further inputs of the model by name, a value for each token [T]: "token_types" int64.
        inputs_embeds: float32 [E, H], which replace the embeddings of the tokens `embed_indices` int64 [E]; or None.
        sources: int64 [T]; None where the host knows all ids. Below the number of rows of the batch: the row whose last
            sampled token, on the device, is this id; from there on: that number plus the id's own index.
    """

    sequence_ids: list[str]
    rows: np.ndarray
    num_scheduled: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    cu_query_lens: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    num_logits: np.ndarray
    logits_indices: np.ndarray
    adapter_slots: np.ndarray | None = None
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    sources: np.ndarray | None = None
    inputs_embeds: np.ndarray | None = None
    embed_indices: np.ndarray | None = None


class InputBatch:
    """Rows of up to `max_num_seqs` sequences of up to `max_model_len` tokens, with `num_groups` block tables each.

    A block table keeps the entries of blocks that were freed, since no query reads their positions again.

    Args:
        guide_of: returns the guide of a new sequence, if it needs one. processors: logits processors by name.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len + 1]: `num_tokens` of each row, then its draft tokens.
        num_drafts: draft tokens of each row that this step verifies. Those of rows whose logits depend on earlier
            tokens by more than the model (penalties, grammars, beams) are computed but not verified.
        has_drafts: whether the step has draft tokens, verified or not.
        num_candidates: by row, of beams; see `NewSequenceData`. guides: by row, of sequences that have one.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        guide_of: Callable[[NewSequenceData], Guide | None] = lambda new: None,
        processors: Mapping[str, LogitsProcessorFactory] | None = None,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        # Zeroed memory is committed when first written, so unused rows and lengths cost nothing.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_drafts = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.adapters = np.zeros(max_num_seqs, dtype=np.int64)  # numbers of LoRA adapters, 0 for none
        self.sampling = SamplingStates(max_num_seqs, vocab_size, processors)
        self.num_candidates: dict[int, int] = {}
        self.guides: dict[int, Guide] = {}
        self.has_drafts = False
        self._guide_of = guide_of
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [*vars(self).values(), self.sampling.seeds, *self.sampling.options]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the step's changes: sequences that left, forked, came, and grew."""
        self.has_drafts = False
        for sequence_id in (*plan.finished_sequence_ids, *plan.preempted_sequence_ids):
            self._remove(sequence_id)
        for fork in plan.forks:
            if not fork.samples:
                self._fork(fork)
        for new in plan.new_sequences:
            self._add(new)
        for continuing in plan.continuing:
            self._extend(continuing)
        for fork in plan.forks:
            if fork.samples:
                self._fork(fork)

    def _remove(self, sequence_id: str) -> None:
        row = self.row_of.pop(sequence_id, None)
        if row is not None:  # a request can end before its first step
            self.num_candidates.pop(row, None)
            self.guides.pop(row, None)
            self.sampling.remove(row)
            self._free_rows.append(row)

    def _add(self, new: NewSequenceData) -> None:
        row = self.row_of[new.sequence_id] = self._free_rows.pop()
        token_ids = new.token_ids
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.adapters[row] = new.request.lora_int_id
        if new.num_candidates:
            self.num_candidates[row] = new.num_candidates
        self.num_blocks[:, row] = 0
        self._add_blocks(row, new.block_ids)
        self.sampling.add(row, new)
        guide = self._guide_of(new)
        if guide is not None:
            self.guides[row] = guide
        self.num_drafts[row] = 0

    def _fork(self, fork: ForkData) -> None:
        parent, row = self.row_of[fork.parent_id], self._free_rows.pop()
        self.row_of[fork.sequence_id] = row
        for column in (self.num_tokens, self.num_prompt_tokens, self.num_computed_tokens, self.adapters):
            column[row] = column[parent]
        self.num_drafts[row] = 0
        tokens = self.num_tokens[parent]
        self.token_ids[row, :tokens] = self.token_ids[parent, :tokens]
        self.num_blocks[:, row] = self.num_blocks[:, parent]
        blocks = self.num_blocks[:, parent].max()
        self.block_tables[:, row, :blocks] = self.block_tables[:, parent, :blocks]
        self.sampling.fork(parent, row, fork.seed)
        if parent in self.guides:
            self.guides[row] = self.guides[parent].fork()
        if parent in self.num_candidates:
            self.num_candidates[row] = self.num_candidates[parent]

    def _extend(self, continuing: ContinuingSequenceData) -> None:
        row = self.row_of[continuing.sequence_id]
        self.num_computed_tokens[row] = continuing.num_computed_tokens
        if continuing.new_block_ids:
            self._add_blocks(row, continuing.new_block_ids)
        if continuing.replaced_blocks:
            for group, index, block_id in continuing.replaced_blocks:
                self.block_tables[group, row, index] = block_id
        if continuing.new_token_ids:
            new_token_ids = list(continuing.new_token_ids)
            if row in self.guides:
                self.guides[row].accept(new_token_ids)
            self.append_tokens(row, new_token_ids)
        self._set_drafts(row, continuing.draft_token_ids)

    def _add_blocks(self, row: int, block_ids: Sequence[list[int]]) -> None:
        for group, ids in enumerate(block_ids):
            if ids:
                start = self.num_blocks[group, row]
                stop = start + len(ids)
                self.block_tables[group, row, start:stop] = ids
                self.num_blocks[group, row] = stop

    def _set_drafts(self, row: int, draft_token_ids: Sequence[int]) -> None:
        """Write draft tokens behind the others; they are verified where the host can do so afterwards."""
        if not draft_token_ids:
            self.num_drafts[row] = 0
            return
        self.has_drafts = True
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(draft_token_ids)] = draft_token_ids
        state = self.sampling.states.get(row)
        verified = row not in self.guides and row not in self.num_candidates and not (state and state.uses_history)
        self.num_drafts[row] = len(draft_token_ids) if verified else 0

    def inputs(self, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        """Lay out the scheduled tokens of all sequences one after the other."""
        sequence_ids = list(num_scheduled_tokens)
        rows = np.fromiter(map(self.row_of.__getitem__, sequence_ids), dtype=np.int64, count=len(sequence_ids))
        num_scheduled = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
        cu_query_lens = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=cu_query_lens[1:])
        starts = self.num_computed_tokens[rows]
        seq_lens = starts + num_scheduled
        token_rows, positions = rows, starts  # of each token; one a sequence while decoding
        if cu_query_lens[-1] != len(rows):
            sequence = np.repeat(np.arange(len(rows)), num_scheduled)
            token_rows = rows[sequence]
            positions = np.arange(len(sequence)) + (starts - cu_query_lens[:-1])[sequence]
        width = -(-int(seq_lens.max()) // self.block_size)
        blocks = positions // self.block_size
        last = cu_query_lens[:-1] + self.num_tokens[rows] - 1 - starts  # tokens of sequences, if they are computed
        num_logits = (seq_lens >= self.num_tokens[rows]).astype(np.int64)
        if self.num_drafts[rows].any():
            num_logits += self._num_verified(rows, num_logits)
        logits_indices = np.repeat(last, num_logits)
        if len(logits_indices) > np.count_nonzero(num_logits):
            offsets = np.cumsum(num_logits) - num_logits
            logits_indices += np.arange(len(logits_indices)) - np.repeat(offsets, num_logits)
        return StepInputs(
            sequence_ids=sequence_ids,
            rows=rows,
            num_scheduled=num_scheduled,
            input_ids=self.token_ids[token_rows, positions],
            positions=positions,
            cu_query_lens=cu_query_lens,
            seq_lens=seq_lens,
            block_tables=self.block_tables[:, rows, :width],
            slot_mapping=(self.block_tables[:, token_rows, blocks] - blocks) * self.block_size + positions,
            num_logits=num_logits,
            logits_indices=logits_indices,
        )

    def _num_verified(self, rows: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Return how many drafts of `rows` int64 [S] are verified, where `sampled` int64 [S] is 1.

        Memory is planned for `max_num_seqs` rows of logits. Drafts beyond that are left out, the last rows' first.
        """
        drafts = self.num_drafts[rows] * sampled
        room = len(self.num_drafts) - int(sampled.sum())
        return np.clip(room - (np.cumsum(drafts) - drafts), 0, drafts)

    def room(self, row: int) -> int:
        """Return how many tokens a row has room for."""
        return self.token_ids.shape[1] - int(self.num_tokens[row])

    def output_ids(self, row: int) -> np.ndarray:
        """Return a view of the tokens generated so far in this row."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def append_tokens(self, row: int, token_ids: list[int]) -> None:
        """Append tokens of which the row's guide, if it has one, knows already."""
        start = self.num_tokens[row]
        stop = start + len(token_ids)
        self.token_ids[row, start:stop] = token_ids
        self.num_tokens[row] = stop
        self.sampling.append(row, token_ids)

    def append_placeholders(self, rows: np.ndarray) -> None:
        """Append to each of `rows` int64 [n] a token that only the device knows."""
        self.num_tokens[rows] += 1

    def fill_placeholders(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Write the tokens of `append_placeholders`, int64 [n] at `positions` int64 [n], once the host knows them."""
        self.token_ids[rows, positions] = token_ids
        if self.sampling.states:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                self.sampling.append(row, (token_id,))
