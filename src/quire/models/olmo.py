"""OLMo 1 to 3, OLMoE, and EXAONE 4, whose layers are OLMo 2's."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.decoder import DecoderNames, DecoderOptions
from quire.models.experts import DENSE_SIZE, read_experts, read_routing, require
from quire.models.llama import attention_bias

OUTPUT_NORMS = DecoderNames(
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)


def olmo(info: ModelInfo) -> DecoderOptions:
    """OLMo (Groeneveld et al. 2024): layer norms without learned weights; some models clip queries, keys and values."""
    return replace(attention_bias(info), norm="layer", norm_affine=False, clip_qkv=info.fields.number("clip_qkv", None))


def olmo2(info: ModelInfo) -> DecoderOptions:
    """OLMo 2 (OLMo team 2024): norms after attention and feed-forward layer instead of before, and on q and k.

    OLMo 3 (2025) has a window in three layers of four, and scaled rotary embeddings in the others.
    """
    return replace(attention_bias(info), names=OUTPUT_NORMS, qk_norm="projection")


def exaone4(info: ModelInfo) -> DecoderOptions:
    """EXAONE 4 (LG AI Research 2025): OLMo 2's layers with norms of heads; only layers with a window rotate (NoPE).

    The small models have no windows, and rotate everywhere.
    """
    full = [layer for layer, window in enumerate(info.layer_windows) if window is None]
    has_window = info.fields.values.get("sliding_window") is not None
    return DecoderOptions(names=OUTPUT_NORMS, qk_norm="head", unrotated_layers=frozenset(full if has_window else ()))


def olmoe(info: ModelInfo) -> DecoderOptions:
    """OLMoE (Muennighoff et al. 2024): norms on all heads together, and 64 small experts."""
    fields = info.fields
    require(fields, clip_qkv=None)
    routing = read_routing(fields, "num_experts", renormalize=fields.flag("norm_topk_prob", False))
    return replace(attention_bias(info), moe=read_experts(info, routing, size=DENSE_SIZE), qk_norm="projection")
