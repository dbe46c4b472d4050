"""Arcee's AFM (2025): Llama's decoder with a plain feed-forward layer and squared relu (So et al. 2021)."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """No gate; the rest is Llama's."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Llama's, without the gate."""
        return replace(LlamaForCausalLM.options(info), gated=False)
