"""Requests of several sequences: `best_of`, beam search, tenants; synchronously and from an asyncio loop."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from quire import BeamSearchOutput, BeamSearchParams, SamplingParams
from quire.engine.messages import EngineOutputs
from quire.engine_request import EngineRequest
from quire.errors import GenerationError, QuireError, RequestError
from quire.sampling_params import RequestOutputKind
from quire.step import SchedulerStats, SequenceOutput
from tests.frontend.test_async_llm import on_fake, settle
from tests.frontend.test_output_processor import Rig
from tests.helpers.errors import refused
from tests.helpers.fake_engine import (
    FakeClient,
    fake_front_model,
    fake_llm,
    reply_with,
    small_tokenizer,
    small_tokenizer_ids,
)
from tests.helpers.requests import engine_requests

REPLIES = "hello world, hello||abc||ab||abcd"  # shorter ones are likelier: each token has the same log-probability


# best_of


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_the_n_likeliest_of_best_of_are_returned_best_first(kind: RequestOutputKind) -> None:
    rig = Rig(REPLIES)
    [output] = rig.run(rig.add(n=2, best_of=4, output_kind=kind))
    assert [(item.index, item.text) for item in output.outputs] == [(0, "ab"), (1, "abc")]
    assert [item.cumulative_logprob for item in output.outputs] == [-0.75 * 3, -0.75 * 4]
    assert all(item.logprobs is None for item in output.outputs)
    assert output.finished
    assert output.num_generated_tokens == sum(step[1] for step in rig.listener.steps) == 7 + 4 + 3 + 5
    [done] = rig.listener.finished
    assert (done.n, done.num_sequences, done.num_generation_tokens) == (2, 4, 19)


def test_logprobs_of_best_of_are_shown_if_asked_for() -> None:
    rig = Rig(REPLIES)
    [output] = rig.run(rig.add(best_of=4, logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY))
    [item] = output.outputs
    assert [len(entry) for entry in item.logprobs or []] == [2, 2, 2]
    assert item.cumulative_logprob == -0.75 * 3


def test_best_of_n_is_n() -> None:
    rig = Rig(REPLIES)
    outputs = rig.run(rig.add(n=2, best_of=2, output_kind=RequestOutputKind.DELTA))
    assert len(outputs) > 1
    assert outputs[-1].outputs[-1].cumulative_logprob is None


def test_stop_strings_count_before_completions_are_ranked() -> None:
    rig = Rig("hello world, hello||abc")
    [output] = rig.run(rig.add(best_of=2, stop=["hello"]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("", "hello")


@pytest.mark.parametrize("failed", ["r-1", "r-2"])
def test_nobody_is_told_the_best_of_those_that_did_not_fail(failed: str) -> None:
    rig = Rig(REPLIES)
    state = rig.add(best_of=4)
    rig.engine.fail_on.add(failed)
    [output] = rig.run(state)
    assert output.outputs[0].finish_reason == "error"
    assert isinstance(output.outputs[0].error, GenerationError)


def test_aborting_best_of_says_so() -> None:
    rig = Rig(REPLIES)
    state = rig.add(best_of=3)
    for _ in range(4):
        rig.step()
    assert rig.outputs.abort(["r"]) == ["r-0"], "the others have ended"
    output = state.take()
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")


def test_offline_best_of_several_prompts() -> None:
    llm, _ = fake_llm(reply=reply_with(small_tokenizer(), "hello world", "ab", "abcdef", "hello"))
    outputs = llm.generate(["x", "y"], SamplingParams(best_of=2, max_tokens=50), use_tqdm=False)
    assert [[item.text for item in output.outputs] for output in outputs] == [["ab"], ["hello"]]


# Beam search


def beam_reply(request: EngineRequest) -> list[int]:
    """Beam of rank r: r + 1 letters "b", then end-of-text."""
    eos = small_tokenizer().eos_token_id
    assert eos is not None
    return [small_tokenizer_ids()["b"]] * (request.seeds[0] + 1) + [eos]


def test_beams_come_best_first_in_vllms_shape() -> None:
    llm, engine = fake_llm(reply=beam_reply)
    params = BeamSearchParams(beam_width=3, max_tokens=3, length_penalty=2.0)
    outputs = llm.beam_search([{"prompt": "hello"}, {"prompt_token_ids": [5, 6]}, "a"], params)
    assert all(isinstance(output, BeamSearchOutput) for output in outputs)
    first, second, third = outputs[0].sequences
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("hello")
    b, eos = small_tokenizer_ids()["b"], tokenizer.eos_token_id
    assert [item.tokens for item in outputs[0].sequences] == [[*prompt, b], [*prompt, b, b], [*prompt, b, b, b]]
    assert [item.text for item in outputs[0].sequences] == ["hellob", "hellobb", "hellobbb"]
    assert [item.cum_logprob for item in outputs[0].sequences] == [-1.0, -2.0, -3.0]
    assert [item.score for item in outputs[0].sequences] == [-1 / 4, -2 / 9, -3 / 9]
    assert (first.finish_reason, first.stop_reason) == ("stop", eos)
    assert (second.finish_reason, third.finish_reason, third.stop_reason) == ("stop", "length", None)
    assert first.logprobs == []
    assert outputs[1].sequences[0].tokens == [5, 6, b]
    assert [add.prompt_token_ids for add in engine.added] == [prompt, [5, 6], tokenizer.encode("a")]


def test_what_the_engine_is_told_of_a_beam_search() -> None:
    llm, engine = fake_llm(reply=beam_reply, max_model_len=32)
    params = BeamSearchParams(beam_width=2, max_tokens=1000, early_stopping="never")
    llm.beam_search([5, 6], params, priority=2, tenant="ann")
    [add] = engine.added
    assert add.request_id == "0"
    assert (add.sequence_ids, add.seeds, add.max_tokens) == (["0"], [0], 30)
    assert add.beam == params.clone(max_tokens=30)
    assert (add.stop_ids, add.priority, add.tenant) == ([llm.get_tokenizer().eos_token_id], 2, "ann")
    llm.beam_search([5, 6], params.clone(ignore_eos=True))
    assert engine.added[-1].stop_ids == []


@pytest.mark.parametrize(
    ("options", "text", "kept"),
    [
        ({}, "b", False),
        ({"include_stop_str_in_output": True}, "b", True),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "b<|im_end|>", True),
    ],
)
def test_the_end_of_a_beam_shows_only_if_asked_for(options: dict[str, Any], text: str, kept: bool) -> None:
    llm, _ = fake_llm(reply=beam_reply)
    params = BeamSearchParams(beam_width=1, **options)
    [output] = llm.beam_search([small_tokenizer_ids()["a"]], params)
    [beam] = output.sequences
    assert beam.text == "a" + text
    assert (beam.tokens[-1] == llm.get_tokenizer().eos_token_id) == kept
    assert beam.finish_reason == "stop"

    async def test(llm: Any, client: FakeClient) -> None:
        stream = await llm.submit("a", params.sampling_params())
        [result] = [output async for output in stream]
        assert result.outputs[0].text == text

    on_fake(test, reply=beam_reply)


def test_bad_beam_searches_are_refused_before_any_work() -> None:
    llm, engine = fake_llm(max_num_seqs=4)
    for prompts, params, param in (
        ("x", SamplingParams(), "params"),
        ("x", None, "params"),
        ("x", BeamSearchParams(beam_width=5), "n"),
        (["x", ""], BeamSearchParams(beam_width=2), "prompts[1]"),
        ([{"text": "x"}], BeamSearchParams(beam_width=2), "prompt"),
    ):
        with refused(param):
            llm.beam_search(prompts, params)  # type: ignore[arg-type]
    assert engine.added == []
    assert llm.beam_search([], BeamSearchParams(beam_width=2)) == []


def test_a_search_that_fails_says_why() -> None:
    llm, engine = fake_llm(reply=beam_reply)
    engine.fail_on.add("0")
    with pytest.raises(GenerationError, match="not finite"):
        llm.beam_search("x", BeamSearchParams(beam_width=2))
    engine.refuse_on.add("1")
    with pytest.raises(RequestError, match="65 blocks"):
        llm.beam_search("x", BeamSearchParams(beam_width=2))
    assert len(llm.beam_search("x", BeamSearchParams(beam_width=2))[0].sequences) == 2


def test_beams_without_a_tokenizer_have_no_text() -> None:
    front = dataclasses.replace(fake_front_model(), tokenizer=None, chat_template=None)
    llm, _ = fake_llm(front_model=front, reply=beam_reply)
    [output] = llm.beam_search([5], BeamSearchParams(beam_width=2))
    assert [beam.text for beam in output.sequences] == ["", ""]
    assert output.sequences[0].tokens == [5, small_tokenizer_ids()["b"]]


def test_counts_of_a_beam_search() -> None:
    rig = Rig("hello||ab")
    params = SamplingParams(n=1, best_of=2, use_beam_search=True)
    [add] = engine_requests(rig.processor, "x", params, "b", arrival_time=0.0)
    state = rig.outputs.add("b", "x", [add], params)
    rig.engine.send(add)
    [output] = rig.run(state)
    assert output.num_generated_tokens == 2 + 3
    assert [(item.index, item.cumulative_logprob) for item in output.outputs] == [(0, -1.0)]
    assert rig.listener.steps == [(1, 5)]
    [done] = rig.listener.finished
    assert (done.n, done.num_sequences, done.num_generation_tokens, done.finish_reason) == (1, 2, 5, "stop")
    assert rig.outputs.num_unfinished == 0


def test_beam_search_from_a_loop() -> None:
    params = BeamSearchParams(beam_width=2)

    async def test(llm: Any, client: FakeClient) -> None:
        first, second = await asyncio.gather(llm.beam_search("a", params), llm.beam_search("b", params, "mine"))
        assert [item.text for item in first.sequences] == ["ab", "abb"]
        assert [item.text for item in second.sequences] == ["bb", "bbb"]
        client.hold()
        task = asyncio.create_task(llm.beam_search("a", params, "gone"))
        await settle()
        assert client.engine.live == ["gone"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.engine.aborted == ["gone"]
        task = asyncio.create_task(llm.beam_search("a", params, "ended"))
        await settle()
        await llm.abort("ended")
        with pytest.raises(QuireError, match="aborted"):
            await task

    on_fake(test, reply=beam_reply)


# Tenants, and requests as the engine sees them


def test_tenants_are_passed_on() -> None:
    llm, engine = fake_llm()
    llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False, tenant=["x", "y"])
    llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), use_tqdm=False, tenant="z")
    llm.generate("c", SamplingParams(max_tokens=1), use_tqdm=False)
    assert [add.tenant for add in engine.added] == ["x", "y", "z", ""]
    for bad in (5, "x" * 257, ["a", "b"]):
        with refused("tenant"):
            llm.generate("c", use_tqdm=False, tenant=bad)  # type: ignore[arg-type]

    async def test(llm: Any, client: FakeClient) -> None:
        async for _ in llm.generate("x", SamplingParams(max_tokens=1), tenant="w"):
            pass
        assert client.engine.added[-1].tenant == "w"

    on_fake(test)


def test_ids_of_the_parts_of_an_unfinished_request_cannot_be_taken() -> None:
    llm, _ = fake_llm(max_num_seqs=2)
    processor = llm._requests.inputs
    outputs = llm._requests.outputs

    def add(request_id: str, **fields: Any) -> None:
        params = SamplingParams(**fields)
        outputs.add(request_id, "x", engine_requests(processor, "x", params, request_id, arrival_time=0.0), params)

    add("r", n=5)
    for taken in ("r", "r/1", "r-4"):
        with refused(code="duplicate_request_id"):
            add(taken)
    assert outputs.abort(["r"]) == [f"r-{index}" for index in range(5)]
    add("r/1")
    with pytest.raises(RequestError):
        add("r", n=5)


def test_a_request_in_several_parts_is_one_to_its_caller() -> None:
    llm, engine = fake_llm(max_num_seqs=2)
    params = SamplingParams(n=5, max_tokens=4, prompt_logprobs=0)
    [output] = llm.generate("hello you", params, use_tqdm=False)
    assert [item.index for item in output.outputs] == [0, 1, 2, 3, 4]
    assert len({item.text for item in output.outputs}) == 5
    assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids)
    assert len(engine.added) == 3


def test_preemptions_of_a_request_are_counted_once_however_many_sequences_report_them() -> None:
    rig = Rig("x")
    params = SamplingParams(n=2)
    add = EngineRequest("p", [5], params.clone(n=1), max_tokens=8, sequence_ids=["p-0", "p-1"], seeds=[1, 2])
    state = rig.outputs.add("p", "a", [add], params)
    for count in (1, 2, 2):
        news = [SequenceOutput(name, [5], num_preemptions=count) for name in add.sequence_ids]
        rig.outputs.process(EngineOutputs(news, SchedulerStats(), 1.0))
    output = state.take()
    assert output is not None
    assert output.metrics.num_preemptions == 2
    assert [item.token_ids for item in output.outputs] == [[5, 5, 5], [5, 5, 5]]
