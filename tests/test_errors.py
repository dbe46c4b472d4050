"""Errors that get a client's own name of a field, and errors that cross a process boundary."""

from __future__ import annotations

import msgspec
import pytest

from quire import errors
from quire.errors import ErrorData, QuireError, RequestError, rename_field
from quire.server.field_names import FieldNames


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        ([None, False, "a", 1.5, {"b": []}], '[null, false, "a", 1.5, {"b": []}]'),
        (("a", 1), '["a", 1]'),
        ("it's", '"it\'s"'),
        ("a\n\x1b\u2028", r"'a\n\x1b\u2028'"),
        (["a\n\x1b\u2028\x85\ud800\u202e\xe9"], '["a\\n\\u001b\\u2028\\u0085\\ud800\\u202e\xe9"]'),
        ("x" * 300, "'" + "x" * 199 + "..."),
        (["x" * 300], '["' + "x" * 198 + "..."),
        ([0] * 21, "a list of 21 items"),
        ({str(key): 0 for key in range(21)}, "an object of 21 items"),
        (2**600, "a very large integer"),
        (float("inf"), "inf"),
        ([float("nan")], "[NaN]"),
        ({1: object}, "{1: <class 'object'>}"),
        (b"x", "b'x'"),
    ],
)
def test_values_are_repeated_as_json_has_them_in_one_short_line(value: object, expected: str) -> None:
    assert errors.echo(value) == expected


def test_what_is_nested_too_deeply_is_repeated_all_the_same() -> None:
    value: object = []
    for _ in range(500):
        value = [value]
    assert errors.echo(value) == "[" * 200 + "..."


@pytest.mark.parametrize(
    ("message", "name", "new_name", "expected"),
    [
        (
            "unknown value: n must be at least 1, n is 0",
            "n",
            "count",
            "unknown value: count must be at least 1, n is 0",
        ),
        ("prompt_logprobs and logprobs", "logprobs", "top_logprobs", "prompt_logprobs and top_logprobs"),
        ("stop[0] must not be empty", "stop", "stop_sequences", "stop_sequences[0] must not be empty"),
        ("options.stop and stop", "stop", r"\1", r"options.stop and \1"),
        ("nothing of the kind", "kinds", "sorts", "nothing of the kind"),
    ],
)
def test_a_field_is_renamed_where_it_stands_by_itself(message: str, name: str, new_name: str, expected: str) -> None:
    error = rename_field(RequestError(message, param=name, code="invalid_type"), name, new_name)
    assert (error.message, str(error), error.param, error.code) == (expected, expected, new_name, "invalid_type")


def test_a_dialect_renames_whole_words_only() -> None:
    names = FieldNames({"stop": "stop_sequences", "n": "count"}, ["messages[3]"])
    for param, message, expected in (
        ("n", "this cannot be: n is 0", "this cannot be: count is 0"),
        ("stop[1]", "nonstop: stop[1] is empty", "nonstop: stop_sequences[1] is empty"),
        ("messages[0].role", "messages[0].role must be a word", "messages[3].role must be a word"),
        ("nothing", "nothing of n", "nothing of n"),
    ):
        assert names.translate(RequestError(message, param=param)).message == expected


def test_every_error_is_the_same_after_it_crossed_a_process_boundary() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, QuireError)]
    assert len(classes) > 10
    for kind in classes:
        error = kind("what went wrong")
        error.param, error.code = "seeds", "of_its_own"
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(ErrorData.of(error)), type=ErrorData)
        again = data.exception()
        assert type(again) is kind
        assert (str(again), again.message) == (str(error), error.message)
        assert (again.param, again.code) == ("seeds", "of_its_own")
        assert data.refused == issubclass(kind, RequestError | errors.EngineAsleepError)


def test_an_error_defined_elsewhere_crosses_as_its_nearest_base() -> None:
    class OwnError(RequestError):
        default_code = "own"

    error = ErrorData.of(OwnError("wrong", param="field")).exception()
    assert (type(error), error.message, error.param, error.code) == (RequestError, "wrong", "field", "own")


def test_an_error_of_an_unknown_class_is_an_internal_one() -> None:
    for name in ("NoSuchError", "echo", "msgspec"):
        error = ErrorData(name, "what went wrong").exception()
        assert type(error) is QuireError and error.code == "internal_error"
