"""Shapes of the families with mixtures of experts, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

EXPERTS: dict[str, Case] = {}

# Run by default, with both backends.
QUICK: tuple[str, ...] = ()
