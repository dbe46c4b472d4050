"""Qwen3 (Yang et al. 2025): Llama's decoder with an RMS norm on each query and key head before the rotation."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Its head_dim is not hidden_size / num_attention_heads in most sizes."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Norms on q and k; biases if the config asks for them."""
        bias = info.fields.flag("attention_bias", False)
        return DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm="head")
