"""DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash, and MiniCPM3: decoders with multi-head latent attention."""

from __future__ import annotations

import math

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.rope import RopeParameters
from quire.layers.builder import Builder
from quire.layers.mla import LatentAttention, LatentSizes
from quire.layers.rotary import RotaryEmbedding
from quire.models.decoder import DecoderOptions
from quire.models.experts import corrected_experts, first_layers_dense, read_experts, read_routing, with_shared

NORM_EPS = 1e-6  # of the norms of the two latent vectors, independent of config.json


def deepseek_v2(info: ModelInfo) -> DecoderOptions:
    """DeepSeek-V2 (DeepSeek-AI 2024): after a few dense layers, many small experts and shared ones.

    Scores are a softmax over all experts; with "group_limited_greedy" experts are chosen in the groups with the best
    ones. Weights are not renormalized.
    """
    fields = info.fields
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "greedy or group_limited_greedy")
    routing = read_routing(
        fields,
        "n_routed_experts",
        grouped=method == "group_limited_greedy",
        group_score="max",
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    experts = read_experts(info, routing, dense_layers=dense_layers(info))
    return DecoderOptions(
        moe=with_shared(experts, fields.integer("n_shared_experts", 0)),
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        interleaved=True,
        mixer=latent_attention,
    )


def deepseek_v3(info: ModelInfo) -> DecoderOptions:
    """DeepSeek-V3 and R1 (DeepSeek-AI 2024), Kimi K2, GLM-4.7-Flash: sigmoid scores, with a bias for the choice."""
    fields = info.fields
    return DecoderOptions(
        moe=corrected_experts(info, dense_layers(info), num_shared=0),
        qkv_bias=fields.flag("attention_bias", False),
        interleaved=fields.flag("rope_interleave", True),
        mixer=latent_attention,
    )


def minicpm3(info: ModelInfo) -> DecoderOptions:
    """MiniCPM3 (Hu et al. 2024): dense layers; residuals are scaled by depth, the output by `dim_model_base`."""
    fields, layers = info.fields, info.num_hidden_layers
    return DecoderOptions(
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_scale=fields.number("scale_emb", 12.0),
        residual_scale=fields.number("scale_depth", math.sqrt(layers)) / math.sqrt(layers),
        logit_scale=fields.number("dim_model_base", float(info.hidden_size)) / info.hidden_size,
        mixer=latent_attention,
    )


def latent_attention(
    builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding | None, options: DecoderOptions
) -> LatentAttention:
    """Build a layer's attention, see `DecoderOptions.mixer`."""
    assert rotary is not None
    fields = info.fields
    sizes = LatentSizes(
        heads=info.num_attention_heads,
        nope=fields.integer("qk_nope_head_dim", low=1, high=2**16),
        rope=info.head_dim,
        value=fields.integer("v_head_dim", info.hidden_size // info.num_attention_heads, low=1, high=2**16),
        rank=fields.integer("kv_lora_rank", low=1, high=2**16),
        query_rank=fields.integer("q_lora_rank", None, low=1, high=2**20),
    )
    return LatentAttention(
        builder.under(options.names.attention),
        info.hidden_size,
        sizes,
        rotary,
        scale=attention_scale(info.rope, sizes.key),
        eps=NORM_EPS,
        bias=options.qkv_bias,
    )


def attention_scale(rope: RopeParameters | None, key_size: int) -> float:
    """Return what multiplies q.k: with yarn also the square of its correction for long contexts."""
    scale = key_size**-0.5
    if rope is None or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def dense_layers(info: ModelInfo) -> frozenset[int]:
    """Return the layers without experts: the first ones, and those that `moe_layer_freq` leaves out."""
    step = info.fields.integer("moe_layer_freq", 1, low=1)
    later = (layer for layer in range(info.num_hidden_layers) if layer % step)
    return first_layers_dense(info.fields, info.num_hidden_layers) | frozenset(later)
