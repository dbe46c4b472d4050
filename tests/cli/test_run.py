"""`quire run`: one prompt is answered once; without one there is the conversation of `quire chat`."""

from __future__ import annotations

import io
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "piped", "prompt"),
    [
        (["quire-demo", "Why is the sky blue?"], None, "Why is the sky blue?"),
        (["quire-demo", "Why", "is", "it", "blue?"], None, "Why is it blue?"),
        (["quire-demo", "--top-p", "0.5", "Why?", "--min-p", "0.1", "Say."], None, "Why? Say."),
        (["quire-demo", "--", "--why"], None, "--why"),
        (["quire-demo", "So", "--top-p", "0.5", "--", "--why", "-c"], None, "So --why -c"),
        (["quire-demo", "Sum", "up:"], ["one", "", "two"], "Sum up:\n\none\n\ntwo"),
        (["quire-demo"], ["  one", "two"], "  one\ntwo"),
        ([], ["one"], "one"),
    ],
)
def test_one_prompt_is_answered_once(quire, fake_llm, type_in, words, piped, prompt):
    type_in(*(piped or ()), tty=piped is None)
    result = quire("run", *words)
    assert (result.code, result.out, result.err) == (0, f"user:{prompt} back\n", "")
    assert [asked for asked, _ in fake_llm.requests] == [f"user:{prompt}"]
    assert fake_llm.closed


def test_at_a_terminal_without_a_prompt_it_is_the_chat(quire, fake_llm, type_in):
    type_in("hi", "there", tty=True)
    result = quire("run", "--system", "be brief")
    assert result.code == 0 and "/help" in result.out
    assert [asked for asked, _ in fake_llm.requests][-1].startswith("system:be brief|user:hi|assistant:")


def test_the_flags_are_those_of_the_chat(quire, fake_llm, type_in):
    type_in(tty=True)
    quire("run", "quire-demo", "hi", "--system", "be brief", "--temperature", "0", "--max-tokens", "7")
    ((asked, params),) = fake_llm.requests
    assert asked == "system:be brief|user:hi"
    assert (params.temperature, params.max_tokens) == (0, 7)


@pytest.mark.parametrize("command", ["run", "chat"])
def test_input_that_is_no_text_is_refused(quire, fake_llm, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x89PNG\xff"), encoding="latin-1"))
    result = quire(command)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "standard input is not UTF-8 text" in result.err


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(quire, fake_llm, type_in, monkeypatch):
    type_in(tty=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert quire("run", "quire-demo", "\x1b[2Jboo").out == "user:[2Jboo back\n"


def test_nothing_to_answer(quire, fake_llm, type_in):
    type_in("", " ")
    result = quire("run")
    assert result.code == 2 and "there is nothing to answer" in result.err
    assert fake_llm.config is None
