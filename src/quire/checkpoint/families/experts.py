"""Decoders whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from quire.checkpoint.families.family import Family

EXPERTS: dict[str, Family] = {}
