"""Gemma (Gemma team 2024): Llama's decoder with norms around 1, scaled embeddings and a gelu gate."""

from __future__ import annotations

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.builder import Builder
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class GemmaForCausalLM(LlamaForCausalLM):
    """Norms multiply with 1 + weight. The embedding's factor is rounded to the type of the weights, as in training."""

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        super().__init__(info, builder, max_model_len)
        self.embedding_scale = rounded(info.hidden_size**0.5, builder.backend.dtype)

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Biases around attention only."""
        if info.fields.flag("use_bidirectional_attention", False) and info.causal:
            raise info.fields.error("use_bidirectional_attention", "false: tokens see those before them")
        bias = info.fields.flag("attention_bias", False)
        return DecoderOptions(qkv_bias=bias, output_bias=bias, norm_offset=1.0)


def rounded(value: float, dtype: str) -> float:
    """Round to the nearest number of this dtype, of two to the even one."""
    if dtype == "bfloat16":
        bits = int(np.float32(value).view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(np.dtype(dtype).type(value))
