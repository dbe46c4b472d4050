"""MiniCPM3 (Hu et al. 2024): dense layers with latent attention, and scaled embeddings, residuals and output."""

from __future__ import annotations

import math
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.models.deepseek_v2 import LatentDecoderLayer
from quire.models.llama import DecoderLayer, DecoderOptions, LlamaForCausalLM


class MiniCPM3ForCausalLM(LlamaForCausalLM):
    """Halves are rotated, as in Llama."""

    layer_class: ClassVar[type[DecoderLayer]] = LatentDecoderLayer

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Residuals are scaled by depth; the output as if the model had `dim_model_base` hidden values."""
        fields, layers = info.fields, info.num_hidden_layers
        return DecoderOptions(
            qkv_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            embedding_scale=fields.number("scale_emb", 12.0),
            residual_scale=fields.number("scale_depth", math.sqrt(layers)) / math.sqrt(layers),
            logit_scale=fields.number("dim_model_base", float(info.hidden_size)) / info.hidden_size,
        )
