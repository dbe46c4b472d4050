"""Tencent's HunYuan (2025), the dense models: Llama's decoder with norms of queries and keys after their rotation."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """The stretched base of the rotation comes with `ModelInfo.rope`."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Biases around attention, if the config asks for them."""
        bias = info.fields.flag("attention_bias", False)
        return DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head",
            qk_norm_names=("query_layernorm", "key_layernorm"),
            norm_rotated=True,
        )
