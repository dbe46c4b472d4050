"""GLM-4-9B and GLM-Edge (GLM team 2024): Llama's decoder, half of each head rotated by neighbours, a fused gate."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class GlmForCausalLM(LlamaForCausalLM):
    """The rotated share comes with `ModelInfo.rope`."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Biases on q, k, v unless the config has none."""
        return DecoderOptions(qkv_bias=info.fields.flag("attention_bias", True), fused_mlp=True, interleaved=True)
