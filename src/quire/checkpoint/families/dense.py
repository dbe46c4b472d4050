"""Decoders whose feed-forward layers are dense, and whose layers all attend alike or through a window."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import LLAMA_LIKE, Family, Windows, every_nth_full, llama_like
from quire.checkpoint.files import Fields


def _bloom_sizes(fields: Fields) -> dict[str, Any]:
    """The names that BLOOM's files have besides those that its class reads."""
    names = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    return {key: fields.values[name] for name, key in names.items() if fields.values.get(name) is not None}


def _mpt_sizes(fields: Fields) -> dict[str, Any]:
    """The width of the feed-forward layers is given as a multiple."""
    hidden = fields.integer("d_model", low=1, high=2**20)
    return {"intermediate_size": hidden * fields.integer("expansion_ratio", 4, low=1, high=64)}


def _falcon_sizes(fields: Fields) -> dict[str, Any]:
    """Falcon's 40B and later say how many KV heads there are; before, there was one, or as many as heads."""
    hidden = fields.integer("n_embed", None, low=1) or fields.integer("hidden_size", low=1)
    heads = fields.integer("num_attention_heads", low=1)
    kv_heads = 1 if fields.flag("multi_query", True) else heads
    if fields.flag("new_decoder_architecture", False):
        kv_heads = fields.integer("num_kv_heads", heads, low=1)
        if heads % kv_heads:
            raise fields.error("num_kv_heads", f"a divisor of num_attention_heads, {heads}")
    inner = fields.integer("ffn_hidden_size", 4 * hidden, low=1)
    return {"hidden_size": hidden, "num_key_value_heads": kv_heads, "intermediate_size": inner, "head_dim": None}


def _gemma_activation(fields: Fields) -> dict[str, Any]:
    """The first files say "gelu" and mean its approximation."""
    return {"hidden_act": "gelu_pytorch_tanh"} if fields.values.get("hidden_act") == "gelu" else {}


def _exaone4_types(fields: Fields) -> dict[str, Any]:
    """The period of full layers is a number, or a word such as "LLLG"; without a window all layers are full."""
    period = fields.values.get("sliding_window_pattern", 4)
    period = len(period) if isinstance(period, str) else period
    if fields.values.get("sliding_window") is None or not isinstance(period, int) or period < 1:
        period = 1
    return every_nth_full(fields, period)


def _hunyuan_base(fields: Fields) -> dict[str, Any]:
    """What its files call "dynamic" with an "alpha" is a larger base, the same at every length."""
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
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
_GLM = {
    **LLAMA_LIKE,
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
}

DENSE: dict[str, Family] = {
    "LlamaForCausalLM": llama_like("llama", "llama.llama", 2048),
    "MistralForCausalLM": llama_like(
        "mistral", "mistral.mistral", 131072, num_key_value_heads=8, sliding_window=4096, windows=Windows.ALL
    ),
    "Qwen2ForCausalLM": llama_like("qwen2", "qwen.qwen2", 32768, **_WINDOW_LAYERS, windows=Windows.BY_LAYER),
    "Qwen3ForCausalLM": llama_like(
        "qwen3", "qwen.qwen3", 32768, **_WINDOW_LAYERS, head_dim=128, windows=Windows.BY_LAYER
    ),
    "Phi3ForCausalLM": llama_like(
        "phi3",
        "llama.phi3",
        4096,
        rms_norm_eps=1e-5,
        original_max_position_embeddings=4096,
        rotary_part="partial_rotary_factor",
        windows=Windows.ALL,
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        "gpt.gpt_neox",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
        },
        {"norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"},
        rotary_part="rotary_pct",
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        "gpt.stablelm",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
        },
        {"norm_eps": "layer_norm_eps"},
        rotary_part="partial_rotary_factor",
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        "gpt.starcoder2",
        {
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
        },
        {"norm_eps": "norm_epsilon"},
        windows=Windows.ALL,
    ),
    "Olmo2ForCausalLM": llama_like("olmo2", "olmo.olmo2", 2048, rms_norm_eps=1e-5),
    "GraniteForCausalLM": llama_like("granite", "granite.granite", 2048),
    "SmolLM3ForCausalLM": llama_like(
        "smollm3",
        "llama.smollm3",
        32768,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        rope_theta=2000000.0,
        use_sliding_window=False,
        windows=Windows.LISTED,
    ),
    "CohereForCausalLM": Family(
        "cohere",
        "gpt.cohere",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        {"norm_eps": "layer_norm_eps"},
    ),
    "GPTJForCausalLM": Family(
        "gptj",
        "gpt.gptj",
        {
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
            "n_positions": 2048,
            "rotary_dim": 64,
        },
        _GPT2_KEYS,
        rotary_part="rotary_dim",
    ),
    "FalconForCausalLM": Family(
        "falcon",
        "gpt.falcon",
        {
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
        },
        {"norm_eps": "layer_norm_epsilon", "hidden_act": "activation"},
        alibi=True,
        derive=_falcon_sizes,
    ),
    "BloomForCausalLM": Family(
        "bloom",
        "gpt.bloom",
        {
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "seq_length": 2048,
        },
        {**_GPT2_KEYS, "hidden_size": "hidden_size", "max_position_embeddings": "seq_length"},
        rotary=False,
        derive=_bloom_sizes,
    ),
    "MptForCausalLM": Family(
        "mpt",
        "gpt.mpt",
        {
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu",
            "tie_word_embeddings": True,
            "max_seq_len": 2048,
        },
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "hidden_act": "activation_function",
            "norm_eps": "layer_norm_epsilon",
        },
        rotary=False,
        derive=_mpt_sizes,
    ),
    "OPTForCausalLM": Family(
        "opt",
        "gpt.opt",
        {"layer_norm_eps": 1e-5, "activation_function": "relu", "tie_word_embeddings": True},
        {"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "norm_eps": "layer_norm_eps"},
        rotary=False,
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        "gpt.gpt2",
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
        _GPT2_KEYS,
        rotary=False,
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        "gemma.gemma",
        {
            "rms_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "head_dim": 256,
        },
        derive=_gemma_activation,
    ),
    "PhiForCausalLM": Family(
        "phi",
        "gpt.phi",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": False,
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
        },
        {"norm_eps": "layer_norm_eps"},
        rotary_part="partial_rotary_factor",
    ),
    "OlmoForCausalLM": llama_like("olmo", "olmo.olmo", 2048, rms_norm_eps=1e-5),
    "NemotronForCausalLM": Family(
        "nemotron",
        "gpt.nemotron",
        {
            "norm_eps": 1e-5,
            "hidden_act": "relu2",
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
        },
        {"norm_eps": "norm_eps"},
        rotary_part="partial_rotary_factor",
    ),
    "ArceeForCausalLM": llama_like("arcee", "llama.arcee", 4096, rms_norm_eps=1e-5, hidden_act="relu2"),
    "SeedOssForCausalLM": llama_like("seed_oss", "llama.seed_oss", 524288, num_key_value_heads=8, head_dim=128),
    "Ernie4_5ForCausalLM": llama_like(
        "ernie4_5",
        "llama.ernie",
        131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        num_key_value_heads=2,
        head_dim=128,
        rope_theta=500000.0,
    ),
    "GlmForCausalLM": Family("glm", "glm.glm", _GLM, rotary_part="partial_rotary_factor"),
    "Glm4ForCausalLM": Family("glm4", "glm.glm4", _GLM, rotary_part="partial_rotary_factor"),
    "Exaone4ForCausalLM": llama_like(
        "exaone4",
        "olmo.exaone4",
        2048,
        rms_norm_eps=1e-5,
        use_sliding_window=True,
        sliding_window=4096,
        windows=Windows.LISTED,
        derive=_exaone4_types,
    ),
    "HunYuanDenseV1ForCausalLM": llama_like(
        "hunyuan_v1_dense", "llama.hunyuan", 2048, rms_norm_eps=1e-5, derive=_hunyuan_base
    ),
}
