"""Decoders with sliding-window attention in some layers, and rotary parameters by layer type."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import (
    Family,
    Windows,
    every_nth_full,
    family,
    layer_types,
    two_rotations,
)
from quire.checkpoint.files import ConfigFields


def _gemma3(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types and rotary parameters from the keys of older files (rope_local_base_freq)."""
    full = fields.number("rope_theta", 1e6, above=1.0)
    local = fields.number("rope_local_base_freq", 1e4, above=1.0)
    period = fields.integer("sliding_window_pattern", 6, low=1)
    return {**every_nth_full(fields, period), **two_rotations(fields, full, local)}


def _olmo3(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types and rotary parameters; rope_scaling applies to full attention only."""
    theta = fields.number("rope_theta", 500000.0, above=1.0)
    return {**every_nth_full(fields, 4), **two_rotations(fields, theta, theta)}


def _ministral(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types if the file has none: all layers have the window."""
    return layer_types(fields, lambda layer: fields.values.get("sliding_window") is not None)


def _ministral3(fields: ConfigFields) -> dict[str, Any]:
    """Return the rotary parameters of transformers' class if the file has none."""
    if fields.values.get("rope_parameters") is not None or fields.values.get("rope_scaling") is not None:
        return {}
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return {"rope_parameters": rope}


_LISTED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4096}
_GEMMA = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
}
_GEMMA3 = {**_GEMMA, **_LISTED, "vocab_size": 262208, "max_position_embeddings": 131072}
_MISTRAL: dict[str, Any] = {"max_position_embeddings": 131072, "num_key_value_heads": 8}

LOCAL: dict[str, Family] = {
    "Gemma2ForCausalLM": family(
        "gemma2",
        "gemma.gemma2",
        _GEMMA,
        _LISTED,
        vocab_size=256000,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        windows=Windows.LISTED,
        derive=lambda fields: every_nth_full(fields, 2),
    ),
    "Gemma3ForCausalLM": family("gemma3_text", "gemma.gemma3", _GEMMA3, windows=Windows.LISTED, derive=_gemma3),
    "Gemma3ForConditionalGeneration": family(
        "gemma3", "gemma.gemma3", _GEMMA3, windows=Windows.LISTED, derive=_gemma3, within="text_config"
    ),
    "Olmo3ForCausalLM": family(
        "olmo3",
        "olmo.olmo2",
        _LISTED,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        windows=Windows.LISTED,
        derive=_olmo3,
    ),
    "MinistralForCausalLM": family(
        "ministral", "mistral.mistral", _MISTRAL, _LISTED, windows=Windows.LISTED, derive=_ministral
    ),
    "Ministral3ForCausalLM": family(
        "ministral3",
        "mistral.mistral",
        _MISTRAL,
        rms_norm_eps=1e-5,
        max_position_embeddings=262144,
        head_dim=128,
        windows=Windows.ALL,
        derive=_ministral3,
    ),
    "Mistral3ForConditionalGeneration": family(
        "mistral3", "mistral.mistral", _MISTRAL, windows=Windows.ALL, within="text_config"
    ),
    "Cohere2ForCausalLM": family(
        "cohere2",
        "gpt.cohere2",
        _LISTED,
        layer_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        windows=Windows.LISTED,
        derive=lambda fields: every_nth_full(fields, fields.integer("sliding_window_pattern", 4, low=1)),
    ),
}
