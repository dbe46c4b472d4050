"""Names of tensors in ggml and in transformers, and what llama.cpp's converters change in the tensors.

One table for each architecture: names of a layer's tensors without "blk.N." and ".weight" -> names without the prefix.
Some tensors are stored otherwise than transformers has them; `Origin.change` says how to undo that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Change = Literal["", "unrotate_q", "unrotate_k", "minus_one", "transposed", "by_head"]


@dataclass(frozen=True, slots=True)
class NameTable:
    """The names of one architecture.

    Attributes:
        architecture: transformers' class, a key of `FAMILIES`.
        layer: a part of a layer -> its name. top: tensors outside of layers, with suffix.
        layers: what stands before the number of a layer.
        experts: stacked tensors of experts -> what stands before and after an expert's number.
        changes: by a part's name, in ggml's words.
    """

    architecture: str
    layer: Mapping[str, str]
    top: Mapping[str, str]
    layers: str = "model.layers."
    experts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)


class Origin(NamedTuple):
    """The stored tensor of a weight, the expert whose matrix it is (None: all), and the converter's change to undo."""

    stored: str
    expert: int | None = None
    change: Change = ""


TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **DENSE, "ffn_norm": "post_attention_layernorm"}
SANDWICH = {
    **ATTENTION,
    **DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MIXTRAL = {**LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"}
QWEN_MOE = {
    **LLAMA,
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
QWEN_EXPERTS = {f"ffn_{name}_exps": ("mlp.experts.", f".{name}_proj.weight") for name in ("gate", "up", "down")}
MIXTRAL_EXPERTS = {
    f"ffn_{name}_exps": ("block_sparse_moe.experts.", f".{other}.weight")
    for name, other in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
}
UNROTATE: dict[str, Change] = {"attn_q": "unrotate_q", "attn_k": "unrotate_k"}
GEMMA_NORMS: dict[str, Change] = dict.fromkeys(
    ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm"),
    "minus_one",
)
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
NEOX = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

TABLES = {
    "llama": NameTable("LlamaForCausalLM", LLAMA, TOP, changes=UNROTATE),
    "mixtral": NameTable("MixtralForCausalLM", MIXTRAL, TOP, experts=MIXTRAL_EXPERTS, changes=UNROTATE),
    "granite": NameTable("GraniteForCausalLM", LLAMA, TOP, changes=UNROTATE),
    "smollm3": NameTable("SmolLM3ForCausalLM", LLAMA, TOP, changes=UNROTATE),
    "qwen2": NameTable("Qwen2ForCausalLM", LLAMA, TOP),
    "qwen3": NameTable("Qwen3ForCausalLM", LLAMA, TOP),
    "qwen2moe": NameTable("Qwen2MoeForCausalLM", QWEN_MOE, TOP, experts=QWEN_EXPERTS),
    "qwen3moe": NameTable("Qwen3MoeForCausalLM", QWEN_MOE, TOP, experts=QWEN_EXPERTS),
    "gemma2": NameTable("Gemma2ForCausalLM", SANDWICH, TOP, changes=GEMMA_NORMS),
    "gemma3": NameTable("Gemma3ForCausalLM", SANDWICH, TOP, changes=GEMMA_NORMS),
    "olmo2": NameTable("Olmo2ForCausalLM", SANDWICH, TOP),
    "command-r": NameTable("CohereForCausalLM", LLAMA, TOP),
    "phi3": NameTable(
        "Phi3ForCausalLM", {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, TOP
    ),
    "stablelm": NameTable("StableLmForCausalLM", LLAMA, TOP),
    "starcoder2": NameTable("Starcoder2ForCausalLM", {**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, TOP),
    "gpt2": NameTable(
        "GPT2LMHeadModel",
        GPT2,
        {
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        },
        layers="transformer.h.",
        changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
    ),
    "gptneox": NameTable(
        "GPTNeoXForCausalLM",
        NEOX,
        {
            "token_embd.weight": "gpt_neox.embed_in.weight",
            "output_norm.weight": "gpt_neox.final_layer_norm.weight",
            "output_norm.bias": "gpt_neox.final_layer_norm.bias",
            "output.weight": "embed_out.weight",
        },
        layers="gpt_neox.layers.",
        changes={"attn_qkv": "by_head"},
    ),
}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of the config."""

_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


def table_of(architecture: str, names: Iterable[str]) -> NameTable | None:
    """Return the table of one of ggml's architectures; Mixtral has Llama's name, and experts."""
    if architecture == "llama" and any(name.endswith(".ffn_gate_inp.weight") for name in names):
        architecture = "mixtral"
    return TABLES.get(architecture)


def origins(table: NameTable, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Origin]]:
    """Yield transformers' name and the origin of each tensor; tensors that are not in the table keep their names."""
    for stored, shape in shapes.items():
        if stored in FACTORS:
            continue
        if stored in table.top:
            yield table.top[stored], Origin(stored, None, table.changes.get(stored.partition(".")[0], ""))
            continue
        match = _LAYER.fullmatch(stored)
        part = match[2] if match else ""
        if match and part in table.layer:
            change = table.changes.get(part, "")
            if match[3] == "bias" and change == "transposed":
                change = ""
            yield f"{table.layers}{match[1]}.{table.layer[part]}.{match[3]}", Origin(stored, None, change)
        elif match and part in table.experts and len(shape) == 3:
            before, after = table.experts[part]
            for expert in range(min(shape[0], 65536)):
                yield f"{table.layers}{match[1]}.{before}{expert}{after}", Origin(stored, expert)
        else:
            yield stored, Origin(stored)
