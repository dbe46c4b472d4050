"""Mixtral (Jiang et al. 2024): Mistral's decoder whose feed-forward layers are eight experts, two for each token."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing

NAMES = MoENames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralForCausalLM(LlamaForCausalLM):
    """Weights are a softmax over the experts chosen."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """No biases, whatever the config says."""
        routing = read_routing(info.fields, "num_local_experts", renormalize=True)
        moe = MoEOptions(routing=routing, inner_size=info.intermediate_size, hidden_act=info.hidden_act, names=NAMES)
        return DecoderOptions(moe=moe)
