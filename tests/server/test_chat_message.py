"""One choice of a chat: events become a message or deltas, the same ones however the text comes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.formats.message import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from quire.server.chat_message import ChoiceReader, PlainParser, delta, joined, whole_message
from tests.server.streams import add_deltas


class Letters:
    """A parser of a toy format, letter by letter: "r" and "c" are reasoning and content, ( begins a call of f, ) ends
    it, and what is between are its arguments. Nothing is passed on before the next letter is there."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = -1
        self._inside = False

    def feed(self, text: str) -> list[Event]:
        ready, self._held = (self._held + text)[:-1], (self._held + text)[-1:]
        return [event for letter in ready for event in self._read(letter)]

    def finish(self) -> list[Event]:
        return self._read(self._held)

    def _read(self, letter: str) -> list[Event]:
        if letter == "(":
            self._calls += 1
            self._inside = True
            return [CallStart(self._calls, "f")]
        if letter == ")":
            self._inside = False
            return [CallEnd(self._calls)]
        if self._inside:
            return [CallArguments(self._calls, letter)]
        return [ReasoningDelta(letter) if letter == "r" else ContentDelta(letter)]


def read(pieces: Iterable[str], reader: ChoiceReader) -> list[list[Event]]:
    *first, last = pieces
    return [*(reader.read(piece, False) for piece in first), reader.read(last, True)]


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    text=st.from_regex(r"(r{0,3}c{0,3}(\([ab]{0,3}\)){0,2}){0,3}(\(a)?", fullmatch=True),
    places=st.lists(st.integers(0, 100), max_size=6),
    shown=st.booleans(),
)
def test_deltas_add_up_to_the_message(text: str, places: list[int], shown: bool) -> None:
    whole = whole_message(ChoiceReader(Letters(), reasoning=shown), text)
    reader = ChoiceReader(Letters(), reasoning=shown)
    deltas = [delta(event) for events in read(cut(text, places), reader) for event in events]
    streamed = {"role": "assistant", "content": None, "refusal": None}
    add_deltas(streamed, [item for item in deltas if item is not None])
    if reader.is_empty:
        add_deltas(streamed, [{"content": ""}], last=True)
    assert without_ids(streamed) == without_ids(whole)
    for call in streamed.get("tool_calls", ()):
        assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
    assert ("reasoning" in whole) == (shown and "r" in text)
    assert (whole["content"] is None) == ("(" in text and "c" not in text)
    complete = re.search(r"\(\w*\)", text) is not None
    assert reader.finish_reason("stop") == ("tool_calls" if complete else "stop")
    assert reader.finish_reason("length") == "length"


def test_a_named_function_is_no_reason_of_its_own() -> None:
    reader = ChoiceReader(Letters(), named=True)
    assert "tool_calls" in whole_message(reader, "(a)")
    assert reader.finish_reason("stop") == "stop"


def test_ids_of_the_model_are_kept_and_others_are_unique() -> None:
    class Named(Letters):
        def _read(self, letter: str) -> list[Event]:
            return [
                CallStart(event.index, event.name, "functions.f:0") if type(event) is CallStart else event
                for event in super()._read(letter)
            ]

    message = whole_message(ChoiceReader(Named()), "(a)")
    assert message["tool_calls"] == [
        {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "a"}}
    ]
    many = whole_message(ChoiceReader(Letters()), "(a)" * 50)["tool_calls"]
    assert len({call["id"] for call in many}) == 50


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([ContentDelta(""), ReasoningDelta(""), CallArguments(0, "")], []),
        ([ContentDelta("a"), ContentDelta(""), ContentDelta("b")], [ContentDelta("ab")]),
        ([ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c")], [ReasoningDelta("ab"), ContentDelta("c")]),
        ([CallArguments(0, "a"), CallArguments(0, "b")], [CallArguments(0, "ab")]),
        (
            [CallArguments(0, "a"), CallEnd(0), CallStart(1, "f")],
            [CallArguments(0, "a"), CallEnd(0), CallStart(1, "f")],
        ),
    ],
)
def test_neighbours_are_joined_and_empty_events_left_out(events: list[Event], expected: list[Event]) -> None:
    assert joined(events) == expected


def test_a_message_without_parts_is_its_text() -> None:
    assert whole_message(ChoiceReader(PlainParser()), "a (b)") == {
        "role": "assistant",
        "content": "a (b)",
        "refusal": None,
    }
    assert whole_message(ChoiceReader(PlainParser()), "")["content"] == ""
