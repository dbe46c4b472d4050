"""MiniMax-M2 (MiniMax 2025): Llama's attention, partly rotated, with norms on all heads together, and 256 experts."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing

NAMES = MoENames(block="block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias")


class MiniMaxM2ForCausalLM(LlamaForCausalLM):
    """Its experts are named as Mixtral's."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Sigmoid scores with a correction for the choice."""
        moe = MoEOptions(
            routing=read_routing(info.fields, "num_local_experts", scoring="sigmoid", renormalize=True),
            inner_size=info.intermediate_size,
            hidden_act=info.hidden_act,
            correction=True,
            names=NAMES,
        )
        return DecoderOptions(moe=moe, qk_norm="projection")
