"""Llama and families whose decoder is Llama's but for a few options: Arcee, Seed-OSS, SmolLM3, HunYuan, ERNIE, Phi-3,
MiniMax, GPT-OSS.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.decoder import INV_FREQ, DecoderNames, DecoderOptions
from quire.models.experts import DENSE_SIZE, read_experts, read_routing, require, with_shared

FUSED_MLP = DecoderNames(mlp_input=("gate_up_proj",))


def llama(info: ModelInfo) -> DecoderOptions:
    """Llama (Touvron et al. 2023): RMS norms, rotary positions, grouped KV heads, a gated feed-forward layer."""
    return replace(attention_bias(info), mlp_bias=info.fields.flag("mlp_bias", False))


def attention_bias(info: ModelInfo) -> DecoderOptions:
    """Return options with biases on all projections of attention, if the config asks for them."""
    bias = info.fields.flag("attention_bias", False)
    return DecoderOptions(qkv_bias=bias, output_bias=bias)


def arcee(info: ModelInfo) -> DecoderOptions:
    """Arcee's AFM (2025): a plain feed-forward layer with squared relu (So et al. 2021)."""
    return replace(llama(info), gated=False, names=DecoderNames(mlp_input=("up_proj",)))


def seed_oss(info: ModelInfo) -> DecoderOptions:
    """Seed-OSS (ByteDance 2025): config.json has a key for each bias."""
    return DecoderOptions(
        qkv_bias=info.fields.flag("attention_bias", True),
        output_bias=info.fields.flag("attention_out_bias", False),
        mlp_bias=info.fields.flag("mlp_bias", False),
    )


def smollm3(info: ModelInfo) -> DecoderOptions:
    """SmolLM3 (Bakouch et al. 2025): some layers have no rotation (Yang et al. 2025, "Rope to Nope and Back Again").

    `no_rope_layers` has a 1 for each layer that does rotate.
    """
    fields, layers = info.fields, info.num_hidden_layers
    rotated = fields.values.get("no_rope_layers")
    if rotated is None:
        interval = fields.integer("no_rope_layer_interval", 4, low=1)
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(value not in (0, 1) for value in rotated):
        raise fields.error("no_rope_layers", f"a list of {layers} zeros and ones")
    return replace(llama(info), unrotated_layers=frozenset(layer for layer in range(layers) if not rotated[layer]))


def hunyuan(info: ModelInfo) -> DecoderOptions:
    """Tencent's HunYuan (2025), the dense models: norms of queries and keys after their rotation."""
    return replace(
        attention_bias(info),
        names=DecoderNames(query_norm="query_layernorm", key_norm="key_layernorm"),
        qk_norm="head",
        norm_rotated=True,
    )


def ernie(info: ModelInfo) -> DecoderOptions:
    """ERNIE 4.5 (Baidu 2025), the dense models: interleaved rotation, and one key for all biases."""
    bias = info.fields.flag("use_bias", False)
    return DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=bias, interleaved=True)


def ernie_moe(info: ModelInfo) -> DecoderOptions:
    """ERNIE 4.5 with experts in some layers: softmax scores with a bias for the choice, and shared experts.

    Files with biases are refused; layers for multi-token prediction (mtp) are not used.
    """
    fields, layers = info.fields, range(info.num_hidden_layers)
    require(fields, use_bias=False)
    first, step = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_interval", 1, low=1)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    sparse = {layer for layer in layers if (layer + 1) % step == 0 and first <= layer <= (last % len(layers))}
    experts = read_experts(
        info,
        read_routing(fields, "moe_num_experts", "moe_k", renormalize=True),
        correction=True,
        correction_is_row=True,
        dense_layers=frozenset(layers) - sparse,
        names=MoENames(correction="moe_statics.e_score_correction_bias"),
    )
    moe = with_shared(experts, fields.integer("moe_num_shared_experts", 2))
    return DecoderOptions(moe=moe, interleaved=True, ignored_weights=(INV_FREQ, r"^model\.mtp_"))


def phi3(info: ModelInfo) -> DecoderOptions:
    """Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): projections of the same input are stored as one; no biases.

    The smaller ones rotate a part of each head and extend their context with longrope. Early files have other types,
    with a scaling that is not implemented.
    """
    assert info.rope is not None
    if info.rope.rope_type not in ("default", "longrope"):
        key = "rope_scaling" if info.fields.values.get("rope_scaling") else "rope_parameters"
        raise info.fields.error(key, "a rope_type of default or longrope")
    return DecoderOptions(names=replace(FUSED_MLP, qkv=("qkv_proj",)))


def minimax_m2(info: ModelInfo) -> DecoderOptions:
    """MiniMax-M2 (MiniMax 2025): norms on all heads together, and 256 experts, chosen by sigmoids with a bias."""
    routing = read_routing(info.fields, "num_local_experts", scoring="sigmoid", renormalize=True)
    names = MoENames(block="block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias")
    moe = read_experts(info, routing, size=DENSE_SIZE, correction=True, names=names)
    return DecoderOptions(moe=moe, qk_norm="projection")


def gpt_oss(info: ModelInfo) -> DecoderOptions:
    """GPT-OSS (OpenAI 2025): biases, attention sinks, alternating windows, and clamped experts.

    Weights are a softmax over the experts chosen. The experts' gate and up alternate in one tensor of all experts.
    """
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
