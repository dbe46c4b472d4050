"""Encoders and other models that compute embeddings or scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.checkpoint.families.dense import DENSE
from quire.checkpoint.families.family import FULL, SLIDING, Family, Windows, family, layer_types
from quire.checkpoint.families.local import LOCAL
from quire.checkpoint.files import ConfigFields

_BERT = {
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


def _learned_positions(fields: ConfigFields) -> dict[str, Any]:
    """Refuse the relative position embeddings of later BERT variants."""
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.error("position_embedding_type", "absolute")
    return {}


def _roberta_positions(fields: ConfigFields) -> dict[str, Any]:
    """Leave out the rows of the position table up to the padding token's, which stand for no position."""
    rows, first = fields.integer("max_position_embeddings", low=1), fields.integer("pad_token_id") + 1
    if rows <= first:
        raise fields.error("max_position_embeddings", f"more than pad_token_id + 1, {first}")
    return {**_learned_positions(fields), "max_position_embeddings": rows - first}


def _modernbert_layers(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types, the window to one side, and rotary parameters by layer type, from ModernBERT's keys."""
    every = fields.integer("global_attn_every_n_layers", 3, low=1)
    ropes = fields.values.get("rope_parameters") or {
        FULL: {"rope_type": "default", "rope_theta": fields.number("global_rope_theta", 160000.0)},
        SLIDING: {"rope_type": "default", "rope_theta": fields.number("local_rope_theta", 10000.0)},
    }
    window = fields.integer("local_attention", 128, low=2) // 2 + 1  # a token itself, and half to each side
    types = layer_types(fields, lambda layer: bool(layer % every))
    return {**types, "rope_parameters": ropes, "sliding_window": window, "use_sliding_window": True}


_BERT_FAMILY = family("bert", "bert.bert", _BERT, rotary=False, derive=_learned_positions, pools="embed", causal=False)
_ROBERTA_FAMILY = replace(
    _BERT_FAMILY,
    model_type="roberta",
    options="bert.roberta",
    defaults={**_BERT, "pad_token_id": 1},
    derive=_roberta_positions,
)
_XLM_ROBERTA_FAMILY = replace(_ROBERTA_FAMILY, model_type="xlm-roberta")
_MODERNBERT_FAMILY = family(
    "modernbert",
    "bert.modernbert",
    norm_eps=1e-5,
    hidden_activation="gelu",
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    norm_bias=False,
    attention_bias=False,
    mlp_bias=False,
    classifier_bias=False,
    classifier_activation="gelu",
    windows=Windows.LISTED,
    derive=_modernbert_layers,
    pools="embed",
    causal=False,
)


def _of_classes(family: Family) -> Family:
    return replace(family, pools="classify")


ENCODERS: dict[str, Family] = {
    "BertModel": _BERT_FAMILY,
    "BertForMaskedLM": _BERT_FAMILY,
    "BertForSequenceClassification": _of_classes(_BERT_FAMILY),
    "RobertaModel": _ROBERTA_FAMILY,
    "RobertaForMaskedLM": _ROBERTA_FAMILY,
    "RobertaForSequenceClassification": _of_classes(_ROBERTA_FAMILY),
    "XLMRobertaModel": _XLM_ROBERTA_FAMILY,
    "XLMRobertaForMaskedLM": _XLM_ROBERTA_FAMILY,
    "XLMRobertaForSequenceClassification": _of_classes(_XLM_ROBERTA_FAMILY),
    "ModernBertModel": _MODERNBERT_FAMILY,
    "ModernBertForMaskedLM": _MODERNBERT_FAMILY,
    "ModernBertForSequenceClassification": _of_classes(_MODERNBERT_FAMILY),
}
# Decoders without an output head of their own: the body's name, before "Model" and "ForSequenceClassification".
DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")

_GEMMA3_FAMILY = LOCAL["Gemma3ForCausalLM"]


def _embedding_gemma(fields: ConfigFields) -> dict[str, Any]:
    """Return Gemma 3's keys, with bidirectional attention if the file has it; its window counts both sides."""
    assert _GEMMA3_FAMILY.derive is not None
    found = dict(_GEMMA3_FAMILY.derive(fields))
    if fields.flag("use_bidirectional_attention", False):
        window = found.get("sliding_window") or fields.integer("sliding_window", low=1)
        found |= {"is_causal": False, "sliding_window": window // 2 + 1}
    return found


POOLING: dict[str, Family] = {
    **ENCODERS,
    "Gemma3TextModel": replace(_GEMMA3_FAMILY, derive=_embedding_gemma, pools="embed"),
    **{f"{name}Model": replace(DENSE[f"{name}ForCausalLM"], pools="embed") for name in DECODERS},
    **{f"{name}ForSequenceClassification": replace(DENSE[f"{name}ForCausalLM"], pools="classify") for name in DECODERS},
}
