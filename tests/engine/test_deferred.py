"""Requests whose grammar is being compiled: they wait, are aborted or refused, and others run meanwhile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.core import DEFERRED_WAIT_SECONDS, EngineCore
from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest, LoRARequest
from quire.errors import EngineAsleepError, QuireError, RequestError
from quire.executor.null import NullExecutor
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.step import AdapterResult, SequenceOutput
from quire.structured.lark import grammar_failed


class Compiler(NullExecutor):
    """Says that a grammar is ready when the test does. It is its own store of grammars."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.users: Counter[str] = Counter()
        self.finished: dict[str, str | None] = {}
        self.waits: list[float] = []

    @property
    def grammars(self) -> Compiler:  # type: ignore[override]
        return self

    def end_ids(self) -> list[int]:
        return [12]

    def prepare(self, grammar: str) -> None:
        self.users[grammar] += 1

    def poll(self, wait: float = 0.0) -> dict[str, str | None]:
        self.waits.append(wait)
        finished, self.finished = self.finished, {}
        return finished

    def release(self, grammar: str) -> None:
        self.users[grammar] -= 1

    def in_use(self) -> set[str]:
        return {grammar for grammar, number in self.users.items() if number}


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def core(folder: Path, compiler: Compiler) -> EngineCore:
    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    return EngineCore(config, executor=compiler, info=load_model_info(folder))


class AdapterLoader(NullExecutor):
    """Loads adapters when the test says so, or fails to begin. It is its own store of adapters."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.error: RequestError | None = None
        self.finished: dict[str, AdapterResult] = {}

    @property
    def adapters(self) -> AdapterLoader:  # type: ignore[override]
        return self

    def prepare(self, request: LoRARequest, user: str) -> None:
        if self.error is not None:
            raise self.error
        self.user = user

    def poll(self, wait: float = 0.0) -> dict[str, AdapterResult]:
        finished, self.finished = self.finished, {}
        return finished

    def release(self, number: int, user: str) -> None:
        assert user == self.user


def test_sleep_waits_for_adapters_and_a_load_that_cannot_begin_is_none(folder: Path) -> None:
    loader = AdapterLoader()
    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    core = EngineCore(config, executor=loader, info=load_model_info(folder))
    adapter = {"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"}
    answers: list[dict[str, Any] | QuireError] = []
    loader.error = RequestError("no room for another adapter")
    with pytest.raises(RequestError, match="no room"):
        core.load_lora(adapter, answers.append)
    assert not core.has_unfinished()
    loader.error = None
    core.load_lora(adapter, answers.append)
    core.step()
    assert core.has_unfinished() and not answers
    with pytest.raises(RequestError, match="loading an adapter"):
        core.call("sleep", {"level": 1})
    loader.finished = {loader.user: AdapterResult(vocab_size=5)}
    core.step()
    assert not core.has_unfinished() and [answer["vocab_size"] for answer in answers] == [5]
    core.load_lora(adapter, answers.append)
    loader.finished = {loader.user: AdapterResult(error="no such folder")}
    core.step()
    error = answers[1]
    assert isinstance(error, RequestError) and error.message == "the adapter a cannot be used: no such folder"
    assert (error.param, error.code) == ("lora_path", "invalid_adapter")
    assert core.call("sleep", {"level": 1})["level"] == 1
    core.load_lora(adapter, answers.append)  # the weights are there
    loader.finished = {loader.user: AdapterResult(vocab_size=5)}
    core.step()
    assert len(answers) == 3
    assert core.call("sleep", {"level": 2})["level"] == 2
    with pytest.raises(EngineAsleepError, match="without its weights"):
        core.load_lora(adapter, answers.append)
    assert core.call("unload_lora", {"lora_int_id": 1}) == {}


def request(
    name: str, grammar: str | None, num_sequences: int = 1, beam: BeamSearchParams | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        sequence_ids=[name] if num_sequences == 1 else [f"{name}-{index}" for index in range(num_sequences)],
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(),
        arrival_time=0.0,
        seeds=[0] * num_sequences,
        stop_ids=[],
        max_tokens=4,
        grammar=grammar,
        beam=beam,
    )


def run(core: EngineCore, most: int = 100) -> dict[str, SequenceOutput]:
    """Step until there is nothing to do; return the last news of each sequence."""
    last = {}
    for _ in range(most):
        if not core.has_unfinished():
            break
        for news in core.step().outputs:
            last[news.sequence_id] = news
    return last


def test_the_wait_for_a_grammar_is_no_step_time(folder: Path, compiler: Compiler) -> None:
    now = [0.0]
    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    core = EngineCore(config, executor=compiler, info=load_model_info(folder), clock=lambda: now[0])
    core.add(request("first", None))
    core.add(request("later", "start: /a/"))
    for now[0] in range(10, 19):  # "first" ends after some of these steps
        core.step()
    seconds = core.call("stats")["step_seconds"]
    assert 3.0 <= seconds <= 4.0
    compiler.finished = {"start: /a/": None}
    for now[0] in range(100, 109):
        core.step()
    assert not core.has_unfinished()
    assert core.call("stats")["step_seconds"] == 2 * seconds


def test_a_request_waits_for_its_grammar_while_others_run(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("later", "start: /a/"))
    core.add(request("now", None))
    outputs = core.step()
    assert [news.sequence_id for news in outputs.outputs] == ["now"]
    assert (outputs.stats.num_running, outputs.stats.num_waiting) == (1, 1)
    assert compiler.waits == [0.0]  # the others must not wait for it
    last = run(core, 10)
    assert set(last) == {"now"}
    assert core.has_unfinished()
    assert compiler.waits[-1] == DEFERRED_WAIT_SECONDS  # but with nobody else the loop must not spin
    assert core.call("stats")["num_waiting"] == 1
    compiler.finished = {"start: /a/": None}
    assert run(core)["later"].finish_reason == "length"
    assert compiler.in_use() == set()


def test_all_requests_of_one_grammar_begin_together(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("a", "start: /a/"))
    core.add(request("b", "start: /a/", num_sequences=3))
    core.add(request("c", "start: /c/"))
    compiler.finished = {"start: /a/": None}
    assert set(run(core, 20)) == {"a", "b-0", "b-1", "b-2"}
    assert compiler.in_use() == {"start: /c/"}
    compiler.finished = {"start: /unknown/": None, "start: /c/": None}
    assert set(run(core)) == {"c"}


def test_a_grammar_that_failed_is_an_error_of_each_sequence(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("bad", "start: x", num_sequences=2))
    core.add(request("good", "start: /a/"))
    compiler.finished = {"start: x": grammar_failed("x is not there"), "start: /a/": None}
    last = run(core)
    for name in ("bad-0", "bad-1"):
        assert (last[name].finish_reason, last[name].error) == ("error", grammar_failed("x is not there"))
    assert last["good"].finish_reason == "length"
    assert compiler.in_use() == set()
    core.add(request("bad", None))  # the name is free again
    assert run(core)["bad"].finish_reason == "length"


def test_names_are_taken_while_a_grammar_is_compiled(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("a", "start: /a/", num_sequences=2))
    core.add(request("b", None))
    for name, grammar, number in [
        ("a", None, 1),
        ("a", "start: /a/", 1),
        ("b", "start: /a/", 1),
        ("a-1", "start: /b/", 1),
        ("a-0", None, 1),
    ]:
        with pytest.raises(RequestError, match="in use already"):
            core.add(request(name, grammar, number))
    assert compiler.users == {"start: /a/": 1}
    compiler.finished = {"start: /a/": None}
    assert set(run(core)) == {"a-0", "a-1", "b"}


def test_aborts_reach_requests_that_are_not_queued_yet(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("a", "start: /a/"))
    core.add(request("b", "start: /a/", num_sequences=3))
    core.add(request("c", "start: /a/", num_sequences=2))
    core.abort(AbortRequests(["a", "b-0", "b-2", "c-0", "c-1", "nobody"]))
    assert compiler.users["start: /a/"] == 1
    compiler.finished = {"start: /a/": None}
    assert set(run(core)) == {"b-1"}
    assert compiler.in_use() == set()
    core.add(request("a", "start: /a/"))
    core.abort(AbortRequests(["a"]))
    assert not core.has_unfinished()
    assert compiler.in_use() == set()
    core.call("check_integrity")


def test_failed_grammars_say_nothing_of_aborted_sequences(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("b", "start: x", num_sequences=3))
    core.abort(AbortRequests(["b-1"]))
    compiler.finished = {"start: x": "wrong"}
    assert set(run(core)) == {"b-0", "b-2"}


def test_beams_end_where_their_text_does_whatever_else_ends_them(core: EngineCore, compiler: Compiler) -> None:
    """Token 12, which ends texts, comes late in these beams, and none goes on behind it."""
    for name, grammar in (("with", "start: /a/"), ("without", None)):
        message = request(name, grammar, beam=BeamSearchParams(beam_width=2, max_tokens=20))
        message.max_tokens = 20
        core.add(message)
    compiler.finished = {"start: /a/": None}
    last = run(core)
    assert last["without"].beams is not None
    assert last["with"].beams is not None
    assert any(12 in beam.token_ids[:-1] for beam in last["without"].beams)
    assert not any(12 in beam.token_ids[:-1] for beam in last["with"].beams)
    assert any(beam.token_ids[-1] == 12 for beam in last["with"].beams)


def test_closing_with_requests_that_wait(core: EngineCore) -> None:
    core.add(request("a", "start: /a/"))
    core.close()


def test_beams_get_no_id_of_a_request_that_waits(core: EngineCore, compiler: Compiler) -> None:
    core.add(request("a#1", "grammar"))
    core.add(request("a", None, beam=BeamSearchParams(beam_width=2, max_tokens=20)))
    core.step()
    compiler.finished = {"grammar": None}
    outputs = [output for _ in range(40) for output in core.step().outputs]
    assert {output.sequence_id for output in outputs if output.finish_reason} == {"a", "a#1"}
