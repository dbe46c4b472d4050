"""Every architecture of the registry is measured: parity cases, and a row in docs/models.md. Its file is short."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from quire.checkpoint.families import FAMILIES
from quire.models.registry import MODELS
from tests.parity.table import DOC, architectures, cases_of, rows_of

MAX_LINES = 150
# What is no family's own: the decoders that many share, and that of models which only transformers has code for.
SHARED = ("quire.models.llama", "quire.models.fallback")


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


@pytest.mark.parametrize("module", sorted(set(MODELS.values()) - set(SHARED)))
def test_the_file_of_a_family_is_short(module: str) -> None:
    lines = Path(import_module(module).__file__ or "").read_text("utf-8").count("\n")
    assert lines <= MAX_LINES
