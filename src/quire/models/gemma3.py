"""Gemma 3 (Gemma team 2025): Gemma 2 with norms on queries and keys, and a rotation of its own for layers with windows.

Of models that see images the text part runs; images are not supported yet.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.gemma2 import Gemma2ForCausalLM
from quire.models.llama import DecoderOptions
from quire.models.text_part import TextPart


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Five layers with a window, then one without; logits are not bent unless config.json says so."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Gemma 2's, and norms of heads. transformers reads the cap of attention's logits and does not use it."""
        return replace(Gemma2ForCausalLM.options(info), qk_norm="head", attention_softcap=None)


class Gemma3ForConditionalGeneration(TextPart, Gemma3ForCausalLM):
    """The text part of the 4B and larger models."""
