"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases on queries, keys and values."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The upper layers may attend through a sliding window, see `ModelInfo.layer_windows`."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Biases on q, k, v only."""
        return DecoderOptions(qkv_bias=True)
