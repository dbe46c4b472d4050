"""Every row of the tables of bad requests: what comes back, and that everybody else is served as before.

Each row is checked for the status, the whole error object, its size, what it must not tell, and its request id; then a
canary asks for the same text as ever. Bodies and fields: tables A to F; `test_row_connections` has the bytes below.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.live_server import LiveServer
from tests.robustness.rows import table_chats, table_completions, table_forms, table_protocol, table_vectors
from tests.robustness.rows.row import Row, ask, check_answer, check_numbers, check_unharmed, title

FORM_SECONDS = 2.5  # for any grammar


@pytest.mark.parametrize("row", table_protocol.ROWS, ids=title)
def test_table_a_what_is_no_request(server: LiveServer, sung: str, row: Row) -> None:
    check_answer(ask(server, row), row)
    check_unharmed(server, sung)


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    """A server with a key."""
    live = LiveServer(api_key=["secret"])
    yield live
    assert not live.engine.added
    live.close()


@pytest.mark.parametrize("row", table_protocol.KEY_ROWS, ids=title)
def test_table_a_keys(locked: LiveServer, row: Row) -> None:
    check_answer(ask(locked, row), row)


@pytest.mark.parametrize("row", table_completions.ROWS, ids=title)
def test_table_b_completions(server: LiveServer, sung: str, row: Row) -> None:
    check_answer(ask(server, row), row)
    check_unharmed(server, sung)


@pytest.mark.parametrize("row", table_forms.ROWS, ids=title)
def test_table_c_forms(server: LiveServer, sung: str, row: Row) -> None:
    """The client waits no longer than any grammar may take, and half a second for the rest of the request."""
    server.http.timeout = FORM_SECONDS + 0.5
    try:
        response = ask(server, row)
    finally:
        server.http.timeout = 20
    check_answer(response, row)
    check_unharmed(server, sung)


@pytest.mark.parametrize("row", table_chats.ROWS, ids=title)
def test_table_d_chats(server: LiveServer, sung: str, row: Row) -> None:
    check_answer(ask(server, row), row)
    check_unharmed(server, sung)


@pytest.mark.parametrize("row", table_vectors.EMBEDDING_ROWS, ids=title)
def test_table_e_vectors(server: LiveServer, sung: str, row: Row) -> None:
    check_answer(ask(server, row), row)
    check_unharmed(server, sung)


@pytest.mark.parametrize("row", table_vectors.TOKEN_ROWS, ids=title)
def test_table_f_tokens(server: LiveServer, sung: str, row: Row) -> None:
    check_answer(ask(server, row), row)
    check_unharmed(server, sung)


def test_no_row_is_missing() -> None:
    check_numbers([*table_protocol.ROWS, *table_protocol.KEY_ROWS], "A", 25)
    check_numbers(table_completions.ROWS, "B", 67)
    check_numbers(table_forms.ROWS, "C", 21)
    check_numbers(table_chats.ROWS, "D", 30)
    check_numbers(table_vectors.TOKEN_ROWS, "F", 6)
    numbers = {row.name.rstrip("abc") for row in table_vectors.EMBEDDING_ROWS}
    assert numbers == {f"E{number}" for number in range(1, 13) if number != 11}
