"""Qwen3.5 (Qwen team 2026), its text models: Qwen3-Next's layers, with tensors of their own for each input of a delta
net, and dense feed-forward layers or mixtures of experts.
"""

from __future__ import annotations

from typing import ClassVar

from quire.models.qwen3_next import Qwen3NextForCausalLM


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Dense: its config.json names no experts."""

    by_group: ClassVar[bool] = False


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """With experts."""
