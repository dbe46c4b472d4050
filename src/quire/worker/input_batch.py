"""The worker's persistent rows: one per sequence it knows, kept up to date by each step's changes.

Arrays are allocated once; a step only touches the rows it schedules. Rows are addressed by index; free rows are reused.
Building a step's inputs is vectorized numpy: the only Python loop is over the sequences scheduled, never over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.sampling.extras import Extras
from quire.sampling.processors import LogitsProcessorFactory
from quire.step import ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput

if TYPE_CHECKING:
    from quire.worker.guidance import Guide  # planning lays out batches, too, and needs no grammars


@dataclass(slots=True)
class StepInputs:
    """One step's inputs as host arrays. T tokens, S sequences, G groups of layers; see
    `kernels.backend.AttentionMetadata` for meanings.

    `input_ids` int32 and `positions` int64 [T]; `rows` int64 [S] are batch rows; `num_scheduled` int64 [S];
    `block_tables` int32 [G, S, blocks] and `slot_mapping` int64 [G, T] are those of each group; `sampled` bool [S]
    marks sequences whose last token is computed in this step, so that a new one can be sampled.

    With `sources` int64 [T] the ids are not all known here: where it is below the number of rows, it is the row whose
    last token, on the device, takes the place of an id. Elsewhere it is the number of rows plus the id's own index.
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
    sampled: np.ndarray
    sources: np.ndarray | None = None


class InputBatch:
    """Rows of up to `max_num_seqs` sequences of up to `max_model_len` tokens, with `num_groups` block tables each.

    A block table keeps the entries of blocks that were given back, since no query sees their positions again.
    `num_beams` counts the rows for which nothing is sampled (`NewSequenceData.num_candidates`), `num_guided` those with
    one of the `guides` that `guide_of` makes for new sequences. `processors` are those of logits, by name.
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
        self.vocab_size = vocab_size
        # Zeroed memory is committed when first written, so unused rows and lengths cost nothing.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_candidates = np.zeros(max_num_seqs, dtype=np.int64)
        self.adapters = np.zeros(max_num_seqs, dtype=np.int64)  # numbers of LoRA adapters, 0 for none
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)
        self.extras: list[Extras | None] = [None] * max_num_seqs
        self.guides: list[Guide | None] = [None] * max_num_seqs
        self.num_beams = 0
        self.num_guided = 0
        self._guide_of = guide_of
        self._processors = processors
        # Of tokens that were sampled but are on the device only: their position, -1 where the last one is known here.
        self.unknown = np.full(max_num_seqs, -1, dtype=np.int64)
        self.births = np.zeros(max_num_seqs, dtype=np.int64)  # grows with each sequence that takes the row
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update(self, step: SchedulerOutput) -> None:
        """Apply the step's changes: sequences that left, split, came, and grew."""
        for sequence_id in (*step.finished_sequence_ids, *step.preempted_sequence_ids):
            self._remove(sequence_id)
        for fork in step.forks:
            if not fork.samples:
                self._fork(fork)
        for new in step.new_sequences:
            self._add(new)
        for continuing in step.continuing:
            self._extend(continuing)
        for fork in step.forks:
            if fork.samples:
                self._fork(fork)

    def _remove(self, sequence_id: str) -> None:
        row = self.row_of.pop(sequence_id, None)
        if row is not None:  # a request can end before its first step
            self.num_beams -= bool(self.num_candidates[row])
            self.extras[row] = None
            self._set_guide(row, None)
            self._free_rows.append(row)

    def _add(self, new: NewSequenceData) -> None:
        row = self._free_rows.pop()
        self.row_of[new.sequence_id] = row
        self.births[row] += 1
        self.unknown[row] = -1
        request, token_ids = new.request, new.token_ids
        params = request.sampling_params
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_candidates[row] = new.num_candidates
        self.adapters[row] = request.lora_int_id
        self.num_beams += bool(new.num_candidates)
        self.num_blocks[:, row] = 0
        self._add_blocks(row, new.block_ids)
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seeds[row] = new.seed
        self.extras[row] = Extras.of(
            params,
            token_ids=token_ids,
            num_prompt_tokens=new.num_prompt_tokens,
            stop_ids=request.stop_ids,
            bad_words_ids=request.bad_words_ids,
            vocab_size=self.vocab_size,
            dry_breakers=request.dry_breakers,
            sampler_state=new.sampler_state,
            factories=self._processors,
        )
        self._set_guide(row, self._guide_of(new))

    def _set_guide(self, row: int, guide: Guide | None) -> None:
        self.num_guided += (guide is not None) - (self.guides[row] is not None)
        self.guides[row] = guide

    def _fork(self, fork: ForkData) -> None:
        parent, row = self.row_of[fork.parent_id], self._free_rows.pop()
        self.row_of[fork.sequence_id] = row
        self.births[row] += 1
        self.unknown[row] = -1
        for column in (
            self.num_tokens,
            self.num_prompt_tokens,
            self.num_computed_tokens,
            self.num_candidates,
            self.adapters,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
        ):
            column[row] = column[parent]
        tokens = self.num_tokens[parent]
        self.token_ids[row, :tokens] = self.token_ids[parent, :tokens]
        self.num_blocks[:, row] = self.num_blocks[:, parent]
        blocks = self.num_blocks[:, parent].max()
        self.block_tables[:, row, :blocks] = self.block_tables[:, parent, :blocks]
        self.seeds[row] = fork.seed
        extras = self.extras[parent]
        self.extras[row] = None if extras is None else extras.fork()
        guide = self.guides[parent]
        if guide is not None:
            self._set_guide(row, guide.fork())
        self.num_beams += bool(self.num_candidates[row])

    def _extend(self, continuing: ContinuingSequenceData) -> None:
        row = self.row_of[continuing.sequence_id]
        self.num_computed_tokens[row] = continuing.num_computed_tokens
        if continuing.new_block_ids:
            self._add_blocks(row, continuing.new_block_ids)
        if continuing.replaced_blocks:
            for group, index, block_id in continuing.replaced_blocks:
                self.block_tables[group, row, index] = block_id
        if continuing.new_token_ids:
            guide = self.guides[row]
            if guide is not None:
                guide.take(continuing.new_token_ids)
            self.add_tokens(row, continuing.new_token_ids)

    def _add_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        """Append to the block table of each group."""
        for group, ids in enumerate(block_ids):
            if ids:
                start = self.num_blocks[group, row]
                stop = start + len(ids)
                self.block_tables[group, row, start:stop] = ids
                self.num_blocks[group, row] = stop

    def add_tokens(self, row: int, tokens: list[int]) -> None:
        """Append tokens that were not sampled here. Those that its guide has not given must be told to it, too."""
        start = self.num_tokens[row]
        stop = start + len(tokens)
        self.token_ids[row, start:stop] = tokens
        self.num_tokens[row] = stop
        extras = self.extras[row]
        if extras is not None:
            for token in tokens:
                extras.count(token)

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
            sampled=seq_lens == self.num_tokens[rows],
        )

    def room(self, row: int) -> int:
        """Return how many tokens a row can take."""
        return self.token_ids.shape[1] - int(self.num_tokens[row])

    def output_ids(self, row: int) -> np.ndarray:
        """Return a view of the tokens generated so far in this row."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Add one sampled token to each of these rows."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1
        self._count(rows, tokens)

    def _count(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Let the extras of rows know of a sampled token each."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            extras = self.extras[row]
            if extras is not None:
                extras.count(token)

    def source_of_ids(self, inputs: StepInputs) -> np.ndarray | None:
        """Return `StepInputs.sources` of a step; None where all its ids are known here."""
        late = inputs.sampled & (self.unknown[inputs.rows] >= 0)
        if not late.any():
            return None
        sources = np.arange(len(inputs.input_ids)) + len(self.unknown)
        sources[inputs.cu_query_lens[1:][late] - 1] = inputs.rows[late]
        return sources

    def append_unknown(self, rows: np.ndarray) -> np.ndarray:
        """Add to each of these rows a token that the device knows; return the tokens' positions int64."""
        positions = self.num_tokens[rows]
        self.unknown[rows] = positions
        self.num_tokens[rows] += 1
        return positions

    def fill(self, rows: np.ndarray, births: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Take down what tokens of `append_unknown` are, in rows that still have the sequence of these `births`."""
        same = self.births[rows] == births
        rows, positions, tokens = rows[same], positions[same], tokens[same]
        self.token_ids[rows, positions] = tokens
        self.unknown[rows[self.unknown[rows] == positions]] = -1
        self._count(rows, tokens)

    def late_places(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows int64 among `rows` whose last token is on the device only; -1 in the place of the others."""
        return np.where(self.unknown[rows] >= 0, rows, -1)
