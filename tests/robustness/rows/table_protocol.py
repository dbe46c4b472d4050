"""Table A: what is wrong with a request whatever it asks for. Bodies, headers, methods, paths, models in paths."""

from __future__ import annotations

import gzip
from typing import Any

from tests.robustness.rows.row import MOST_BODY, Row
from tests.server.checks import COMPLETIONS, JSON

GOOD = b'{"model":"fake","prompt":"a","max_tokens":2}'


def sent(
    name: str, what: str, body: bytes, code: str | None, param: str | None = None, *words: str, **more: Any
) -> Row:
    more = {"status": 200 if code is None else 400, **more}
    return Row(name=name, what=what, body=body, code=code, param=param, words=words, **more)


def with_field(text: bytes) -> bytes:
    return GOOD[:-1] + b"," + text + b"}"


ROWS = [
    sent("A1", "JSON that is cut off", b'{"model":', "invalid_json", None, "character 9"),
    sent("A2", "no body", b"", "invalid_json"),
    sent("A3a", "null", b"null", "invalid_type", None, "must be a JSON object"),
    sent("A3b", "a list", b"[]", "invalid_type", None, "must be a JSON object"),
    sent("A3c", "a text", b'"x"', "invalid_type", None, "must be a JSON object"),
    sent("A3d", "a number", b"1", "invalid_type", None, "must be a JSON object"),
    sent("A4", "bytes that are not UTF-8", b'{"model":"fake","prompt":"\xff\xfe"}', "invalid_json", None, "UTF-8"),
    sent("A5a", "UTF-16 with a mark", GOOD.decode().encode("utf-16"), "invalid_json", None, "UTF-8"),
    sent("A5b", "UTF-16 without", GOOD.decode().encode("utf-16-le"), "invalid_json"),
    sent("A5c", "UTF-32", GOOD.decode().encode("utf-32"), "invalid_json"),
    sent("A6", "a byte order mark", b"\xef\xbb\xbf" + GOOD, None),
    sent(
        "A7", "half a surrogate pair in the prompt", rb'{"model":"fake","prompt":"\ud800"}', "invalid_value", "prompt"
    ),
    sent("A8", "NUL in the prompt", rb'{"model":"fake","prompt":"a\u0000b","max_tokens":2}', None),
    sent("A9", "NaN for a number", with_field(b'"temperature":NaN'), "invalid_json", None, "NaN"),
    sent("A9b", "infinity for a number", with_field(b'"temperature":-Infinity'), "invalid_json", None, "Infinity"),
    sent(
        "A10",
        "a number beyond floats",
        with_field(b'"temperature":1e400'),
        "decimal_above_max_value",
        "temperature",
        "2",
    ),
    sent("A11", "NaN within an object", with_field(b'"logit_bias":{"5":NaN}'), "invalid_json", None, "NaN"),
    sent("A12", "100000 open lists", b"[" * 100_000, "invalid_json", None, "nested too deeply", "64"),
    sent(
        "A13a",
        "50000 objects within each other",
        with_field(b'"x":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        "invalid_json",
        None,
        "nested too deeply",
    ),
    sent("A13b", "one level too many", with_field(b'"metadata":' + b"[" * 65 + b"]" * 65), "invalid_json", None, "64"),
    sent("A13c", "64 levels", with_field(b'"metadata":' + b"[" * 63 + b"]" * 63), None),
    sent("A14a", "an integer of 5000 digits", with_field(b'"seed":' + b"9" * 5000), "integer_above_max_value", "seed"),
    sent("A14b", "a negative one", with_field(b'"seed":-' + b"9" * 5000), "integer_below_min_value", "seed"),
    sent(
        "A15",
        "a field twice: the last one counts",
        b'{"model":"nope","model":"fake","prompt":"a","max_tokens":2}',
        None,
    ),
    sent(
        "A16a",
        "text/plain",
        GOOD,
        "unsupported_content_type",
        None,
        "application/json",
        status=415,
        headers={"content-type": "text/plain"},
    ),
    sent("A16b", "no type", GOOD, "unsupported_content_type", status=415, headers={"content-type": ""}),
    sent(
        "A17",
        "gzip",
        gzip.compress(GOOD, mtime=0),
        "unsupported_content_encoding",
        None,
        "gzip",
        status=415,
        headers={**JSON, "content-encoding": "gzip"},
    ),
    Row(
        name="A18",
        what="GET of a route for POST",
        method="GET",
        status=405,
        code="method_not_supported",
        words=("GET",),
        tells=("allow",),
    ),
    Row(
        name="A19", what="no such route", path="/v1/nope", body={}, status=404, code="unknown_url", words=("/v1/nope",)
    ),
    Row(name="A20", what="a slash behind the path", path=COMPLETIONS + "/", body=GOOD, status=404, code="unknown_url"),
    Row(name="A21", what="the model", method="GET", path="/v1/models/fake", status=200),
    Row(
        name="A22",
        what="another model",
        method="GET",
        path="/v1/models/nope",
        status=404,
        code="model_not_found",
        param="model",
        words=("nope",),
    ),
    Row(name="A23", what="HEAD of health", method="HEAD", path="/health", status=200),
    Row(
        name="A25",
        what="a body over the limit",
        body=b" " * (MOST_BODY + 1),
        status=413,
        code="request_too_large",
        words=(str(MOST_BODY),),
    ),
]

# Row A24, of a server with the key "secret": how clients fail to say it.
KEY_ROWS = [
    Row(
        name=name,
        what=what,
        body=GOOD,
        headers={**JSON, **headers},
        status=401,
        code="invalid_api_key",
        tells=("www-authenticate",),
    )
    for name, what, headers in [
        ("A24a", "no key", {}),
        ("A24b", "a wrong key", {"authorization": "Bearer wrong"}),
        ("A24c", "no key behind Bearer", {"authorization": "Bearer"}),
        ("A24d", "not a bearer token", {"authorization": "Basic c2VjcmV0"}),
        ("A24e", "the beginning of the key", {"authorization": "Bearer secre"}),
        ("A24f", "a wrong key as Anthropic's clients send it", {"x-api-key": "wrong"}),
    ]
]
