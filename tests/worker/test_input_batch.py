"""The persistent batch equals one rebuilt from scratch, whatever came and went before."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from quire.engine_request import EngineRequest
from quire.sampling_params import SamplingParams
from quire.step import ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput
from quire.worker.input_batch import InputBatch

BLOCK_SIZE = 4


def new_sequence(request_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewSequenceData:
    return NewSequenceData(request_id, EngineRequest(request_id, tokens, SamplingParams()), [blocks], computed, seed=1)


def step_of(**changes: object) -> SchedulerOutput:
    fields: dict[str, object] = {
        "new_sequences": [],
        "continuing": [],
        "num_scheduled_tokens": {},
        "total_num_scheduled_tokens": 0,
        "finished_sequence_ids": [],
        "preempted_sequence_ids": [],
    }
    return SchedulerOutput(**{**fields, **changes})


def test_inputs_of_a_ragged_step() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=16, block_size=BLOCK_SIZE, vocab_size=100)
    batch.update(
        step_of(
            new_sequences=[new_sequence("a", [10, 11, 12, 13, 14], [7, 2], computed=3), new_sequence("b", [20], [5])]
        )
    )
    inputs = batch.inputs({"a": 2, "b": 1})
    assert inputs.input_ids.tolist() == [13, 14, 20]
    assert inputs.positions.tolist() == [3, 4, 0]
    assert inputs.slot_mapping[0].tolist() == [7 * 4 + 3, 2 * 4, 5 * 4]
    assert inputs.cu_query_lens.tolist() == [0, 2, 3]
    assert inputs.seq_lens.tolist() == [5, 1]
    assert inputs.block_tables[0, 0].tolist() == [7, 2]
    assert inputs.num_logits.tolist() == [1, 1] and inputs.logits_indices.tolist() == [1, 2]
    assert batch.inputs({"a": 1}).num_logits.tolist() == [0]


def test_each_group_of_layers_has_its_own_blocks() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=BLOCK_SIZE, vocab_size=100, num_groups=2)
    new = new_sequence("a", [10, 11, 12, 13, 14], [7, 2], computed=3)
    new.block_ids.append([0, 9])
    batch.update(step_of(new_sequences=[new]))
    inputs = batch.inputs({"a": 2})
    assert inputs.slot_mapping.tolist() == [[7 * 4 + 3, 2 * 4], [3, 9 * 4]]
    assert inputs.block_tables.tolist() == [[[7, 2]], [[0, 9]]]


def test_a_fork_that_samples_gets_what_its_parent_brings_or_gains_in_the_step() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=16, block_size=BLOCK_SIZE, vocab_size=100)
    batch.update(
        step_of(
            new_sequences=[new_sequence("a", [1, 2, 3], [5]), new_sequence("b", [1] * 5, [6])],
            forks=[ForkData("a", "a1", seed=9, samples=True)],
        )
    )
    batch.update(
        step_of(continuing=[ContinuingSequenceData("b", [[8]], 4)], forks=[ForkData("b", "b1", seed=9, samples=True)])
    )
    for name, tokens, blocks in (("a1", [1, 2, 3], [5]), ("b1", [1] * 5, [6, 8])):
        row = batch.row_of[name]
        assert batch.token_ids[row, : batch.num_tokens[row]].tolist() == tokens
        assert batch.block_tables[0, row, : len(blocks)].tolist() == blocks
        assert (batch.num_blocks[0, row], batch.sampling.seeds[row]) == (len(blocks), 9)


def test_a_fork_has_the_options_of_its_parent_and_counts_of_its_own() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=16, block_size=BLOCK_SIZE, vocab_size=100)
    new = new_sequence("a", [1, 2], [5])
    new.request.sampling_params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, frequency_penalty=1.0, prompt_logprobs=2
    )
    batch.update(step_of(new_sequences=[new]))
    batch.update(step_of(forks=[ForkData("a", "b", seed=2)]))
    rows = parent, child = [batch.row_of[name] for name in "ab"]
    for column in batch.sampling.options:
        assert column[parent] == column[child] != 0
    assert batch.sampling.seeds[rows].tolist() == [1, 2]
    batch.append_tokens(parent, [33])
    ours, theirs = (batch.sampling.states[row] for row in rows)
    assert ours.counts is not None and theirs.counts is not None
    assert (ours.counts.ids.tolist(), ours.counts.counts.tolist()) == ([1, 2, 33], [0, 0, 1])
    assert (theirs.counts.ids.tolist(), theirs.counts.counts.tolist()) == ([1, 2], [0, 0])
    assert (ours.num_prompt_logprobs, theirs.num_prompt_logprobs) == (2, None)


class Row:
    """What a sequence should be: the batch, rebuilt from what was said of it."""

    def __init__(self, tokens: list[int], tables: list[list[int]]) -> None:
        self.prompt, self.output, self.tables, self.computed = tokens, [], tables, 0
        self.seed, self.is_beam = 1, False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def fork(self, seed: int) -> Row:
        twin = Row(list(self.prompt), [list(table) for table in self.tables])
        twin.output, twin.computed, twin.seed, twin.is_beam = list(self.output), self.computed, seed, self.is_beam
        return twin


class Traffic:
    """Random steps for a batch of 6 rows with 3 groups of layers, and what should come of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.batch = InputBatch(max_num_seqs=6, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=100, num_groups=3)
        self.rows: dict[str, Row] = {}
        self.number = 0

    def step(self) -> None:
        rng, rows = self.rng, self.rows
        left = [name for name in rows if rng.random() < 0.1 or len(rows[name].tokens) > 58]
        for name in left:
            del rows[name]
        kept = list(rows)
        forks = self.forks([name for name in kept if not self.is_prefill(rows[name])], samples=False)
        news = self.news()
        scheduled = {name: row for name, row in rows.items() if rng.random() < 0.8}
        continuing = [self.extend(name) for name in scheduled if name not in {new.sequence_id for new in news}]
        counts = {name: rng.randint(1, len(row.tokens) - row.computed) for name, row in scheduled.items()}
        ends = [name for name, count in counts.items() if rows[name].computed + count == len(rows[name].tokens)]
        drawn = self.forks([name for name in ends if not rows[name].output and not rows[name].is_beam], samples=True)
        cut = rng.randint(0, len(left))
        self.batch.update(
            step_of(
                new_sequences=news,
                continuing=continuing,
                finished_sequence_ids=left[:cut],
                preempted_sequence_ids=left[cut:],
                forks=forks + drawn,
            )
        )
        self.check_rows()
        if counts:
            self.check_inputs(counts)
        for fork in drawn:
            self.sample(fork.sequence_id)

    def is_prefill(self, row: Row) -> bool:
        return row.computed < len(row.prompt)

    def forks(self, names: list[str], *, samples: bool) -> list[ForkData]:
        made = []
        for name in names:
            while len(self.rows) < 6 and self.rng.random() < 0.3:
                self.number += 1
                made.append(ForkData(name, f"s{self.number}", self.number, samples))
                self.rows[f"s{self.number}"] = self.rows[name].fork(self.number)
                if samples:
                    self.rows[f"s{self.number}"].computed = len(self.rows[name].tokens)
        return made

    def news(self) -> list[NewSequenceData]:
        made = []
        while len(self.rows) < 6 and self.rng.random() < 0.4:
            self.number += 1
            tokens = [self.rng.randrange(100) for _ in range(self.rng.randint(1, 20))]
            tables = [self.blocks(-(-len(tokens) // BLOCK_SIZE)) for _ in range(3)]
            row = self.rows[f"s{self.number}"] = Row(list(tokens), [list(table) for table in tables])
            row.is_beam = self.rng.random() < 0.3
            new = new_sequence(f"s{self.number}", tokens, [])
            new.block_ids, new.num_candidates = tables, 4 if row.is_beam else 0
            new.request.sampling_params = SamplingParams(presence_penalty=1.0)
            made.append(new)
        return made

    def blocks(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def extend(self, name: str) -> ContinuingSequenceData:
        row, rng = self.rows[name], self.rng
        tokens = [rng.randrange(100) for _ in range(rng.randint(1, 2))] if len(row.tokens) == row.computed else []
        row.output += tokens
        needed = -(-len(row.tokens) // BLOCK_SIZE)
        added = [self.blocks(needed - len(table)) for table in row.tables]
        replaced = [
            (group, rng.randrange(len(table)), rng.randrange(1000))
            for group, table in enumerate(row.tables)
            if rng.random() < 0.2
        ]
        for table, ids in zip(row.tables, added, strict=True):
            table += ids
        for group, index, block_id in replaced:
            row.tables[group][index] = block_id
        return ContinuingSequenceData(name, added if any(added) else [], row.computed, replaced, tokens)

    def check_rows(self) -> None:
        batch = self.batch
        assert batch.row_of.keys() == self.rows.keys()
        assert len(set(batch.row_of.values())) == len(self.rows)
        assert len(batch.num_candidates) == sum(row.is_beam for row in self.rows.values())
        for name, row in self.rows.items():
            at = batch.row_of[name]
            assert batch.token_ids[at, : batch.num_tokens[at]].tolist() == row.tokens
            assert batch.output_ids(at).tolist() == row.output
            for group, table in enumerate(row.tables):
                assert batch.block_tables[group, at, : batch.num_blocks[group, at]].tolist() == table
            assert batch.sampling.seeds[at] == row.seed
            seen = batch.sampling.states[at].counts
            assert seen is not None and len(set(seen.ids.tolist())) == len(seen.ids)
            output = Counter(row.output)
            found = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
            assert found == {token: output[token] for token in row.tokens}

    def check_inputs(self, counts: dict[str, int]) -> None:
        inputs = self.batch.inputs(counts)
        at = 0
        for index, (name, count) in enumerate(counts.items()):
            row = self.rows[name]
            positions = range(row.computed, row.computed + count)
            assert inputs.input_ids[at : at + count].tolist() == [row.tokens[p] for p in positions]
            assert inputs.positions[at : at + count].tolist() == list(positions)
            for group, table in enumerate(row.tables):
                expected = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
                assert inputs.slot_mapping[group, at : at + count].tolist() == expected
                width = positions[-1] // BLOCK_SIZE + 1
                assert inputs.block_tables[group, index, :width].tolist() == table[:width]
            row.computed += count
            assert inputs.seq_lens[index] == row.computed
            assert inputs.num_logits[index] == (row.computed == len(row.tokens))
            at += count
            if inputs.num_logits[index] and not row.is_beam:
                self.sample(name)
        assert at == len(inputs.input_ids)

    def sample(self, name: str) -> None:
        token = self.rng.randrange(100)
        self.batch.append_tokens(self.batch.row_of[name], [token])
        self.rows[name].output.append(token)


@pytest.mark.parametrize("changes", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_traffic_keeps_rows_equal_to_a_rebuilt_batch(changes: int) -> None:
    traffic = Traffic(3)
    while 2 * traffic.number < changes:  # each sequence comes and goes
        traffic.step()
