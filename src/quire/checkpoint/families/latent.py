"""Decoders with multi-head latent attention."""

from __future__ import annotations

from quire.checkpoint.families.family import Family

LATENT: dict[str, Family] = {}
