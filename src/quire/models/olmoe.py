"""OLMoE (Muennighoff et al. 2024): Llama's decoder with norms on all heads together, and 64 small experts."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing


class OlmoeForCausalLM(LlamaForCausalLM):
    """Files that clip queries, keys and values are refused."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Norms on the projections; biases if the config asks for them."""
        fields = info.fields
        if fields.values.get("clip_qkv") is not None:
            raise fields.error("clip_qkv", "null: values are not clipped")
        routing = read_routing(fields, "num_experts", renormalize=fields.flag("norm_topk_prob", False))
        moe = MoEOptions(routing=routing, inner_size=info.intermediate_size, hidden_act=info.hidden_act)
        bias = fields.flag("attention_bias", False)
        return DecoderOptions(moe=moe, qkv_bias=bias, output_bias=bias, qk_norm="projection")
