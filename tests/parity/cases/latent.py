"""Shapes of the families with latent attention, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

LATENT: dict[str, Case] = {}

# Run by default, with both backends.
QUICK: tuple[str, ...] = ()
