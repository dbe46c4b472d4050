"""Seed-OSS (ByteDance 2025): Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """Each kind of bias has a key of its own."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Biases by config.json."""
        fields = info.fields
        return DecoderOptions(
            qkv_bias=fields.flag("attention_bias", True),
            output_bias=fields.flag("attention_out_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
        )
