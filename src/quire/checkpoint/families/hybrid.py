"""Decoders that mix attention with layers that keep a state of fixed size."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import LLAMA_LIKE, Family
from quire.checkpoint.fields import Fields

FULL, LINEAR = "full_attention", "linear_attention"


def _linear_layers(fields: Fields) -> dict[str, Any]:
    """Every fourth layer attends where the file lists no types; sizes of experts stand for those of dense layers."""
    layers = fields.integer("num_hidden_layers", low=1, high=4096)
    types = fields.values.get("layer_types")
    if types is None:
        period = fields.integer("full_attention_interval", 4, low=1)
        types = [LINEAR if (layer + 1) % period else FULL for layer in range(layers)]
    check_types(Fields({**fields.values, "layer_types": types}, fields.path), layers, (FULL, LINEAR))
    inner = fields.values.get("intermediate_size", fields.values.get("moe_intermediate_size"))
    return {"layer_types": types, "intermediate_size": inner}


def check_types(fields: Fields, layers: int, known: tuple[str, str]) -> None:
    """Raise `ModelError` unless each layer has a known type, and one at least the first of these, that of attention."""
    types = fields.values["layer_types"]
    if not isinstance(types, list) or len(types) != layers:
        raise fields.error("layer_types", f"a list of num_hidden_layers, {layers}, names")
    if any(layer_type not in known for layer_type in types):
        raise fields.error("layer_types", f"names among {', '.join(known)}")
    if known[0] not in types:
        raise fields.error("layer_types", f"at least one {known[0]}")


_QWEN = {
    **LLAMA_LIKE,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_SHARED = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

HYBRID: dict[str, Family] = {
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        {**_QWEN, **_SHARED, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
        rotary_part="partial_rotary_factor",
        keeps_states=True,
        derive=_linear_layers,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        {**_QWEN, "num_key_value_heads": 4},
        rotary_part="partial_rotary_factor",
        keeps_states=True,
        derive=_linear_layers,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        {**_QWEN, **_SHARED, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
        rotary_part="partial_rotary_factor",
        keeps_states=True,
        derive=_linear_layers,
    ),
}
