"""Decoding and encoding JSON in pieces gives what doing it at once gives, within bounds."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.server import json_io
from quire.server.errors import HTTPProblem
from quire.server.json_io import decode_in_pieces, encode_in_pieces, is_simple
from quire.server.parsing import parse_json
from tests.helpers.live_server import LiveServer

NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=9)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(st.integers(-9, 10**6), max_size=60)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=25,
)


def outcome(read: Any, text: str) -> tuple[str, str]:
    try:
        return "value", repr(read(text))
    except ValueError as error:
        return type(error).__name__, str(error)


@settings(max_examples=100, deadline=None)
@given(
    VALUES, st.none() | st.tuples(st.floats(0, 1), st.sampled_from(["", ",", "]", "}", '"', "1", "-", "e", " ", "x"]))
)
def test_decoding_in_pieces_changes_nothing(value: Any, wound: tuple[float, str] | None) -> None:
    text = json.dumps(value)
    if wound is not None:  # mostly not JSON any more
        place = int(wound[0] * len(text))
        text = text[:place] + wound[1] + text[place + 1 :]
    assert outcome(decode_in_pieces, text) == outcome(json.loads, text)


@pytest.mark.parametrize("size", [0, 1, 20_000])
def test_long_lists_of_numbers(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(json_io, "PIECE", 4096)
    numbers = [1000 + index for index in range(size)]
    assert decode_in_pieces(json.dumps([numbers, numbers])) == [numbers, numbers]
    assert decode_in_pieces(json.dumps(numbers, separators=(",", ":\n"))) == numbers
    for wrong in ("1,,2", "1 2", ",1", "1,", "01", "+1", "1.", "-"):
        text = "[" + "5," * size + wrong + "]"
        assert outcome(decode_in_pieces, text) == outcome(json.loads, text)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.integers(1, 300))
def test_what_is_written_patiently_is_read_as_it_was(value: dict[str, Any], count: int) -> None:
    value = {**value, "choices": [{"logprobs": {"content": [{"token": "a", "bytes": [97]}] * count}, **value}] * 2}
    assert json.loads(encode_in_pieces(value)) == json.loads(msgspec.json.encode(value))
    assert json.loads(encode_in_pieces({"positions": [None, {5: {"rank": 1}}] * count}))["positions"][1] == {
        "5": {"rank": 1}
    }


def test_a_long_text_is_simple() -> None:
    assert is_simple(json.dumps({"prompt": "a" * 10**6}).encode())
    assert not is_simple(json.dumps({"prompt": "a" * 2**20}).encode())
    assert not is_simple(b"[" + b"[]," * 10_000 + b"[]]")


@pytest.mark.parametrize(
    "part", [b"[]", b"{}", b'""', b'{"a":1}', b'["x"]', b"[" * 60 + b"]" * 60], ids=lambda part: part.decode()[:8]
)
def test_a_body_has_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(json_io, "MAX_VALUES", 20_000)
    with pytest.raises(HTTPProblem, match="values") as problem:
        parse_json(b'{"prompt":[' + b",".join([part] * 45_000) + b"]}")
    assert problem.value.status == 413
    few = parse_json(b'{"prompt":[' + b",".join([part] * 3_000 if part != b"[" * 60 + b"]" * 60 else [part]) + b"]}")
    assert len(few["prompt"]) in (1, 3_000)


def num_values(value: Any) -> int:
    """Return how many values JSON has, without those of lists of numbers."""
    if isinstance(value, dict):
        return 1 + sum(map(num_values, value.values()))
    if isinstance(value, list) and not all(type(item) in (int, float) for item in value):
        return 1 + sum(map(num_values, value))
    return 1


TEXTS = st.text(st.sampled_from('\\":[{}], a'), max_size=9)
ODD = st.recursive(
    TEXTS, lambda inner: st.lists(inner, max_size=9) | st.dictionaries(TEXTS, inner, max_size=9), max_leaves=60
)


@settings(max_examples=200, deadline=None)
@given(VALUES | ODD, st.integers(1, 40), st.sampled_from([None, 1]))
def test_no_more_values_are_counted_than_there_are(value: Any, piece: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_io, "PIECE", piece)
        patch.setattr(json_io, "MAX_VALUES", num_values(value))
        json_io._check_num_values(json.dumps(value, indent=indent))


@pytest.mark.parametrize("escaped", [r"\\", r"\"", r"\\\"", "\\\\" * 40])
def test_values_are_counted_wherever_the_text_is_cut(monkeypatch: pytest.MonkeyPatch, escaped: str) -> None:
    monkeypatch.setattr(json_io, "MAX_VALUES", 1000)
    for piece in (100, 101, 102):
        monkeypatch.setattr(json_io, "PIECE", piece)
        text = "[" + ",".join([f'{{"[{escaped}{{":[]}}'] * 1000) + "]"
        json.loads(text)
        with pytest.raises(json_io.TooManyValuesError):
            json_io._check_num_values(text)


def test_too_many_keys_are_refused_before_all_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_io, "MAX_VALUES", 20_000)
    with pytest.raises(HTTPProblem, match="values"):
        parse_json(b"{" + b'"a":1,' * 20_001 + b"this is no JSON")
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json(b"{" + b'"a":1,' * 19_998 + b"this is no JSON")


def test_a_body_of_many_parts_is_still_checked() -> None:
    many = b"0," * 10_000 + b"0"
    for body, code in [
        (b'{"a":[' + many + b"]", "invalid_json"),
        (b'{"a":[' + many + b"],NaN}", "invalid_json"),
        (b"[" + many + b"]", "invalid_type"),
        (b'{"a":[' + many + b'],"b":' + b"[" * 70 + b"]" * 70 + b"}", "invalid_json"),
        (b'{"a":[' + many + b'],"b":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "invalid_json"),
    ]:
        with pytest.raises(RequestError) as error:
            parse_json(body)
        assert error.value.code == code
    assert parse_json(b'{"a":[' + many + b"]," + b'"b":' + b"9" * 5000 + b"}")["b"] > 2**64


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_json_does_not_have_are_refused_by_their_place(constant: str) -> None:
    for text in ('{"a": "NaN \\" -Infinity", "b": [1, ', '{"a": [' + "{}," * 10_000):
        with pytest.raises(RequestError, match=f"{constant} is not JSON at character {len(text)}$") as error:
            parse_json(f"{text}{constant}]}}".encode())
        assert error.value.code == "invalid_json"


def test_escapes_before_a_constant_take_no_memory_to_speak_of() -> None:
    body = b'{"a":"' + b"\\\\" * 2**19 + b'","b":NaN}'
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=f"at character {len(body) - 4}$"):
            parse_json(body)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("padding", ["", "0," * 10_000], ids=["few values", "many values"])
def test_numbers_have_a_bounded_length(padding: str) -> None:
    def read(number: str) -> Any:
        return parse_json(f'{{"a": [{padding}{number}], "b": {number}}}'.encode())

    for exact in ("9" * 400, "-" + "9" * 399, "1." + "5" * 398, "-1e-" + "0" * 300 + "5"):
        assert read(exact)["a"][-1] == read(exact)["b"] == json.loads(exact)
    for sign in ("", "-"):
        huge = read(sign + "9" * 4000)
        assert huge["a"][-1] == huge["b"] == int(sign + "1" + "0" * 40)
    for fraction in ("1." + "5" * 399, "1e" + "0" * 400, "9" * 400 + ".5"):
        place = len(f'{{"a": [{padding}')
        with pytest.raises(RequestError, match=rf"a number has .*\(at most 400 .* at character {place}$"):
            read(fraction)


def test_large_bodies_are_answered_as_small_ones(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}] * 4000
    body = {"model": "fake", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400 and "context length" in answer.text
    short = {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4000}]}
    assert server.http.post("/tokenize", json=short).json()["count"] < 20
    assert server.http.post("/v1/chat/completions", json={**short, "max_tokens": 1}).status_code == 200
    items = [{"role": "user", "content": "a" if index == 3999 else ""} for index in range(4000)]
    answer = server.http.post("/v1/responses", json={"model": "fake", "input": items, "truncation": "auto"})
    assert answer.status_code == 200, answer.text


def test_equal_integers_of_a_list_are_one_object_and_no_number_changes() -> None:
    numbers = [*range(70_000, 90_000), *range(70_000, 90_000), 1, 1.0, 10**30, 10**30]
    found = decode_in_pieces(json.dumps(numbers))
    assert found == numbers and list(map(type, found)) == list(map(type, numbers))
    assert found[0] is found[20_000]
