"""Shapes of the families with layers that keep a state, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

HYBRID: dict[str, Case] = {}

# Run by default, with both backends.
QUICK: tuple[str, ...] = ()
