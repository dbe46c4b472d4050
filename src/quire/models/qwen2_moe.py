"""Qwen2-MoE (Yang et al. 2024): Qwen2's attention, many small experts, and one that every token sees."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing


def small_experts(info: ModelInfo) -> MoEOptions:
    """Return the experts of Qwen's families; layers may be dense by number, or all but every n-th."""
    fields, layers = info.fields, range(info.num_hidden_layers)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(layer not in layers for layer in dense):
        raise fields.error("mlp_only_layers", f"a list of layers below {info.num_hidden_layers}")
    step = fields.integer("decoder_sparse_step", 1, low=1)
    return MoEOptions(
        routing=read_routing(fields, "num_experts", renormalize=fields.flag("norm_topk_prob", False)),
        inner_size=fields.integer("moe_intermediate_size", low=1),
        hidden_act=info.hidden_act,
        dense_layers=frozenset(dense) | frozenset(layer for layer in layers if (layer + 1) % step),
    )


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """The shared expert has a gate of its own."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Biases on q, k, v; a shared expert."""
        moe = replace(
            small_experts(info),
            shared_size=info.fields.integer("shared_expert_intermediate_size", low=1),
            shared_gate=True,
            names=MoENames(shared="shared_expert"),
        )
        return DecoderOptions(moe=moe, qkv_bias=info.fields.flag("qkv_bias", True))
