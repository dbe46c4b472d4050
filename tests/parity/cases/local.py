"""Shapes of the families that mix full attention with attention through a window, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

LOCAL: dict[str, Case] = {}

# Run by default, with both backends.
QUICK: tuple[str, ...] = ()
