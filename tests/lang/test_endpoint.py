"""`OpenAIBackend` against an endpoint that continues a script: what is sent, what is refused, and speculation."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ConfigError, GenerationError, NotFoundError, OverloadedError, QuireError, UnsupportedError
from quire.lang import OpenAIBackend, State, assistant, gen, program, select, user
from tests.lang.endpoint import ScriptedEndpoint

CARD = "Name: Ada Lovelace\nBorn: 1815\nJob: mathematician\nEnd"


@program
def card(s: State, first: str = "Name:") -> None:
    """Three gens with the words between them that the script has, too."""
    s += first + gen("name", stop="\n", max_tokens=40)
    s += "\nBorn:" + gen("born", stop="\n", max_tokens=20)
    s += "\nJob:" + gen("job", stop="\n", max_tokens=20)


def values(state: State, *names: str) -> list[Any]:
    return [state[name] for name in names]


def test_plain_text_goes_to_completions_whole(endpoint: ScriptedEndpoint) -> None:
    endpoint.script = CARD
    with OpenAIBackend(endpoint.url) as backend:
        state = card.run(backend=backend, sampling={"temperature": 0.5}, seed=1)
    assert state.text() == "Name: Ada Lovelace\nBorn: 1815\nJob: mathematician"
    assert values(state, "name", "born", "job") == [" Ada Lovelace", " 1815", " mathematician"]
    assert state.messages() == []
    assert [body["prompt"] for body in endpoint.bodies] == [
        "Name:",
        "Name: Ada Lovelace\nBorn:",
        "Name: Ada Lovelace\nBorn: 1815\nJob:",
    ]
    first = endpoint.bodies[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("scripted", 0.5, 40)
    assert len({body["seed"] for body in endpoint.bodies}) == 3
    assert backend.num_calls == 3


def test_turns_go_to_chat_completions(endpoint: ScriptedEndpoint) -> None:
    @program
    def talk(s: State) -> None:
        s += user("What is your name?") + assistant(gen("name"))
        with s.user():
            s += "And "
            s += "your job?"
        s += assistant(gen("job", max_tokens=3))

    endpoint.script = "What is your name?I am Ada.And your job?mathematics"
    with OpenAIBackend(endpoint.url, "mine") as backend:
        state = talk.run(backend=backend)
    assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": "What is your name?"}]
    assert endpoint.bodies[1]["messages"] == state.messages()[:3]
    assert [body["model"] for body in endpoint.bodies] == ["mine", "mine"]
    assert [body["max_completion_tokens"] for body in endpoint.bodies] == [128, 3]
    assert state.messages()[-1] == {"role": "assistant", "content": "mat"}
    assert state.text().endswith("user: And your job?\nassistant: mat\n")
    assert state.capture("job").finish_reason == "length"


def test_forks_go_on_by_themselves(endpoint: ScriptedEndpoint) -> None:
    @program
    def parts(s: State) -> None:
        s += "one: "
        forks = s.fork(2)
        for fork, word in zip(forks, ["apple", "berry"], strict=True):
            fork += word + gen("rest", max_tokens=3)
        s.join(forks)
        s += gen("own", max_tokens=4)

    endpoint.script = "one: apple pie.one: berry jam."
    with OpenAIBackend(endpoint.url) as backend:
        state = parts.run(backend=backend)
    assert state["rest"] == [" pi", " ja"]
    assert state.text() == "one: berr"
    assert {body["prompt"] for body in endpoint.bodies} == {"one: apple", "one: berry", "one: "}


def test_streams_arrive_as_they_are_written(endpoint: ScriptedEndpoint) -> None:
    endpoint.script = CARD
    with OpenAIBackend(endpoint.url) as backend:
        stream = card.stream(backend=backend)
        pieces = list(stream)
        assert "".join(pieces) == stream.state.text()
        assert len(pieces) > 20
        assert "".join(card.stream(backend=backend, name="born")) == " 1815"


def test_what_only_some_endpoints_know_is_sent_to_those(endpoint: ScriptedEndpoint) -> None:
    schema = {"type": "object"}

    @program
    def forms(s: State) -> None:
        with s.assistant():
            s += "Score:"
            s += gen("score", regex="[1-5]", top_k=3) + gen("json", schema=schema)
            s += select("verdict", ["good", "bad"])

    with OpenAIBackend(endpoint.url, dialect="vllm") as backend:
        state = forms.run(backend=backend)
    assert state["verdict"] == "bad"
    first, second, third = endpoint.bodies
    assert (first["structured_outputs"], first["top_k"]) == ({"regex": "[1-5]"}, 3)
    assert second["structured_outputs"] == {"json": schema}
    assert third["structured_outputs"] == {"choice": ["good", "bad"]}
    assert third["messages"] == [{"role": "assistant", "content": "Score:"}]
    assert all(body["continue_final_message"] and not body["add_generation_prompt"] for body in endpoint.bodies)


def test_a_schema_in_a_chat_is_a_response_format(endpoint: ScriptedEndpoint) -> None:
    @program
    def ask(s: State) -> None:
        s += user("Who?") + assistant(gen("json", schema='{"type": "object"}'))

    with OpenAIBackend(endpoint.url) as backend:
        ask.run(backend=backend)
    wanted = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert endpoint.bodies[0]["response_format"] == {"type": "json_schema", "json_schema": wanted}


@pytest.mark.parametrize(
    ("dialect", "expression", "param", "text"),
    [
        ("openai", gen("x", regex="a+"), "regex", "a regex needs an endpoint with dialect='vllm'"),
        ("openai", gen("x", schema={"type": "object"}), "json", "in a turn"),
        ("basic", assistant(gen("x", schema={"type": "object"})), "json", "dialect='vllm'"),
        ("openai", select("x", ["a", "b"]), "choice", "dialect='vllm'"),
        ("vllm", select("x", ["a", "b"], method="logprob"), "method", "log-probability"),
        ("openai", gen("x", top_k=3), "top_k", "dialect='vllm'"),
        ("vllm", user(gen("x")), "role", "turn of user"),
        ("openai", assistant("Well, " + gen("x")), "dialect", "speculate=True"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused_before_a_call(
    endpoint: ScriptedEndpoint, dialect: str, expression: Any, param: str, text: str
) -> None:
    @program
    def one(s: State) -> None:
        s += expression

    with OpenAIBackend(endpoint.url, dialect=dialect) as backend, pytest.raises(UnsupportedError, match=text) as caught:
        one.run(backend=backend)
    assert caught.value.param == param
    assert endpoint.bodies == []


@pytest.mark.parametrize(("status", "kind"), [(400, ValueError), (404, NotFoundError), (500, QuireError)])
def test_what_an_endpoint_answers_is_what_is_raised(
    endpoint: ScriptedEndpoint, status: int, kind: type[Exception]
) -> None:
    endpoint.refuse = (status, "no such luck")
    with OpenAIBackend(endpoint.url, max_retries=0) as backend, pytest.raises(kind, match=f"{status}.*no such luck"):
        card.run(backend=backend)


def test_overload_and_silence_are_told_apart(endpoint: ScriptedEndpoint) -> None:
    endpoint.refuse = (429, "later")
    with OpenAIBackend(endpoint.url, max_retries=0) as backend, pytest.raises(OverloadedError, match="later"):
        card.run(backend=backend)
    gone = "http://127.0.0.1:9/v1"
    with OpenAIBackend(gone, "m", max_retries=0) as backend, pytest.raises(QuireError, match="did not answer"):
        card.run(backend=backend)


def test_filtered_text_is_an_error(endpoint: ScriptedEndpoint) -> None:
    endpoint.script, endpoint.finish_reason = CARD, "content_filter"
    with OpenAIBackend(endpoint.url) as backend, pytest.raises(GenerationError, match="content_filter"):
        card.run(backend=backend)


def test_a_cancelled_program_closes_its_connection(endpoint: ScriptedEndpoint) -> None:
    endpoint.script = CARD
    endpoint.hold.clear()
    with OpenAIBackend(endpoint.url) as backend:
        stream = card.stream(backend=backend, name="name")
        assert next(stream) == " "
        stream.close()
        assert endpoint.broken.wait(10)


def test_bad_options_of_the_backend_are_refused() -> None:
    with pytest.raises(ConfigError, match="dialect must be one of basic, openai, vllm"):
        OpenAIBackend("http://x/v1", dialect="klingon")
    with pytest.raises(ConfigError, match="speculated_tokens"):
        OpenAIBackend("http://x/v1", speculated_tokens=0)


# Speculation


def run_both(endpoint: ScriptedEndpoint, chosen: Any = card, **options: Any) -> tuple[State, State, int, int]:
    """Run without and with speculation; return both states and how many calls each made."""
    states, calls = [], []
    for speculate in (False, True):
        with OpenAIBackend(endpoint.url, speculate=speculate, **options) as backend:
            states.append(chosen.run(backend=backend))
            calls.append(backend.num_calls)
    assert sum(calls) == len(endpoint.bodies)
    return states[0], states[1], calls[0], calls[1]


def test_several_gens_come_out_of_one_call(endpoint: ScriptedEndpoint) -> None:
    endpoint.script = CARD
    plain, speculated, many, few = run_both(endpoint)
    assert (many, few) == (3, 1)
    assert speculated.text() == plain.text()
    assert values(speculated, "name", "born", "job") == values(plain, "name", "born", "job")
    assert [speculated.capture(name).speculated for name in ("name", "born", "job")] == [True] * 3
    assert "stop" not in endpoint.bodies[-1]
    assert endpoint.bodies[-1]["max_tokens"] == 40 + 64


def test_other_words_than_the_models_need_a_call(endpoint: ScriptedEndpoint) -> None:
    @program
    def other(s: State) -> None:
        s += "Name:" + gen("name", stop="\n")
        s += "\nJob:" + gen("job", stop="\n")

    endpoint.script = CARD + "|ovelace\nJob: countess"
    plain, speculated, many, few = run_both(endpoint, other)
    assert (many, few) == (2, 2)
    assert speculated.text() == plain.text() == "Name: Ada Lovelace\nJob: countess"


@pytest.mark.parametrize("most", [1, 5, 100])
@pytest.mark.parametrize(("extra", "end"), [(1, ""), (7, "\n"), (64, "\nEnd")])
def test_results_are_the_same_whatever_fits(endpoint: ScriptedEndpoint, most: int, extra: int, end: str) -> None:
    @program
    def short(s: State) -> None:
        s += "Born:" + gen("born", stop=["\n", "5\n"], max_tokens=most)
        s += "\nJob:" + gen("job", stop="\n", max_tokens=14)
        s += gen("rest", max_tokens=3)

    endpoint.script = "Born: 1815\nJob: mathematician" + end
    plain, speculated, many, few = run_both(endpoint, short, speculated_tokens=extra)
    assert speculated.text() == plain.text()
    for name in ("born", "job", "rest"):
        both = plain.capture(name), speculated.capture(name)
        assert both[0].text == both[1].text
        assert both[0].finish_reason == both[1].finish_reason
    assert few <= many + 2  # a guess that cannot be used costs a call


def test_forks_use_the_surplus_each(endpoint: ScriptedEndpoint) -> None:
    @program
    def forked(s: State) -> None:
        s += "Name:" + gen("name", stop="\n", max_tokens=20)
        forks = s.fork(2)
        for fork in forks:
            fork += "\nBorn:" + gen("born", stop="\n", max_tokens=20)
        s.join(forks)

    endpoint.script = CARD
    plain, speculated, many, few = run_both(endpoint, forked)
    assert (many, few) == (3, 1)
    assert speculated["born"] == plain["born"] == [" 1815", " 1815"]


def test_other_sampling_options_need_a_call(endpoint: ScriptedEndpoint) -> None:
    @program
    def warmer(s: State) -> None:
        s += "Name:" + gen("name", stop="\n", temperature=0.0)
        s += "\nBorn:" + gen("born", stop="\n", temperature=1.0)

    endpoint.script = CARD
    assert run_both(endpoint, warmer)[2:] == (2, 2)


def test_a_turn_in_the_models_own_form_comes_out_of_one_call(endpoint: ScriptedEndpoint) -> None:
    """The usual case: OpenAI's API, which cannot go on within a turn."""

    @program
    def show(s: State) -> None:
        s += user("Write a card: ")
        s += assistant("Name:" + gen("name", stop="\n") + "\nBorn:" + gen("born", stop="\n"))
        s += user("Write a card: ")
        s += assistant("Wrong:" + gen("name", stop="\n"))

    endpoint.script = "Write a card: " + CARD
    with OpenAIBackend(endpoint.url, speculate=True) as backend:
        with pytest.raises(UnsupportedError, match="its own turn is another one: 'Name: Ada"):
            show.run(backend=backend)
        assert backend.num_calls == 2
    assert endpoint.bodies[1]["messages"][1]["content"] == "Name: Ada Lovelace\nBorn: 1815"


def test_a_turn_that_can_go_on_goes_on_after_a_wrong_guess(endpoint: ScriptedEndpoint) -> None:
    @program
    def show(s: State) -> None:
        s += assistant("Name:" + gen("name", stop="\n") + "\nJob:" + gen("job", stop="\n"))

    endpoint.script = CARD + "|ovelace\nJob: countess"
    plain, speculated, many, few = run_both(endpoint, show, dialect="vllm")
    assert (many, few) == (2, 2)
    assert (
        speculated.messages()
        == plain.messages()
        == [{"role": "assistant", "content": "Name: Ada Lovelace\nJob: countess"}]
    )


def test_a_form_is_never_guessed(endpoint: ScriptedEndpoint) -> None:
    @program
    def constrained(s: State) -> None:
        s += "Name:" + gen("name", stop="\n")
        s += "\nBorn:" + gen("born", regex=" [0-9]+", stop="\n")

    endpoint.script = CARD
    with OpenAIBackend(endpoint.url, speculate=True, dialect="vllm") as backend:
        constrained.run(backend=backend)
    assert [body.get("structured_outputs") for body in endpoint.bodies] == [None, {"regex": " [0-9]+"}]
