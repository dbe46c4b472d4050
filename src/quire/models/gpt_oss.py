"""GPT-OSS (OpenAI 2025): Llama's decoder with biases, attention sinks, windows in turn, and bounded experts."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing


class GptOssForCausalLM(LlamaForCausalLM):
    """The experts' gate and up are bounded, and alternate in one tensor of all experts."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Sinks and biases; experts whose weights are a softmax over those chosen."""
        fields = info.fields
        for key, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if fields.number(key, known) != known:
                raise fields.error(key, f"{known}")
        moe = MoEOptions(
            routing=read_routing(fields, "num_local_experts", scoring="softmax_chosen"),
            inner_size=info.intermediate_size,
            hidden_act="swiglu_oai",
            router_bias=True,
            expert_bias=True,
            transposed=True,
            names=MoENames(router="router"),
        )
        bias = fields.flag("attention_bias", True)
        return DecoderOptions(moe=moe, sinks=True, qkv_bias=bias, output_bias=bias)
