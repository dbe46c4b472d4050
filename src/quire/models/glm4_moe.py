"""GLM-4.5 (GLM team 2025): Llama's attention, partly rotated, and DeepSeek-V3's experts after a few dense layers."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import first_layers_dense, read_routing


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Files also hold a layer that foretells more tokens, which is not used."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Sigmoid scores with a correction for the choice; shared experts; norms on q and k in some sizes."""
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
            shared_size=inner * fields.integer("n_shared_experts", 1),
            dense_layers=first_layers_dense(fields, info.num_hidden_layers),
        )
        return DecoderOptions(
            moe=moe,
            qkv_bias=fields.flag("attention_bias", False),
            qk_norm="head" if fields.flag("use_qk_norm", False) else None,
        )
