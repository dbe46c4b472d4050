"""Qwen3.5 (Qwen team 2026), its text models: Qwen3-Next's layers, with tensors of their own for each input of a delta
net, and dense feed-forward layers or mixtures of experts.
"""

from __future__ import annotations

from typing import ClassVar

from quire.models.qwen3_next import Qwen3NextForCausalLM
from quire.models.text_part import TextPart


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Dense: its config.json names no experts."""

    by_group: ClassVar[bool] = False


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """With experts."""


class Qwen3_5ForConditionalGeneration(TextPart, Qwen3_5ForCausalLM):
    """The text part of a model that takes images; positions of text are the same in all of its three axes."""

    ignorable: ClassVar[tuple[str, ...]] = (*Qwen3_5ForCausalLM.ignorable, r"^(model\.)?visual\.")


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    """With experts."""
