"""Decoders that mix attention with layers that keep a state of fixed size."""

from __future__ import annotations

from quire.checkpoint.families.family import Family

HYBRID: dict[str, Family] = {}
