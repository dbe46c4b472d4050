"""`OutputBuilder`: whatever a model writes, the events of a stream tell the story of the output."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.formats.message import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from quire.server.responses.events import OutputBuilder, encode_event, obfuscated_event
from tests.server.responses.asking import check_story
from tests.server.responses.spec import check, check_event

TEXTS = st.text(min_size=1, max_size=5)
PARTS = st.one_of(
    st.tuples(st.just("reasoning"), st.lists(TEXTS, min_size=1, max_size=3)),
    st.tuples(st.just("content"), st.lists(TEXTS, min_size=1, max_size=3)),
    st.tuples(st.just("call"), st.lists(TEXTS, max_size=3)),
)


def written(parts: list[tuple[str, list[str]]], cut_off: bool) -> list[Event]:
    """Return the events of a message of these parts; the last call may be cut off."""
    events: list[Event] = []
    calls = 0
    for index, (kind, texts) in enumerate(parts):
        if kind == "reasoning":
            events += [ReasoningDelta(text) for text in texts]
        elif kind == "content":
            events += [ContentDelta(text) for text in texts]
        else:
            events += [CallStart(calls, "f"), *[CallArguments(calls, text) for text in texts]]
            if not (cut_off and index == len(parts) - 1):
                events.append(CallEnd(calls))
            calls += 1
    return events


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(PARTS, max_size=6), cuts=st.lists(st.integers(0, 30)), complete=st.booleans())
def test_any_message(parts: list[tuple[str, list[str]]], cuts: list[int], complete: bool) -> None:
    events = written(parts, not complete)
    places = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    builder = OutputBuilder()
    head: dict[str, Any] = {"id": "resp_1", "output": []}
    told = [builder.event(f"response.{kind}", response=head) for kind in ("created", "in_progress")]
    for start, end in itertools.pairwise(places):
        told += builder.add(events[start:end])
        for item in builder.output:  # at any time it can be shown
            check("OutputItem", item)
    told += builder.finish(complete=complete)
    for event in told[2:]:
        check_event(event)
    output = builder.output
    told.append(builder.event("response.completed", response={**head, "output": output}))
    check_story(told)
    said = {"reasoning": "", "message": "", "function_call": ""}
    for item in output:
        said[item["type"]] += item["arguments"] if "arguments" in item else item["content"][0]["text"]
    wanted = [("reasoning", "reasoning"), ("content", "message"), ("call", "function_call")]
    for kind, name in wanted:
        assert said[name] == "".join(["".join(texts) for part, texts in parts if part == kind])
    if complete:
        assert {item["status"] for item in output} == {"completed"}
        assert {"message", "function_call"} & {item["type"] for item in output}
    elif output:
        assert {item["status"] for item in output[:-1]} <= {"completed"}


def test_padding_changes_nothing_else() -> None:
    builder = OutputBuilder()
    event = builder.add([ContentDelta("né")])[-1]
    assert event["type"] == "response.output_text.delta"
    padded = obfuscated_event(encode_event(event))
    assert len(padded) == len(encode_event(event, obfuscated=True)) > len(encode_event(event))
    assert obfuscated_event(encode_event(builder.finish(complete=True)[-1])).count(b"obfuscation") == 0
