"""Encoders, and other models whose output is a vector or a score."""

from __future__ import annotations

from quire.checkpoint.families.family import Family

POOLING: dict[str, Family] = {}
