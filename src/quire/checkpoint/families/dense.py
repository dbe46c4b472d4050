"""Decoders with dense feed-forward layers."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import Family, Windows, every_nth_full, family
from quire.checkpoint.files import ConfigFields


def _bloom_sizes(fields: ConfigFields) -> dict[str, Any]:
    """Map other keys of published BLOOM files to those that transformers' class reads."""
    names = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    return {key: fields.values[name] for name, key in names.items() if fields.values.get(name) is not None}


def _mpt_sizes(fields: ConfigFields) -> dict[str, Any]:
    """Compute the width of feed-forward layers, which MPT gives as a multiple of d_model."""
    hidden = fields.integer("d_model", low=1, high=2**20)
    return {"intermediate_size": hidden * fields.integer("expansion_ratio", 4, low=1, high=64)}


def _falcon_sizes(fields: ConfigFields) -> dict[str, Any]:
    """Return the sizes of Falcon; before num_kv_heads (40B and later) there was one KV head, or as many as heads."""
    hidden = fields.integer("n_embed", None, low=1) or fields.integer("hidden_size", low=1)
    heads = fields.integer("num_attention_heads", low=1)
    kv_heads = 1 if fields.flag("multi_query", True) else heads
    if fields.flag("new_decoder_architecture", False):
        kv_heads = fields.integer("num_kv_heads", heads, low=1)
        if heads % kv_heads:
            raise fields.error("num_kv_heads", f"a divisor of num_attention_heads, {heads}")
    inner = fields.integer("ffn_hidden_size", 4 * hidden, low=1)
    return {"hidden_size": hidden, "num_key_value_heads": kv_heads, "intermediate_size": inner, "head_dim": None}


def _gemma_activation(fields: ConfigFields) -> dict[str, Any]:
    """Replace "gelu", by which the first files mean its tanh approximation."""
    return {"hidden_act": "gelu_pytorch_tanh"} if fields.values.get("hidden_act") == "gelu" else {}


def _exaone4_types(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types from sliding_window_pattern, a number or a string such as "LLLG"."""
    period = fields.values.get("sliding_window_pattern", 4)
    period = len(period) if isinstance(period, str) else period
    if fields.values.get("sliding_window") is None or not isinstance(period, int) or period < 1:
        period = 1
    return every_nth_full(fields, period)


def _hunyuan_base(fields: ConfigFields) -> dict[str, Any]:
    """Return the NTK-aware rope_theta that "dynamic" scaling with "alpha" means, the same at every length."""
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = fields.inner(key)
    if rope is None or not rope.values.get("alpha"):
        return {}
    heads = fields.integer("num_attention_heads", low=1)
    size = fields.integer("head_dim", None, low=4) or fields.integer("hidden_size", low=1) // heads
    theta = rope.number("rope_theta", None, above=1.0) or fields.number("rope_theta", 10000.0, above=1.0)
    stretched = theta * rope.number("alpha") ** (size / (size - 2))
    return {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": stretched}}


_WINDOW_LAYERS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_GLM = {
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
}

DENSE: dict[str, Family] = {
    "LlamaForCausalLM": family("llama", "llama.llama", max_position_embeddings=2048),
    "MistralForCausalLM": family(
        "mistral",
        "mistral.mistral",
        max_position_embeddings=131072,
        num_key_value_heads=8,
        sliding_window=4096,
        windows=Windows.ALL,
    ),
    "Qwen2ForCausalLM": family(
        "qwen2", "qwen.qwen2", _WINDOW_LAYERS, max_position_embeddings=32768, windows=Windows.BY_LAYER
    ),
    "Qwen3ForCausalLM": family(
        "qwen3", "qwen.qwen3", _WINDOW_LAYERS, max_position_embeddings=32768, head_dim=128, windows=Windows.BY_LAYER
    ),
    "Phi3ForCausalLM": family(
        "phi3",
        "llama.phi3",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        original_max_position_embeddings=4096,
        rotary_part="partial_rotary_factor",
        windows=Windows.ALL,
    ),
    "GPTNeoXForCausalLM": family(
        "gpt_neox",
        "gpt.gpt_neox",
        layer_norm_eps=1e-5,
        hidden_act="gelu",
        max_position_embeddings=2048,
        rotary_pct=0.25,
        keys={"rope_theta": "rotary_emb_base"},
    ),
    "StableLmForCausalLM": family(
        "stablelm", "gpt.stablelm", layer_norm_eps=1e-5, max_position_embeddings=4096, partial_rotary_factor=0.25
    ),
    "Starcoder2ForCausalLM": family(
        "starcoder2",
        "gpt.starcoder2",
        norm_epsilon=1e-5,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        num_key_value_heads=2,
        windows=Windows.ALL,
    ),
    "Olmo2ForCausalLM": family("olmo2", "olmo.olmo2", max_position_embeddings=2048, rms_norm_eps=1e-5),
    "GraniteForCausalLM": family("granite", "granite.granite", max_position_embeddings=2048),
    "SmolLM3ForCausalLM": family(
        "smollm3",
        "llama.smollm3",
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        rope_theta=2000000.0,
        use_sliding_window=False,
        windows=Windows.LISTED,
    ),
    "CohereForCausalLM": family(
        "cohere",
        "gpt.cohere",
        layer_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "GPTJForCausalLM": family(
        "gptj",
        "gpt.gptj",
        layer_norm_epsilon=1e-5,
        activation_function="gelu_new",
        n_positions=2048,
        rotary_dim=64,
        keys=_GPT2_KEYS,
    ),
    "FalconForCausalLM": family(
        "falcon",
        "gpt.falcon",
        layer_norm_epsilon=1e-5,
        activation="gelu",
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        alibi=True,
        derive=_falcon_sizes,
    ),
    "BloomForCausalLM": family(
        "bloom",
        "gpt.bloom",
        layer_norm_epsilon=1e-5,
        activation_function="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        seq_length=2048,
        keys={**_GPT2_KEYS, "hidden_size": "hidden_size"},
        rotary=False,
        derive=_bloom_sizes,
    ),
    "MptForCausalLM": family(
        "mpt",
        "gpt.mpt",
        layer_norm_epsilon=1e-5,
        activation_function="gelu",
        tie_word_embeddings=True,
        max_seq_len=2048,
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        },
        rotary=False,
        derive=_mpt_sizes,
    ),
    "OPTForCausalLM": family(
        "opt",
        "gpt.opt",
        layer_norm_eps=1e-5,
        activation_function="relu",
        tie_word_embeddings=True,
        keys={"intermediate_size": "ffn_dim"},
        rotary=False,
    ),
    "GPT2LMHeadModel": family(
        "gpt2",
        "gpt.gpt2",
        layer_norm_epsilon=1e-5,
        activation_function="gelu_new",
        tie_word_embeddings=True,
        keys=_GPT2_KEYS,
        rotary=False,
    ),
    "GemmaForCausalLM": family(
        "gemma",
        "gemma.gemma",
        rms_norm_eps=1e-6,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        head_dim=256,
        derive=_gemma_activation,
    ),
    "PhiForCausalLM": family(
        "phi",
        "gpt.phi",
        layer_norm_eps=1e-5,
        hidden_act="gelu_new",
        max_position_embeddings=2048,
        partial_rotary_factor=0.5,
    ),
    "OlmoForCausalLM": family("olmo", "olmo.olmo", max_position_embeddings=2048, rms_norm_eps=1e-5),
    "NemotronForCausalLM": family(
        "nemotron",
        "gpt.nemotron",
        norm_eps=1e-5,
        hidden_act="relu2",
        max_position_embeddings=4096,
        partial_rotary_factor=0.5,
    ),
    "ArceeForCausalLM": family(
        "arcee", "llama.arcee", max_position_embeddings=4096, rms_norm_eps=1e-5, hidden_act="relu2"
    ),
    "SeedOssForCausalLM": family(
        "seed_oss", "llama.seed_oss", max_position_embeddings=524288, num_key_value_heads=8, head_dim=128
    ),
    "Ernie4_5ForCausalLM": family(
        "ernie4_5",
        "llama.ernie",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        num_key_value_heads=2,
        head_dim=128,
        rope_theta=500000.0,
    ),
    "GlmForCausalLM": family("glm", "glm.glm", _GLM),
    "Glm4ForCausalLM": family("glm4", "glm.glm4", _GLM),
    "Exaone4ForCausalLM": family(
        "exaone4",
        "olmo.exaone4",
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        use_sliding_window=True,
        sliding_window=4096,
        windows=Windows.LISTED,
        derive=_exaone4_types,
    ),
    "HunYuanDenseV1ForCausalLM": family(
        "hunyuan_v1_dense", "llama.hunyuan", max_position_embeddings=2048, rms_norm_eps=1e-5, derive=_hunyuan_base
    ),
}
