"""Tokens that the device knows before the host: rows that begin with them, and what is taken down of them later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.engine_request import EngineRequest
from quire.kernels.create import create_backend
from quire.sampling_params import SamplingParams
from quire.step import NewSequenceData, SchedulerOutput
from quire.worker.input_batch import InputBatch

BLOCK_SIZE = 4


def new_sequence(name: str, tokens: list[int], blocks: list[int], **options: Any) -> NewSequenceData:
    return NewSequenceData(
        name, EngineRequest(name, tokens, SamplingParams(temperature=0.0, **options)), [blocks], seed=1
    )


def step_of(**changes: Any) -> SchedulerOutput:
    fields: dict[str, Any] = {
        "new_sequences": [],
        "continuing": [],
        "num_scheduled_tokens": {},
        "total_num_scheduled_tokens": 0,
        "finished_sequence_ids": [],
        "preempted_sequence_ids": [],
    }
    return SchedulerOutput(**{**fields, **changes})


def make_batch() -> InputBatch:
    batch = InputBatch(max_num_seqs=3, max_model_len=16, block_size=BLOCK_SIZE, vocab_size=100)
    batch.update(step_of(new_sequences=[new_sequence("a", [10, 11], [7]), new_sequence("b", [20, 21, 22], [5])]))
    return batch


def test_ids_come_from_the_device_where_the_host_does_not_know_them() -> None:
    batch = make_batch()
    rows = np.array([batch.row_of["a"]])
    assert batch.source_of_ids(batch.inputs({"a": 2, "b": 3})) is None
    positions = batch.append_unknown(rows)
    assert positions.tolist() == [2]
    batch.num_computed_tokens[rows] = 2
    inputs = batch.inputs({"b": 3, "a": 1})
    assert inputs.sampled.tolist() == [True, True]
    sources = batch.source_of_ids(inputs)
    assert sources is not None and sources.tolist() == [3, 4, 5, batch.row_of["a"]]
    assert batch.source_of_ids(batch.inputs({"b": 2})) is None
    batch.fill(rows, batch.births[rows], positions, np.array([42]))
    inputs = batch.inputs({"b": 3, "a": 1})
    assert inputs.input_ids.tolist() == [20, 21, 22, 42] and batch.source_of_ids(inputs) is None


def test_a_later_token_stays_unknown_when_an_earlier_one_is_taken_down() -> None:
    batch = make_batch()
    rows = np.array([batch.row_of["a"]])
    first, births = batch.append_unknown(rows), batch.births[rows]
    batch.append_unknown(rows)
    batch.fill(rows, births, first, np.array([42]))
    assert batch.output_ids(int(rows[0]))[0] == 42
    batch.num_computed_tokens[rows] = 3
    sources = batch.source_of_ids(batch.inputs({"a": 1}))
    assert sources is not None and sources.tolist() == rows.tolist()


def test_a_row_that_others_have_taken_hears_nothing() -> None:
    batch = make_batch()
    rows = np.array([batch.row_of["a"]])
    positions, births = batch.append_unknown(rows), batch.births[rows]
    new = new_sequence("a", [30, 31, 32, 33], [9])
    batch.update(step_of(finished_sequence_ids=["a"], new_sequences=[new]))
    assert batch.row_of["a"] == rows[0]
    batch.fill(rows, births, positions, np.array([42]))
    inputs = batch.inputs({"a": 4})
    assert inputs.input_ids.tolist() == [30, 31, 32, 33] and batch.source_of_ids(inputs) is None


def test_penalties_hear_of_a_token_when_it_is_taken_down() -> None:
    batch = make_batch()
    batch.update(step_of(new_sequences=[new_sequence("c", [5, 6], [3], presence_penalty=1.0)]))
    rows = np.array([batch.row_of["c"], batch.row_of["a"]])
    extras = batch.extras[rows[0]]
    assert extras is not None and extras.seen is not None
    positions = batch.append_unknown(rows)
    assert batch.late_places(np.array([batch.row_of["b"], *rows])).tolist() == [-1, *rows]
    assert extras.seen.counts.tolist() == [0, 0]
    batch.fill(rows, batch.births[rows], positions, np.array([6, 40]))
    assert batch.late_places(rows).tolist() == [-1, -1] and extras.seen.counts.tolist() == [0, 1]


@pytest.mark.parametrize("device", ["cpu", "reference", "cuda"])
def test_tokens_stay_where_they_are(device: str) -> None:
    backend = make_backend(device)
    put = backend.from_numpy
    last = backend.zeros((6,), "int64")
    finite = backend.rows_finite(put(np.array([[1.0], [np.nan], [2.0]], np.float32)))
    kept = backend.keep_tokens(last, put(np.array([4, 1, 0])), put(np.array([7, 8, 0])), finite)
    assert backend.fetch(kept)().tolist() == [7, -1, 0]
    assert backend.to_numpy(last).tolist() == [0, 0, 0, 0, 7, 0]
    target = backend.zeros((4,), "int64")
    backend.take_tokens(target[:3], last, put(np.array([4, 4, 1])))
    assert backend.to_numpy(target).tolist() == [7, 7, 0, 0]
    first, second = backend.mark(), backend.mark()
    assert 0.0 <= backend.seconds_between(first, second) < 1.0


def make_backend(device: str) -> Any:
    if device != "cuda":
        return create_backend(device, "float32", "float32", 1)
    import torch

    from quire.kernels.gpu.backend import GPUBackend

    return GPUBackend("float32", "float32", "cuda" if torch.cuda.is_available() else "cpu")
