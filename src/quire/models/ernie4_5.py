"""ERNIE 4.5 (Baidu 2025), the dense models: Llama's decoder, in which neighbours are rotated."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """One key for all biases."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """All biases or none."""
        bias = info.fields.flag("use_bias", False)
        return DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=bias, interleaved=True)
