"""Tables E and F: vectors, asked of a model that makes none, and the routes about tokens."""

from __future__ import annotations

from typing import Any

from tests.robustness.rows.row import Row, table
from tests.server.checks import DETOKENIZE, TOKENIZE, VOCAB
from tests.server.families import MAX_MODEL_LEN

EMBEDDINGS = "/v1/embeddings"
embed = table(EMBEDDINGS, {"model": "fake", "input": "a"})

EMBEDDING_ROWS = [
    embed("E1", "no input", {"input": ...}, "missing_required_parameter", "input"),
    embed("E2", "an empty text", {"input": ""}, "string_below_min_length", "input"),
    embed("E3", "no texts", {"input": []}, "empty_array", "input"),
    embed("E4", "an empty text among others", {"input": ["a", ""]}, "string_below_min_length", "input[1]"),
    embed("E5", "a text and a number", {"input": ["a", 1]}, "invalid_type", "input[1]"),
    embed("E6a", "an id beyond the vocabulary", {"input": [10**6]}, "invalid_value", "input[0]", f"{VOCAB}"),
    embed("E6b", "a negative id", {"input": [-1]}, "invalid_value", "input[0]"),
    embed(
        "E7",
        "a text beyond the context",
        {"input": [5] * (MAX_MODEL_LEN + 1)},
        "context_length_exceeded",
        "input",
        f"{MAX_MODEL_LEN + 1}",
        f"{MAX_MODEL_LEN} tokens",
    ),
    embed("E8", "5000 texts", {"input": ["a"] * 5000}, "array_above_max_length", "input", "2048", "5000"),
    embed("E9", "an unknown encoding", {"encoding_format": "hex"}, "invalid_value", "encoding_format", "base64"),
    embed("E10a", "dimensions 0", {"dimensions": 0}, "integer_below_min_value", "dimensions"),
    embed("E10b", "dimensions -1", {"dimensions": -1}, "integer_below_min_value", "dimensions"),
    embed("E10c", "dimensions 10^9", {"dimensions": 10**9}, "integer_above_max_value", "dimensions"),
    embed("E12", "vectors of a model that writes", {}, "unsupported_endpoint", "model", "/v1/chat/completions"),
]
# E11, a chat with a model that only makes vectors, needs such a model: tests/server/test_pooling_answers.py.

tokenize, detokenize = table(TOKENIZE, {}), table(DETOKENIZE, {})


def ids(*tokens: Any) -> dict[str, Any]:
    return {"tokens": list(tokens)}


TOKEN_ROWS: list[Row] = [
    tokenize("F1", "no prompt", {}, "missing_required_parameter", "prompt"),
    tokenize("F2", "half a surrogate pair", {"prompt": "\ud800"}, "invalid_value", "prompt"),
    tokenize("F3a", "5 MB", {"prompt": "x" * 5_000_000}, "request_too_large", None, status=413),
    tokenize("F3b", "3 MB", {"prompt": "x" * 3_000_000}, "context_length_exceeded", "prompt"),
    detokenize("F4", "a negative id", ids(-1), "invalid_value", "tokens[0]"),
    detokenize("F5", "an id beyond the vocabulary", ids(5, 10**6), "invalid_value", "tokens[1]", f"{VOCAB}"),
    detokenize("F6", "id 2^62", ids(2**62), "invalid_value", "tokens[0]"),
]
