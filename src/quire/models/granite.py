"""IBM's Granite 3 (2024): Llama's decoder with multipliers on embedding, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """The multipliers are 1 where config.json leaves them out, that of attention too."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Llama's, and the multipliers; `logits_scaling` divides."""
        fields = info.fields
        return replace(
            LlamaForCausalLM.options(info),
            attention_scale=fields.number("attention_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        )
