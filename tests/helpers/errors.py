"""Errors by the field that they name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.errors import QuireError, RequestError


@contextmanager
def refused(
    param: str | None = "",
    code: str = "",
    *,
    kind: type[QuireError] = RequestError,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[QuireError]]:
    """Expect an error of the block, which names this field and has this code; "" is any."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert param == "" or caught.value.param == param
    assert code in ("", caught.value.code)
