"""Decoders that mix full attention with attention through a window, each with rotation of its own."""

from __future__ import annotations

from quire.checkpoint.families.family import Family

LOCAL: dict[str, Family] = {}
