"""Every architecture and every format is measured: parity cases, and a row in docs/models.md."""

from __future__ import annotations

import pytest

from quire.checkpoint.families import FAMILIES
from tests.parity import format_table
from tests.parity.format_table import accepted, stored_formats
from tests.parity.table import DOC, FORMATS_BEGIN, FORMATS_END, architectures, cases_of, rows_of


@pytest.mark.parametrize("architecture", architectures())
def test_an_architecture_that_writes_texts_has_parity_cases_and_a_row(architecture: str) -> None:
    assert cases_of(architecture), f"add shapes of {FAMILIES[architecture].model_type} to tests/parity/cases"
    row = dict(rows_of(DOC.read_text("utf-8"))).get(architecture)
    assert row is not None, f"run python -m tests.parity.table {architecture}"
    assert "| no" not in row


def test_an_architecture_that_gives_vectors_or_scores_has_a_row() -> None:
    text = DOC.read_text("utf-8")
    pooled = {name for name in FAMILIES if FAMILIES[name].pools and not name.endswith("ForMaskedLM")}
    assert [name for name in sorted(pooled) if f"| `{name}` |" not in text] == []
    assert "| no" not in text


def test_every_format_that_readers_accept_has_a_row() -> None:
    rows = stored_formats()
    shown = frozenset().union(*(stored.features for stored in rows))
    assert accepted() - shown == set(), "add what writes it to tests/parity/format_table.py"
    assert shown - accepted() == set(), "no reader takes it"
    table = DOC.read_text("utf-8").partition(FORMATS_BEGIN)[2].partition(FORMATS_END)[0].splitlines()
    labels = [line.split(" | ")[0].removeprefix("| ") for line in table if line.startswith("| ")][2:]
    assert labels == [stored.label for stored in rows], "run python -m tests.parity.table formats"
    assert not any(" | no |" in line for line in table)


def test_a_row_that_needs_a_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_table, "find_spec", lambda name: None)
    line = format_table.row(format_table.of_gguf("Q8_0"))
    assert line.startswith("| GGUF Q8_0 | needs the package `gguf` |")
    assert line.count("|") == format_table.HEAD[0].count("|")
