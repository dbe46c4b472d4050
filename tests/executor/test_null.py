"""The executor without a model does what a step says, so that the engine can be tested with it."""

from __future__ import annotations

import math

from quire.engine_request import EngineRequest
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams
from quire.step import ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput
from tests.helpers.transfers import disk_load


def new(sequence_id: str, tokens: list[int], computed: int = 0, num_candidates: int = 0) -> NewSequenceData:
    return NewSequenceData(
        sequence_id,
        EngineRequest(sequence_id, tokens, SamplingParams()),
        [[0]],
        computed,
        seed=1,
        num_candidates=num_candidates,
    )


def step_of(scheduled: dict[str, int], **changes: object) -> SchedulerOutput:
    fields: dict[str, object] = {
        "new_sequences": [],
        "continuing": [],
        "num_scheduled_tokens": scheduled,
        "total_num_scheduled_tokens": sum(scheduled.values()),
        "finished_sequence_ids": [],
        "preempted_sequence_ids": [],
    }
    return SchedulerOutput(**{**fields, **changes})


def test_a_token_follows_the_last_one_once_all_are_computed() -> None:
    null = NullExecutor(10)
    assert null.execute(step_of({"a": 2}, new_sequences=[new("a", [5, 6, 9])])).sampled_token_ids == {}
    output = null.execute(step_of({"a": 1}, continuing=[ContinuingSequenceData("a", [], 2)]))
    assert output.sampled_token_ids == {"a": [0]}
    output = null.execute(step_of({"a": 1}, continuing=[ContinuingSequenceData("a", [], 3)]))
    assert output.sampled_token_ids == {"a": [1]}


def test_forks_that_sample_differ_and_go_on_by_themselves() -> None:
    null = NullExecutor(100)
    forks = [ForkData("a", "b", 1, samples=True), ForkData("a", "c", 2, samples=True)]
    output = null.execute(step_of({"a": 3}, new_sequences=[new("a", [1, 2, 3])], forks=forks))
    assert output.sampled_token_ids == {"a": [4], "b": [5], "c": [6]}
    continuing = [ContinuingSequenceData(name, [], 3) for name in "ac"]
    output = null.execute(step_of({"a": 1, "c": 1}, continuing=continuing, finished_sequence_ids=["b"]))
    assert output.sampled_token_ids == {"a": [5], "c": [7]}


def test_beams_get_candidates_and_go_on_with_what_they_are_told() -> None:
    null = NullExecutor(100)
    output = null.execute(step_of({"a": 2}, new_sequences=[new("a", [7, 8], num_candidates=3)]))
    assert output.sampled_token_ids == {}
    assert output.candidates["a"].token_ids == [9, 9, 10, 11]
    assert output.candidates["a"].logprobs == [math.log(p) for p in (0.5, 0.5, 0.25, 0.125)]
    step = step_of(
        {"a": 1, "b": 1},
        forks=[ForkData("a", "b", 1)],
        continuing=[
            ContinuingSequenceData("a", [], 2, new_token_ids=[9]),
            ContinuingSequenceData("b", [], 2, new_token_ids=[98]),
        ],
    )
    output = null.execute(step)
    assert output.candidates["a"].token_ids == [10, 10, 11, 12]
    assert output.candidates["b"].token_ids == [99, 99, 0, 1]


def test_loads_end_at_once() -> None:
    output = NullExecutor().execute(step_of({}, transfers=[disk_load(4, 0, b""), disk_load(2, 1, b"")]))
    assert output.loaded == {4: True, 2: True}
    assert output.sampled_token_ids == {}
