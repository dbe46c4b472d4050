"""IBM's Granite 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames
from quire.models.decoder import DecoderOptions
from quire.models.experts import DENSE_SIZE, read_experts, read_routing
from quire.models.llama import llama


def granite(info: ModelInfo) -> DecoderOptions:
    """Granite 3 (2024): Llama's decoder with multipliers, which are 1 where config.json leaves them out."""
    fields = info.fields
    return replace(
        llama(info),
        attention_scale=fields.number("attention_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def granite_moe(info: ModelInfo) -> DecoderOptions:
    """Granite 3 MoE (2024): experts in two tensors of all of them, weighted by a softmax over those chosen."""
    routing = read_routing(info.fields, "num_local_experts", scoring="softmax_chosen")
    stacked = ("input_linear.weight", "output_linear.weight")
    names = MoENames(block="block_sparse_moe", router="router.layer", stacked=stacked)
    return replace(granite(info), moe=read_experts(info, routing, size=DENSE_SIZE, names=names))
