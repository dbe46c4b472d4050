"""What is replayed to another engine is what no output has ended yet, with the tokens that outputs had."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.messages import EngineOutputs
from quire.engine_request import EngineRequest
from quire.frontend.output_processor import OutputProcessor
from quire.sampling_params import SamplingParams
from quire.step import SchedulerStats, SequenceOutput


@dataclass
class Expected:
    """One request with what the engine has sent of it."""

    adds: list[EngineRequest]
    texts: dict[str, list[int]]
    states: dict[str, float]
    ended: set[str] = field(default_factory=set)


def make_adds(name: str, count: int, size: int) -> list[EngineRequest]:
    names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
    params = SamplingParams(seed=3, prompt_logprobs=2, prompt_logprob_start=1)
    return [
        EngineRequest(
            request_id=name if count <= size else f"{name}/{start}",
            prompt_token_ids=[1, 2, 3],
            sampling_params=params,
            arrival_time=5.0,
            sequence_ids=names[start : start + size],
            seeds=list(range(100 + start, 100 + start + size))[: count - start],
            stop_ids=[9],
            max_tokens=50,
            priority=2,
            cache_salt="salt",
        )
        for start in range(0, count, size)
    ]


@given(st.data())
def test_what_is_left_of_everything(data: st.DataObject) -> None:
    outputs = OutputProcessor(None)
    told: dict[str, Expected] = {}

    def process(output: SequenceOutput) -> None:
        outputs.process(EngineOutputs([output], SchedulerStats(), 1.0))

    for step in range(data.draw(st.integers(1, 40))):
        choice = data.draw(st.sampled_from(["begin", "token", "token", "token", "end", "leave"]))
        live = [(name, sequence) for name, item in told.items() for sequence in item.texts]
        live = [(name, sequence) for name, sequence in live if sequence not in told[name].ended]
        if choice == "begin" or not live:
            name = f"r{step}"
            adds = make_adds(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
            outputs.add(name, None, adds, adds[0].sampling_params)
            told[name] = Expected(adds, {sequence: [] for add in adds for sequence in add.sequence_ids}, {})
            continue
        name, sequence = data.draw(st.sampled_from(live))
        if choice == "token":
            told[name].texts[sequence].append(step)
            told[name].states[sequence] = step / 2
            process(SequenceOutput(sequence, [step], sampler_state=step / 2))
        elif choice == "end":
            told[name].ended.add(sequence)
            process(SequenceOutput(sequence, [], finish_reason="stop"))
        else:
            outputs.abort([name])
        if choice == "leave" or told[name].ended == set(told[name].texts):
            del told[name]
    assert outputs.request_ids == list(told)
    for name, item in told.items():
        check(outputs, name, item)
    outputs.fail_all(RuntimeError())
    assert outputs.request_ids == []


def check(outputs: OutputProcessor, name: str, item: Expected) -> None:
    again = outputs.replay(name)
    seeds = {s: seed for add in item.adds for s, seed in zip(add.sequence_ids, add.seeds, strict=True)}
    texts: dict[str, list[int]] = {}
    for add in again:
        assert (add.prompt_token_ids, add.arrival_time, add.max_tokens, add.stop_ids) == ([1, 2, 3], 5.0, 50, [9])
        assert (add.priority, add.cache_salt) == (2, "salt")
        assert add.seeds == [seeds[sequence] for sequence in add.sequence_ids]
        assert (add.sampling_params.prompt_logprobs is None) == (add.resumed is not None)
        for index, sequence in enumerate(add.sequence_ids):
            assert sequence not in texts
            texts[sequence] = [] if add.resumed is None else add.resumed[index].token_ids
            if add.resumed is not None:
                assert texts[sequence]
                assert add.resumed[index].sampler_state == item.states[sequence]
    assert texts == {sequence: text for sequence, text in item.texts.items() if sequence not in item.ended}
    assert len({add.request_id for add in again}) == len(again)
    assert outputs.owners([add.request_id for add in again]) == {name}
    assert outputs.owners([*texts, "unknown"]) == {name, "unknown"}
    assert sorted(outputs.engine_ids(name)) == sorted(texts)
    # What was handed over is not what the next tokens are appended to.
    for add in again:
        for part in add.resumed or ():
            part.token_ids.append(-1)
    assert [add for add in outputs.replay(name) if add.resumed and any(-1 in p.token_ids for p in add.resumed)] == []


def test_a_request_without_tokens_is_replayed_as_it_was() -> None:
    outputs = OutputProcessor(None)
    adds = make_adds("r", 3, 2)
    outputs.add("r", None, adds, adds[0].sampling_params)
    assert outputs.replay("r") == adds


@pytest.mark.parametrize("name", ["prompt_logprobs", "logprobs"])
def test_a_request_whose_parameters_were_not_copied_goes_on(name: str) -> None:
    params = SamplingParams(skip_clone=True, flat_logprobs=True, **{name: 1})
    outputs = OutputProcessor(None)
    add = EngineRequest("r", [1, 2], params, 0.0, sequence_ids=["r"], seeds=[3])
    outputs.add("r", None, [add], params)
    outputs.process(EngineOutputs([SequenceOutput("r", [5])], SchedulerStats(), 1.0))
    [again] = outputs.replay("r")
    assert again.resumed is not None and again.resumed[0].token_ids == [5]
