"""Errors that get a client's own name of a field."""

from __future__ import annotations

import pytest

from quire.errors import RequestError, rename_field
from quire.server.field_names import FieldNames


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
