"""The persistent batch equals one rebuilt from scratch, whatever came and went before."""

from __future__ import annotations

import random

import numpy as np

from quire.sampling_params import SamplingParams
from quire.step import ContinuingSequenceData, NewSequenceData, SchedulerOutput
from quire.worker.input_batch import InputBatch

BLOCK_SIZE = 4


def new_sequence(request_id: str, tokens: list[int], blocks: list[int], computed: int = 0) -> NewSequenceData:
    return NewSequenceData(
        sequence_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling_params=SamplingParams(),
        seed=1,
        stop_ids=[],
        bad_words_ids=[],
        block_ids=[blocks],
        num_computed_tokens=computed,
    )


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
    assert inputs.sampled.tolist() == [True, True]
    assert batch.inputs({"a": 1}).sampled.tolist() == [False]


def test_random_traffic_keeps_rows_equal_to_a_rebuilt_batch() -> None:
    rng = random.Random(3)
    batch = InputBatch(max_num_seqs=6, max_model_len=64, block_size=BLOCK_SIZE, vocab_size=100)
    model: dict[str, tuple[list[int], list[int], int]] = {}  # id -> tokens, blocks, computed
    for number in range(3000):
        changes: dict[str, list[object]] = {"new_sequences": [], "continuing": [], "finished_sequence_ids": []}
        for request_id in [r for r in model if rng.random() < 0.2 or len(model[r][0]) > 60]:
            del model[request_id]
            changes["finished_sequence_ids"].append(request_id)
        while len(model) < 6 and rng.random() < 0.5:
            tokens = [rng.randrange(100) for _ in range(rng.randint(1, 20))]
            blocks = [rng.randrange(1000) for _ in range(-(-len(tokens) // BLOCK_SIZE))]
            request_id = f"r{number}-{len(model)}"
            model[request_id] = (tokens, blocks, 0)
            changes["new_sequences"].append(new_sequence(request_id, list(tokens), list(blocks)))
        fresh = {data.sequence_id for data in changes["new_sequences"]}  # type: ignore[attr-defined]
        scheduled = {}
        for request_id, (tokens, blocks, computed) in model.items():
            scheduled[request_id] = rng.randint(1, len(tokens) - computed)
            if request_id not in fresh:
                added = [] if len(blocks) * BLOCK_SIZE >= len(tokens) else [rng.randrange(1000)]
                blocks.extend(added)
                changes["continuing"].append(ContinuingSequenceData(request_id, [added], computed))
        batch.update(step_of(**changes))
        if scheduled:
            check_and_advance(batch, model, scheduled, rng)


def check_and_advance(
    batch: InputBatch, model: dict[str, tuple[list[int], list[int], int]], scheduled: dict[str, int], rng: random.Random
) -> None:
    inputs = batch.inputs(scheduled)
    at = 0
    for index, (request_id, count) in enumerate(scheduled.items()):
        tokens, blocks, computed = model[request_id]
        positions = range(computed, computed + count)
        assert inputs.input_ids[at : at + count].tolist() == [tokens[p] for p in positions]
        assert inputs.positions[at : at + count].tolist() == list(positions)
        expected = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
        assert inputs.slot_mapping[0, at : at + count].tolist() == expected
        assert inputs.sampled[index] == (computed + count == len(tokens))
        at += count
        model[request_id] = (tokens, blocks, computed + count)
        if inputs.sampled[index]:
            token = rng.randrange(100)
            batch.append(inputs.rows[index : index + 1], np.array([token]))
            tokens.append(token)
    assert at == len(inputs.input_ids)
