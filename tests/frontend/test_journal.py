"""The journal against a list of everything that was said: what is replayed is what is missing, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from quire.engine_request import EngineRequest
from quire.frontend.journal import Journal, Progress
from quire.sampling_params import SamplingParams


@dataclass
class Told:
    """One request, as an engine that heard everything knows it."""

    adds: list[EngineRequest]
    texts: dict[str, list[int]]
    states: dict[str, float]
    ended: set[str] = field(default_factory=set)


def make_adds(name: str, count: int, size: int) -> list[EngineRequest]:
    names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
    params = SamplingParams(n=count, seed=3, prompt_logprobs=2, prompt_logprob_start=1)
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
    journal = Journal()
    told: dict[str, Told] = {}
    progress: dict[str, Progress] = {}
    for step in range(data.draw(st.integers(1, 40))):
        choice = data.draw(st.sampled_from(["begin", "token", "token", "token", "end", "leave"]))
        live = [(name, sequence) for name, item in told.items() for sequence in item.texts]
        live = [(name, sequence) for name, sequence in live if sequence not in told[name].ended]
        if choice == "begin" or not live:
            name = f"r{step}"
            adds = make_adds(name, data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
            fresh = {sequence: Progress() for add in adds for sequence in add.sequence_ids}
            journal.begin(name, adds, fresh)
            progress |= fresh
            told[name] = Told(adds, {sequence: [] for sequence in fresh}, {})
            continue
        name, sequence = data.draw(st.sampled_from(live))
        if choice == "token":
            told[name].texts[sequence].append(step)
            told[name].states[sequence] = step / 2
            progress[sequence].token_ids.append(step)
            progress[sequence].sampler_state = step / 2
        elif choice == "end":
            told[name].ended.add(sequence)
            journal.end_sequence(name, sequence)
        if choice == "leave" or told[name].ended == set(told[name].texts):
            journal.end(name)
            del told[name]
    assert journal.request_ids == list(told)
    for name, item in told.items():
        check(journal, name, item)
    journal.clear()
    assert journal.request_ids == []


def check(journal: Journal, name: str, item: Told) -> None:
    again = journal.replay(name)
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
    assert journal.owners([add.request_id for add in again]) == {name}
    assert journal.owners([*texts, "nobody"]) == {name, "nobody"}
    assert sorted(journal.engine_ids(name)) == sorted(texts)
    # What was handed over is not what the next tokens are appended to.
    for add in again:
        for part in add.resumed or ():
            part.token_ids.append(-1)
    assert [add for add in journal.replay(name) if add.resumed and any(-1 in p.token_ids for p in add.resumed)] == []


def test_a_request_without_tokens_is_told_as_it_was() -> None:
    journal = Journal()
    adds = make_adds("r", 3, 2)
    journal.begin("r", adds, {sequence: Progress() for add in adds for sequence in add.sequence_ids})
    assert journal.replay("r") == adds
