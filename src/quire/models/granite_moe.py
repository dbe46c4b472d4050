"""Granite 3 MoE (IBM 2024): Granite's decoder, and experts in two tensors of all of them."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.granite import GraniteForCausalLM
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing

NAMES = MoENames(
    block="block_sparse_moe", router="router.layer", stacked=("input_linear.weight", "output_linear.weight")
)


class GraniteMoeForCausalLM(LlamaForCausalLM):
    """Weights are a softmax over the experts chosen."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Granite's, with experts."""
        routing = read_routing(info.fields, "num_local_experts", scoring="softmax_chosen")
        moe = MoEOptions(routing=routing, inner_size=info.intermediate_size, hidden_act=info.hidden_act, names=NAMES)
        return replace(GraniteForCausalLM.options(info), moe=moe)
