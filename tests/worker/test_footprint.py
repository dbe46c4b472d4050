"""What is said of memory before a model is loaded, against what loading and recording a step really take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.resolve import resolve_config
from quire.kernels import meta
from quire.kernels.backend import Backend, LayerCache
from quire.kernels.cpu import (
    arrays,
    simd,
)
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.jit import Op
from quire.kernels.steps import StepShape
from quire.models.loader import load_model
from quire.worker.footprint import Footprint, part_of
from quire.worker.graphs import SequenceStates, Shape, StepGraphs
from quire.worker.model_runner import new_cache
from tests.helpers.packed import packed_nbytes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1003,
    "hidden_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 144,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
    },
    "olmo2": LLAMA | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "granite": LLAMA
    | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.3,
    },
    "cohere": LLAMA
    | {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "layer_norm_eps": 1e-5,
        "use_qk_norm": True,
        "logit_scale": 0.25,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 1003,
        "n_embd": 72,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "activation_function": "gelu_new",
        "torch_dtype": "float32",
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": 1003,
        "hidden_size": 72,
        "n_layer": 3,
        "n_head": 6,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "seq_length": 512,
    },
    "mixtral": LLAMA
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 5, "sliding_window": 48},
    "qwen2_moe": LLAMA
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 9,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [1],
    },
    "qwen3_next": LLAMA
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 96,
    },
    "deepseek_v3": LLAMA
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "q_lora_rank": 40,
        "kv_lora_rank": 33,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": LLAMA
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "head_dim": 16,
        "rope_scaling": None,
        "rope_parameters": None,
    },
}


def settled(folder: Path, family: str, **options: Any) -> tuple[EngineConfig, Any]:
    (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
    info = load_model_info(folder)
    base = {"max_num_seqs": 24, "max_num_batched_tokens": 130, "max_model_len": 400, "load_format": "dummy"}
    return resolve_config(EngineConfig.from_kwargs(model=str(folder), **(base | options)), info), info


STEPS = [Shape(StepShape(130, 24, 24)), Shape(StepShape(24, 24, 24))]


def recorded(config: EngineConfig, info: Any, steps: list[Shape]) -> tuple[int, int]:
    """Load and record steps; return bytes of packed weights, and of the arena that is used."""
    model_config, device = config.model, config.device
    backend = CPUBackend(
        model_config.dtype, config.cache.kv_cache_dtype, device.num_threads, quantization=model_config.quantization
    )
    packed: list[int] = []
    pack, vector = backend.pack_linear, backend.vector

    def counted_pack(*args: Any, **keywords: Any) -> Any:
        weight = pack(*args, **keywords)
        data, rest = weight.data.nbytes, packed_nbytes(weight) - weight.data.nbytes
        packed.append(-(-data // arrays.ALIGNMENT) * arrays.ALIGNMENT + rest)
        return weight

    def counted_vector(tensor: Any) -> Any:
        made = vector(tensor)
        packed.append(made.nbytes)
        return made

    def counted_heads(matrices: Any) -> Any:
        made = pack_heads(matrices)
        packed.append(-(-made.data.nbytes // arrays.ALIGNMENT) * arrays.ALIGNMENT)
        return made

    pack_heads, backend.pack_heads = backend.pack_heads, counted_heads  # type: ignore[method-assign]
    backend.pack_linear, backend.vector = counted_pack, counted_vector  # type: ignore[method-assign]
    model = load_model(
        info,
        backend,
        max_model_len=config.model.max_model_len,
        load_format="dummy",
        latent_cache=config.cache.latent_cache,
    )
    spec, size = model.kv_cache_spec(), config.cache.block_size
    groups = {layer: n for n, group in enumerate(spec.groups(400)) for layer in group.layers}
    graphs = StepGraphs(
        model,
        backend,
        [LayerCache(new_cache(backend, layer, 2, size), groups[index]) for index, layer in enumerate(spec.layers)],
        max_tokens=130,
        max_num_seqs=24,
        max_blocks=-(-400 // size),
        states=SequenceStates(spec, cast(Backend, backend), 24).arrays,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "address", property(lambda op: 1))  # what is recorded never runs, so it needs no compiling
        for shape in steps:
            graphs._graph(shape)
    return sum(packed), backend._launcher.arena.touched


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_activations_are_what_the_cpu_backend_takes(tmp_path: Path, family: str) -> None:
    config, info = settled(tmp_path, family)
    footprint = Footprint(config, info)
    weights, used = recorded(config, info, STEPS)
    assert footprint.weights == weights
    assert footprint.step(config).activations == used


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float16", "kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "int8-weight-only", "num_threads": 1},
    ],
    ids=lambda options: " ".join(str(value) for value in options.values()),
)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_so_they_are_in_every_form_of_weights(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    config, info = settled(tmp_path, family, **options)
    footprint = Footprint(config, info)
    weights, used = recorded(config, info, STEPS)
    assert footprint.weights == weights
    assert footprint.step(config).activations == used


@pytest.mark.parametrize("options", [{"latent_cache": False}, {"quantization": "int8"}], ids=["heads", "int8"])
def test_so_they_are_for_latent_attention(tmp_path: Path, options: dict[str, Any]) -> None:
    config, info = settled(tmp_path, "deepseek_v3", **options)
    footprint = Footprint(config, info)
    weights, used = recorded(config, info, STEPS)
    assert footprint.weights == weights
    assert footprint.step(config).activations == used


def test_the_processor_is_the_one_that_kernels_are_compiled_for() -> None:
    processor = meta.Processor.of_level()
    assert (processor.pairs, processor.tile_rows) == (simd.HAS_BF16_DOT, simd.TILE_ROWS)


def test_a_processor_without_the_file_of_flags_has_the_least(tmp_path: Path) -> None:
    assert meta.Processor.of_level(root=tmp_path) == meta.Processor(pairs=False, tile_rows=2)
    assert meta.Processor.of_level("avx512") == meta.Processor(pairs=False, tile_rows=8)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("transformer.wpe.weight", "embeddings"),
        ("transformer.word_embeddings_layernorm.weight", "norms"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.self_attn.q_proj.bias", "attention"),
        ("transformer.h.1.attn.c_attn.weight", "attention"),
        ("transformer.h.1.ln_1.weight", "norms"),
        ("model.layers.3.mlp.down_proj.weight", "mlp"),
        ("model.decoder.layers.3.fc1.weight", "mlp"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "mlp"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.0.mlp.gate.weight", "experts"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.block_sparse_moe.e_score_correction_bias", "experts"),
        ("model.layers.0.block_sparse_moe.input_linear.weight", "experts"),
        ("model.layers.0.linear_attn.conv1d.weight", "attention"),
        ("model.layers.0.conv.in_proj.weight", "convolutions"),
        ("encoder.layer.0.attention.output.dense.weight", "attention"),
        ("encoder.layer.0.output.dense.weight", "mlp"),
        ("encoder.layer.0.output.LayerNorm.weight", "norms"),
        ("roberta.pooler.dense.weight", "head"),
        ("classifier.out_proj.bias", "head"),
        ("lm_head.weight", "head"),
        ("model.decoder.project_in.weight", "other"),
    ],
)
def test_tensors_are_sorted_by_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_states_of_all_sequences_are_counted(tmp_path: Path) -> None:
    config, info = settled(tmp_path, "qwen3_next")
    step = Footprint(config, info).step(config)
    assert step.states == 24 * 3 * 4 * (4 * 24 * 20 + 3 * (2 * 48 + 80))
    more, _ = settled(tmp_path, "qwen3_next", max_num_seqs=48)
    assert Footprint(more, info).step(more).total - step.total >= step.states


def test_steps_of_more_sequences_and_longer_contexts_take_more(tmp_path: Path) -> None:
    config, info = settled(tmp_path, "llama")
    footprint = Footprint(config, info)
    small = footprint.step(config)
    more, _ = settled(tmp_path, "llama", max_num_seqs=48)
    longer, _ = settled(tmp_path, "llama", max_model_len=512)
    assert footprint.step(more).activations > small.activations
    assert footprint.step(longer).inputs - small.inputs == 24 * 112 * np.dtype(np.int32).itemsize + 2 * 24 * 7 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_every_family_are_counted_for_a_gpu(tmp_path: Path, family: str) -> None:
    config, info = settled(tmp_path, family, device="cuda", dtype="bfloat16")
    footprint = Footprint(config, info)
    wide, _ = settled(tmp_path, family, device="cuda", dtype="float32")
    assert 0 < footprint.step(config).activations < Footprint(wide, info).step(wide).activations
