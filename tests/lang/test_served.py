"""Programs against a real `quire serve`, and the examples, in this process's model and on the server."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable

import pytest

from quire.lang import LocalBackend, OpenAIBackend, State, assistant, gen, program, select, user
from tests.helpers.server import Server
from tests.meta.source import ROOT

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    """The demo model, served."""
    return demo_server


@program
def play(s: State) -> None:
    s += "KING RICHARD:\nWhat says he to our marriage?\n\nQUEEN:\nMy lord," + gen("first", max_tokens=20, stop="\n")
    forks = s.fork(3)
    for index, fork in enumerate(forks):
        fork += f"\n\nNUMBER {index}:\n" + gen("line", max_tokens=8)
    s.join(forks)


@program
def chat(s: State) -> None:
    s += user("What is the opposite of black?")
    s += assistant("The opposite of" + gen("first", max_tokens=20))
    s += user('Reverse the word "stone".') + assistant(gen("second"))


def test_the_same_comes_from_a_server_as_from_this_process(server: Server, backend: LocalBackend) -> None:
    with OpenAIBackend(server.url + "/v1", dialect="vllm") as remote:
        for one in (play, chat):
            here = one.run(backend=backend, sampling=GREEDY)
            there = one.run(backend=remote, sampling=GREEDY)
            assert there.text() == here.text()
            assert there.messages() == here.messages()
            assert there["first"] == here["first"]


def test_forks_share_the_servers_cache(server: Server) -> None:
    with OpenAIBackend(server.url + "/v1", dialect="vllm") as remote:
        state = play.run(backend=remote, sampling=GREEDY)
    first, lines = state.capture("first"), state.capture("line")
    assert all(line.num_cached_tokens >= first.num_prompt_tokens for line in lines)


def test_a_server_answers_two_gens_with_one_call(server: Server) -> None:
    @program
    def card(s: State) -> None:
        s += "KING RICHARD:\nAy, if the" + gen("first", stop="\n", max_tokens=60)
        s += "\n\n" + gen("name", stop="\n", max_tokens=60)

    texts = []
    for speculate in (False, True):
        with OpenAIBackend(server.url + "/v1", speculate=speculate) as remote:
            texts.append(card.run(backend=remote, sampling=GREEDY).text())
            assert remote.num_calls == (1 if speculate else 2)
    assert texts[0] == texts[1]


def test_forms_are_enforced_by_the_server(server: Server) -> None:
    @program
    def formed(s: State) -> None:
        s += "Score:" + gen("score", regex=" [1-5]") + "\nVerdict: " + select("verdict", ["good", "bad"])

    with OpenAIBackend(server.url + "/v1", dialect="vllm") as remote:
        states = formed.run_batch([{}] * 4, backend=remote, sampling={"temperature": 1.5}, seed=1)
    for state in states:
        assert state["score"] in (" 1", " 2", " 3", " 4", " 5")
        assert state["verdict"] in ("good", "bad")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run an example as a script, but in this process, whose kernels are compiled; return what it prints."""

    def run_example(name: str, *words: str) -> str:
        path = str(ROOT / "examples" / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [path, *words])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run_example


EXAMPLES = {
    "lang_self_consistency": "What is 38 plus 47? -> 38 + 47 = 85",
    "lang_tree_of_thought": "17 + 25 + 31 + 12 = ",
    "lang_json_agent": "answer: ",
}


@pytest.mark.parametrize(
    "example", [name if name == "lang_json_agent" else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES]
)
def test_examples_run(run: Callable[..., str], example: str) -> None:
    assert EXAMPLES[example] in run(example)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["lang_self_consistency", "lang_json_agent"])
def test_examples_run_on_a_server(run: Callable[..., str], server: Server, example: str) -> None:
    assert EXAMPLES[example] in run(example, "--base-url", server.url + "/v1")


def test_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "lang.md").read_text("utf-8")
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) > 5
    exec("\n".join(blocks), {"__name__": "page"})
    assert "cached" in capsys.readouterr().out
