"""DeepSeek-V3 and R1 (DeepSeek-AI 2024), Kimi K2: DeepSeek-V2 with another choice of experts.

Scores are sigmoids. A learned correction is added for the choice of groups and experts, never to weights.
"""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.deepseek_v2 import DeepseekV2ForCausalLM, dense_layers
from quire.models.llama import DecoderOptions
from quire.models.routing import corrected_experts


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Files also hold layers that foretell further tokens, which are not used."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Sigmoid scores with a correction; the best group is the one whose two best experts are."""
        fields = info.fields
        return DecoderOptions(
            moe=corrected_experts(info, dense_layers(info), num_shared=0),
            qkv_bias=fields.flag("attention_bias", False),
            interleaved=fields.flag("rope_interleave", True),
        )
