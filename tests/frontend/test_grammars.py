"""Grammars are compiled elsewhere, within limits: what is hostile costs a process and its own request."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from quire.errors import OverloadedError, RequestError
from quire.frontend.grammars import GrammarCompiler, StructuredOutputJob
from quire.frontend.worker_process import MAX_PROCESSES
from quire.structured_outputs import StructuredOutputParams
from tests.helpers.errors import refused
from tests.helpers.grammars import accepts


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler()
    yield compiler
    compiler.close()


def job(**form: Any) -> StructuredOutputJob:
    return StructuredOutputJob(StructuredOutputParams(**form))


def test_what_comes_back_is_a_grammar(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(job(regex="[a-c]+x"))
    assert grammar is not None and accepts(grammar, "abcx") and not accepts(grammar, "abc")


def test_an_answer_is_remembered(compiler: GrammarCompiler) -> None:
    wanted = job(choice=["tea", "coffee"])
    assert compiler.cached(wanted) is None
    first = compiler.compile(wanted)
    found = compiler.cached(job(choice=["tea", "coffee"]))
    assert found is not None and found.unwrap() is first
    assert compiler.cached(job(choice=["coffee", "tea"])) is None
    assert compiler.compile(job(choice=["tea", "coffee"])) is first


@pytest.mark.parametrize("again", [False, True])
def test_what_is_wrong_is_said_each_time(compiler: GrammarCompiler, again: bool) -> None:
    with pytest.raises(RequestError, match="position 0") as caught:
        compiler.compile(job(regex="[a"))
    assert caught.value.param == "structured_outputs.regex" and caught.value.code == "invalid_grammar"


def test_the_order_of_properties_arrives(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["a", "b"]}
    grammar = compiler.compile(job(json={**schema, "additionalProperties": False}, property_order="schema"))
    assert grammar is not None
    assert accepts(grammar, '{"b": null, "a": null}') and not accepts(grammar, '{"a": null, "b": null}')


def test_one_that_takes_too_long_is_stopped_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.frontend.worker_process.WALL_FACTOR", 1e4)
    impatient = GrammarCompiler(timeout=0.001)
    long = job(choice=[f"{number:060}" for number in range(1000)])
    try:
        with refused(code="grammar_too_complex"):
            impatient.compile(long)
        impatient._timeout = 60.0
        assert impatient.compile(job(regex="b+")) is not None
        assert impatient.compile(long) is not None, "that there was no time once is not remembered"
    finally:
        impatient.close()


def test_a_process_that_died_is_replaced() -> None:
    compiler = GrammarCompiler()
    try:
        compiler.compile(job(regex="a"))
        children = psutil.Process().children(recursive=True)
        for child in children:
            if "quire.frontend.grammars" in child.cmdline():
                child.kill()
                child.wait()
        assert compiler.compile(job(regex="b")) is not None
    finally:
        compiler.close()


def test_a_process_that_is_killed_at_its_job_costs_no_request() -> None:
    compiler = GrammarCompiler(timeout=30.0)
    try:
        compiler.compile(job(regex="a"))
        [worker] = compiler._workers._idle
        child = psutil.Process(worker.pid)
        child.suspend()
        answers: list[str | None] = []
        thread = threading.Thread(target=lambda: answers.append(compiler.compile(job(regex="killed"))))
        thread.start()
        while compiler._workers._idle:  # until the process was given the job
            pass
        child.kill()
        thread.join()
        assert len(answers) == 1 and answers[0] is not None and accepts(answers[0], "killed")
    finally:
        compiler.close()


def test_the_same_job_from_many_threads_is_done_once(compiler: GrammarCompiler) -> None:
    results: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: results.append(compiler.compile(job(regex="(many|threads){3}"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(result is results[0] for result in results)


def test_memory_for_answers_is_bounded() -> None:
    compiler = GrammarCompiler(cache_bytes=4000)
    try:
        for number in range(10):
            compiler.compile(job(choice=[f"{number}" + "x" * 500]))
        assert compiler._cached_bytes <= 4000 and compiler.cached(job(choice=["9" + "x" * 500]))
        assert compiler.cached(job(choice=["0" + "x" * 500])) is None
    finally:
        compiler.close()


def test_close_leaves_no_process() -> None:
    compiler = GrammarCompiler()
    compiler.compile(job(regex="a"))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    compiler.close()
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert before - after


def test_who_waits_too_long_for_a_compiler_is_told_to_come_back() -> None:
    compiler = GrammarCompiler(queue_timeout=0.0)
    try:
        for _ in range(MAX_PROCESSES):  # as if that many were at work
            assert compiler._workers._slots.acquire(timeout=0)
        with pytest.raises(OverloadedError, match="try again"):
            compiler.compile(job(regex="a"))
        compiler._workers._slots.release()
        assert compiler.compile(job(regex="a")) is not None
    finally:
        compiler.close()


def test_a_process_with_many_open_files_has_grammars_compiled() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("so many files may not be opened here")
    opened: list[int] = []
    compiler = GrammarCompiler()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
        while not opened or opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        assert compiler.compile(job(regex="a+")) is not None
    finally:
        compiler.close()
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
