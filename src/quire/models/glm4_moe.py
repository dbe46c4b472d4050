"""GLM-4.5 (GLM team 2025): Llama's attention, partly rotated, and DeepSeek-V3's experts after a few dense layers."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import corrected_experts, first_layers_dense


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Files also hold a layer that foretells more tokens, which is not used."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Sigmoid scores with a correction for the choice; shared experts; norms on q and k in some sizes."""
        fields = info.fields
        dense = first_layers_dense(fields, info.num_hidden_layers)
        return DecoderOptions(
            moe=corrected_experts(info, dense, num_shared=1),
            qkv_bias=fields.flag("attention_bias", False),
            qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        )
