"""Gemma 1 to 3. Of models that see images the language model runs; images are not supported yet."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.decoder import DecoderNames, DecoderOptions
from quire.models.llama import attention_bias

SANDWICH = DecoderNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)


def gemma(info: ModelInfo) -> DecoderOptions:
    """Gemma (Gemma team 2024): Llama's decoder with norms of scale 1 + weight, scaled embeddings and a gelu gate."""
    if info.fields.flag("use_bidirectional_attention", False) and info.causal:
        raise info.fields.error("use_bidirectional_attention", "false: tokens see those before them")
    return replace(
        attention_bias(info),
        norm_offset=1.0,
        embedding_scale=info.hidden_size**0.5,
        embedding_scale_rounded=True,
    )


def gemma2(info: ModelInfo) -> DecoderOptions:
    """Gemma 2 (Gemma team 2024): norms before and after each part of a layer, and logits with soft caps.

    config.json sets the scale of attention. Every second layer has a window.
    """
    fields = info.fields
    return replace(
        gemma(info),
        names=SANDWICH,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=fields.number("attn_logit_softcapping", None),
        logit_softcap=fields.number("final_logit_softcapping", None),
    )


def gemma3(info: ModelInfo) -> DecoderOptions:
    """Gemma 3 (Gemma team 2025): norms of heads; five of six layers have a window, and other rotary parameters.

    transformers reads the cap of attention's logits and does not use it.
    """
    return replace(gemma2(info), qk_norm="head", attention_softcap=None)
