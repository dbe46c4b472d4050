"""What callers see of a request: text, stop strings, logprobs, times; the same in all three kinds of output."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from quire.engine.messages import AbortRequests, EngineOutputs
from quire.engine_request import EngineRequest
from quire.frontend.output_processor import OutputProcessor, RequestState
from quire.frontend.stats import FinishedRequest
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.step import SchedulerStats, SequenceOutput, TokenTopLogprobs
from tests.helpers.errors import refused
from tests.helpers.fake_engine import FakeEngine, reply_with, small_tokenizer
from tests.helpers.requests import engine_requests, input_processor

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Listener:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.first: list[float] = []
        self.next: list[float] = []
        self.finished: list[FinishedRequest] = []

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        self.steps.append((num_prompt_tokens, num_generation_tokens))

    def on_first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def on_next_token(self, seconds: float) -> None:
        self.next.append(seconds)

    def on_finished(self, request: FinishedRequest) -> None:
        self.finished.append(request)


class Rig:
    """An output processor on a fake engine, by hand."""

    def __init__(self, reply_text: str = "hello world", *, tokens_per_step: int = 1, **engine: Any) -> None:
        self.tokenizer = small_tokenizer()
        vocab = self.tokenizer.vocab_size
        self.engine = FakeEngine(
            vocab_size=vocab,
            reply=reply_with(self.tokenizer, *reply_text.split("||")),
            tokens_per_step=tokens_per_step,
            **engine,
        )
        self.listener = Listener()
        self.outputs = OutputProcessor(self.tokenizer, [self.listener])
        eos = self.tokenizer.eos_token_id
        assert eos is not None
        self.processor = input_processor(self.tokenizer, max_model_len=256, eos_token_ids=(eos,))

    def add(self, request_id: str = "r", prompt: str = "hello", **params: Any) -> RequestState:
        chosen = SamplingParams(**{"max_tokens": 100, **params})
        adds = engine_requests(self.processor, prompt, chosen, request_id, arrival_time=0.0)
        state = self.outputs.add(request_id, prompt, adds, chosen)
        for add in adds:
            self.engine.send(add)
        return state

    def step(self) -> tuple[list[RequestState], list[str]]:
        return self.outputs.process(self.engine.step())

    def run(self, state: RequestState) -> list[RequestOutput]:
        taken = []
        while not state.finished:
            self.step()
            output = state.take()
            if output is not None:
                taken.append(output)
        return taken


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5])
@pytest.mark.parametrize("stop", [None, ["wor"], ["o w"], ["zzz"]])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_all_kinds_of_output_say_the_same(tokens_per_step: int, stop: list[str] | None, logprobs: int | None) -> None:
    results = {}
    for kind in RequestOutputKind:
        rig = Rig("hello world, hello 😀 world", tokens_per_step=tokens_per_step)
        outputs = rig.run(rig.add(output_kind=kind, stop=stop, logprobs=logprobs))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        items = [output.outputs[0] for output in outputs]
        if kind == DELTA:
            assert len(items) > 1 or stop
            text = "".join(item.text for item in items)
            ids = [token for item in items for token in item.token_ids]
            entries = None if logprobs is None else [entry for item in items for entry in item.logprobs or []]
        else:
            assert len(items) == 1 or kind == CUMULATIVE
            text, ids, entries = items[-1].text, items[-1].token_ids, items[-1].logprobs
            for before, after in itertools.pairwise(items):
                assert after.text.startswith(before.text)
                assert after.token_ids[: len(before.token_ids)] == before.token_ids
        last = items[-1]
        results[kind] = (text, ids, entries, last.finish_reason, last.stop_reason, last.cumulative_logprob)
    assert results[CUMULATIVE] == results[DELTA] == results[FINAL_ONLY]
    text, ids, entries, *_ = results[DELTA]
    assert text == {None: "hello world, hello 😀 world", "wor": "hello ", "o w": "hell"}.get(
        stop[0] if stop else None, "hello world, hello 😀 world"
    )
    if logprobs is not None:
        assert entries is not None
        assert len(entries) == len(ids)


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    rig = Rig("hello world, hello", tokens_per_step=6)
    state = rig.add(stop=["o w"], logprobs=0)
    _, aborts, _ = rig.step()
    assert aborts == ["r"]
    output = state.take()
    assert output is not None
    item = output.outputs[0]
    assert (item.text, item.finish_reason, item.stop_reason) == ("hell", "stop", "o w")
    assert rig.tokenizer.decode(item.token_ids) == "hello wor"
    assert item.logprobs is not None
    assert len(item.logprobs) == len(item.token_ids) == 2
    assert item.cumulative_logprob == pytest.approx(-1.5)
    rig.engine.send(EngineRequest("other", [1], SamplingParams(), max_tokens=5))
    assert rig.outputs.num_unfinished == 0
    rig.step()  # news of the aborted request, on its way already, are ignored
    assert state.take() is None


def test_the_stop_string_may_be_kept() -> None:
    rig = Rig("hello world, hello")
    outputs = rig.run(rig.add(stop=[", h"], include_stop_str_in_output=True, output_kind=DELTA))
    assert "".join(output.outputs[0].text for output in outputs) == "hello world, h"
    assert outputs[-1].outputs[0].stop_reason == ", h"


def test_a_stop_string_in_the_last_token_beats_length() -> None:
    rig = Rig("hello world")
    outputs = rig.run(rig.add(stop=["ld"], max_tokens=3))
    item = outputs[-1].outputs[0]
    assert (item.text, item.finish_reason, item.stop_reason) == ("hello wor", "stop", "ld")
    assert rig.engine.aborted == []


def test_held_back_text_comes_out_at_the_end() -> None:
    rig = Rig("hello wo")
    outputs = rig.run(rig.add(stop=["world"], output_kind=DELTA))
    assert "".join(output.outputs[0].text for output in outputs) == "hello wo"
    rig = Rig("hello wo")
    outputs = rig.run(rig.add(stop=["world"], max_tokens=3))
    assert outputs[-1].outputs[0].text == "hello wo"
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_end_of_text_shows_only_if_asked_for() -> None:
    for options, expected in (
        ({}, "hello"),
        ({"skip_special_tokens": False}, "hello"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello<|im_end|>"),
    ):
        rig = Rig("hello")
        item = rig.run(rig.add(**options))[-1].outputs[0]
        assert (item.text, item.finish_reason, item.stop_reason) == (expected, "stop", None)
        assert item.token_ids[-1] == rig.tokenizer.eos_token_id


def test_stop_token_ids_are_named_and_leave_no_text() -> None:
    tokenizer = small_tokenizer()
    [world] = tokenizer.encode(" wor")
    rig = Rig("hello world")
    item = rig.run(rig.add(stop_token_ids=[world]))[-1].outputs[0]
    assert (item.text, item.finish_reason, item.stop_reason) == ("hello", "stop", world)
    assert item.token_ids[-1] == world


def test_without_detokenization_there_are_ids_only() -> None:
    rig = Rig("hello world")
    item = rig.run(rig.add(detokenize=False))[-1].outputs[0]
    assert item.text == ""
    assert len(item.token_ids) == 4


def test_several_completions_in_one_output() -> None:
    for kind in RequestOutputKind:
        rig = Rig("hello world||abc||hello hello hello")
        outputs = rig.run(rig.add(n=3, output_kind=kind))
        texts = ["", "", ""]
        for output in outputs:
            for item in output.outputs:
                texts[item.index] = texts[item.index] + item.text if kind == DELTA else item.text
        assert texts == ["hello world", "abc", "hello hello hello"]
        assert outputs[-1].finished
        if kind != DELTA:
            assert [item.index for item in outputs[-1].outputs] == [0, 1, 2]
        assert len(rig.listener.finished) == 1
        assert rig.listener.finished[0].n == 3


def test_a_slow_reader_gets_merged_deltas() -> None:
    rig = Rig("hello world, hello world")
    state = rig.add(output_kind=DELTA, logprobs=0)
    for _ in range(3):
        rig.step()
    first = state.take()
    assert first is not None
    assert state.take() is None
    while not state.finished:
        rig.step()
    second = state.take()
    assert second is not None
    assert (first.outputs[0].text, second.outputs[0].text) == ("hello world", ", hello world")
    assert len(first.outputs[0].logprobs or []) == len(first.outputs[0].token_ids) == 3
    assert state.take() is None


def test_logprobs_have_the_chosen_token_and_the_best_ones() -> None:
    rig = Rig("hello")
    item = rig.run(rig.add(logprobs=3))[-1].outputs[0]
    assert item.logprobs is not None
    entry = item.logprobs[0]
    chosen = item.token_ids[0]
    assert next(iter(entry)) == chosen
    assert (entry[chosen].rank, entry[chosen].decoded_token, entry[chosen].logprob) == (2, "hello", -0.75)
    assert {info.rank for info in entry.values()} == {1, 2, 3}
    assert entry[chosen - 1].rank == 1
    assert all(info.decoded_token == rig.tokenizer.token_text(token) for token, info in entry.items())


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_prompt_logprobs_are_put_together_and_delivered_with_the_first_token(kind: RequestOutputKind) -> None:
    rig = Rig("hello")
    state = rig.add("p", prompt="abcd", prompt_logprobs=1, output_kind=kind)
    tokens = state.prompt_token_ids

    def news(new_token_ids: list[int], predicted: list[int]) -> RequestOutput | None:
        entries = [TokenTopLogprobs([token, 9], [-1.0, -0.5], 4) for token in predicted]
        output = SequenceOutput(sequence_id="p", new_token_ids=new_token_ids, prompt_logprobs=entries)
        rig.outputs.process(EngineOutputs([output], SchedulerStats(), 1.0))
        return state.take()

    assert news([], tokens[1:3]) is None
    first = news([5], tokens[3:])
    assert first is not None
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [next(iter(entry or {})) for entry in first.prompt_logprobs[1:]] == tokens[1:]
    second = news([6], tokens[1:3])  # computed again after a preemption
    assert second is not None
    assert second.prompt_logprobs == (None if kind == DELTA else first.prompt_logprobs)


def test_times_and_counts_of_a_request() -> None:
    rig = Rig("x")
    state = rig.add("m", prompt="abc", max_tokens=3)

    def news(now: float, **fields: Any) -> None:
        fields.setdefault("new_token_ids", [5])
        rig.outputs.process(EngineOutputs([SequenceOutput(sequence_id="m", **fields)], SchedulerStats(), now))

    news(3.0, first_scheduled_time=1.0, num_cached_tokens=2)
    news(4.0, num_preemptions=1)
    news(6.0, num_preemptions=1, finish_reason="length")
    output = state.take()
    assert output is not None
    assert output.num_cached_tokens == 2
    metrics = output.metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time) == (1.0, 3.0, 6.0)
    assert (metrics.finished_time, metrics.num_preemptions) == (6.0, 1)
    assert rig.listener.first == [3.0]
    assert rig.listener.next == [1.0, 2.0]
    assert rig.listener.steps == [(3, 1), (0, 1), (0, 1)]
    [done] = rig.listener.finished
    assert (done.num_prompt_tokens, done.num_generation_tokens, done.max_tokens, done.n) == (3, 3, 3, 1)
    times = done.metrics
    assert (times.e2e_seconds, times.queue_seconds, times.prefill_seconds) == (6.0, 1.0, 2.0)
    assert (times.decode_seconds, times.inference_seconds) == (3.0, 5.0)
    assert (done.finish_reason, done.num_cached_tokens, times.num_preemptions) == ("length", 2, 1)


def test_an_error_in_the_engine_ends_the_request() -> None:
    rig = Rig("hello")
    state = rig.add()
    rig.engine.fail_on.add("r")
    rig.step()
    output = state.take()
    assert output is not None
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")


def test_aborting_ends_all_completions_once() -> None:
    rig = Rig("hello world, hello world")
    state = rig.add(n=2)
    rig.step()
    assert rig.outputs.abort(["r", "nobody"]) == ["r-0", "r-1"]
    assert rig.outputs.abort(["r"]) == []
    output = state.take()
    assert output is not None
    assert output.finished
    assert [(item.text, item.finish_reason) for item in output.outputs] == [("hello", "abort")] * 2
    assert rig.outputs.num_unfinished == 0
    assert rig.listener.finished[0].finish_reason == "abort"


def test_ids_of_unfinished_requests_cannot_be_taken_again() -> None:
    rig = Rig("hello")
    rig.add("a", n=2)
    for request_id in ("a", "a-1"):
        with refused(code="duplicate_request_id"):
            rig.add(request_id)
    rig.outputs.abort(["a"])
    rig.engine.send(AbortRequests(request_ids=["a-0", "a-1"]))
    assert rig.run(rig.add("a"))[-1].finished


def test_what_a_delta_reader_has_taken_is_not_kept_but_for_tokens() -> None:
    rig = Rig("hello world " * 20)
    state = rig.add(output_kind=DELTA, logprobs=0, max_tokens=80)
    while not state.finished:
        rig.step()
        state.take()
        completion = state.completions[0]
        assert not completion.text_parts
        assert not completion.logprobs
