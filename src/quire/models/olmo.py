"""OLMo (Groeneveld et al. 2024): Llama's layers with layer norms that have nothing learned."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockOptions


class OlmoForCausalLM(BlockDecoder):
    """Some of its models keep queries, keys and values within bounds."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Biases around attention, if the config asks for them."""
        bias = info.fields.flag("attention_bias", False)
        clip = info.fields.number("clip_qkv", None)
        return BlockOptions(norm_affine=False, qkv_bias=bias, output_bias=bias, clip_qkv=clip)
