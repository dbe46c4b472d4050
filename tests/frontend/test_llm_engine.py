"""The engine that its caller drives step by step, as vLLM's `LLMEngine`."""

from __future__ import annotations

import pytest

from quire import RequestOutput, SamplingParams
from quire.errors import EngineAsleepError, EngineDeadError, RequestError
from quire.sampling_params import RequestOutputKind
from tests.helpers.fake_engine import fake_llm


def run(engine, seen: dict[str, list[RequestOutput]]) -> None:
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.setdefault(output.request_id, []).append(output)


def test_requests_are_added_and_steps_return_what_is_new() -> None:
    llm, _ = fake_llm()
    engine, seen = llm.llm_engine, dict[str, list[RequestOutput]]()
    engine.add_request("a", "hello", SamplingParams(max_tokens=3, seed=1))
    engine.add_request(
        "b", {"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=2, output_kind=RequestOutputKind.DELTA)
    )
    assert engine.get_num_unfinished_requests() == 2
    run(engine, seen)
    assert engine.step() == []
    assert [len(output.outputs[0].token_ids) for output in seen["a"]] == [1, 2, 3]
    assert [len(output.outputs[0].token_ids) for output in seen["b"]] == [1, 1]
    assert [output.finished for output in seen["a"]] == [False, False, True]
    alone = llm.generate("hello", SamplingParams(max_tokens=3, seed=1), use_tqdm=False)[0]
    assert seen["a"][-1].outputs[0].text == alone.outputs[0].text


def test_an_aborted_request_returns_nothing_more() -> None:
    llm, _ = fake_llm()
    engine, seen = llm.llm_engine, dict[str, list[RequestOutput]]()
    for name in ("a", "b"):
        engine.add_request(name, "hello", SamplingParams(max_tokens=4))
    engine.step()
    engine.abort_request("a")
    run(engine, seen)
    assert list(seen) == ["b"] and seen["b"][-1].finished


def test_bad_requests_are_refused_and_the_others_go_on() -> None:
    llm, _ = fake_llm()
    engine, seen = llm.llm_engine, dict[str, list[RequestOutput]]()
    engine.add_request("a", "hello", SamplingParams(max_tokens=2))
    with pytest.raises(RequestError):
        engine.add_request("a", "hello", SamplingParams(max_tokens=2))
    with pytest.raises(RequestError):
        engine.add_request("b", [], SamplingParams(max_tokens=2))
    run(engine, seen)
    assert list(seen) == ["a"]


def test_asleep_and_closed() -> None:
    llm, _ = fake_llm()
    with pytest.raises(RequestError, match="tags must be of weights, kv_cache, got 'all'"):
        llm.wake_up(tags=["all"])
    llm.wake_up(tags=["kv_cache"])
    llm.sleep()
    with pytest.raises(EngineAsleepError):
        llm.llm_engine.add_request("a", "hello", SamplingParams(max_tokens=2))
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.llm_engine.step()
