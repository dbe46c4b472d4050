"""DeepSeek-V3 and R1 (DeepSeek-AI 2024), Kimi K2: DeepSeek-V2 with another choice of experts.

Scores are sigmoids. A learned correction is added for the choice of groups and experts, never to weights.
"""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoEOptions
from quire.models.deepseek_v2 import DeepseekV2ForCausalLM, dense_layers
from quire.models.llama import DecoderOptions
from quire.models.routing import read_routing


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Files also hold layers that foretell further tokens, which are not used."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Sigmoid scores with a correction; the best group is the one whose two best experts are."""
        fields = info.fields
        inner = fields.integer("moe_intermediate_size", low=1)
        moe = MoEOptions(
            routing=read_routing(
                fields,
                "n_routed_experts",
                grouped=True,
                scoring="sigmoid",
                renormalize=fields.flag("norm_topk_prob", True),
                scale=fields.number("routed_scaling_factor", 1.0),
            ),
            inner_size=inner,
            hidden_act=info.hidden_act,
            correction=True,
            shared_size=inner * fields.integer("n_shared_experts", 0),
            dense_layers=dense_layers(info),
        )
        return DecoderOptions(
            moe=moe,
            qkv_bias=fields.flag("attention_bias", False),
            interleaved=fields.flag("rope_interleave", True),
        )
