"""Ministral (Mistral AI 2024): Mistral's decoder, of whose layers some attend through a window and some see all."""

from __future__ import annotations

from quire.models.mistral import MistralForCausalLM


class MinistralForCausalLM(MistralForCausalLM):
    """The windows come with `ModelInfo.layer_windows`."""
