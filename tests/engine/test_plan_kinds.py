"""Plans of more than dense layers with a cache: from the shapes of published models, and from tiny files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.pooling import with_runner
from quire.cli.plan import report
from quire.config import EngineConfig
from quire.engine.plan import Plan, make_plan
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantizers import quantize_folder

COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 1, "torch_dtype": "bfloat16"}
QWEN = COMMON | {
    "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "norm_topk_prob": True, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "max_position_embeddings": 40960, "rope_theta": 1e6,
}  # fmt: skip
QWEN3_NEXT = QWEN | {
    "architectures": ["Qwen3NextForCausalLM"], "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts": 512, "num_experts_per_tok": 10, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "rope_theta": 1e7,
}  # fmt: skip
DEEPSEEK_V3 = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432, "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
GPT_OSS = COMMON | {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
    "num_local_experts": 32, "num_experts_per_tok": 4, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000, "attention_bias": True,
    "tie_word_embeddings": False,
}  # fmt: skip
MODERN_BERT = {
    "architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert", "hidden_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 160,
    "max_position_embeddings": 128, "global_attn_every_n_layers": 3, "local_attention": 32, "pad_token_id": 0,
}  # fmt: skip
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "simd_level": "generic", "num_threads": 2}


def plan_of(folder: Path, config: dict[str, Any] | None = None, available: int = 2**42, **options: Any) -> Plan:
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    asked = EngineConfig.from_kwargs(model=str(folder), **(OPTIONS | options))
    info = with_runner(load_model_info(folder), asked.model.runner)
    plan = make_plan(asked, info, available)
    assert "  all" in "\n".join(report(plan))
    return plan


def parts(plan: Plan) -> dict[str, int]:
    return {name: size for name, size in plan.in_memory.items() if size and name != "norms"}


def test_a_mixture_has_its_experts_apart_from_attention(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, QWEN3_30B)
    assert parts(plan) == {
        "embeddings": 2 * 151936 * 2048,
        "head": 2 * 151936 * 2048,
        "attention": 2 * 48 * 2048 * 128 * (32 + 4 + 4 + 32),
        "experts": 2 * 48 * 128 * (3 * 2048 * 768 + 2048),
    }
    assert 30.5e9 < plan.weights / 2 < 30.6e9  # "30B"
    assert plan.token_bytes == 48 * 2 * 4 * 128 * 2
    assert plan.concurrency[-1].length == 40960


def test_latent_attention_and_shared_experts(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, DEEPSEEK_V3)
    queries, latent, out = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 128 * 256 * 512, 128 * 128 * 7168
    assert parts(plan) == {
        "embeddings": 2 * 129280 * 7168,
        "head": 2 * 129280 * 7168,
        "attention": 2 * 61 * (queries + latent + out),
        "mlp": 2 * (3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048),
        "experts": 58 * 256 * (2 * 3 * 7168 * 2048 + 2 * 7168 + 4),
    }
    assert 671e9 < plan.weights / 2 < 671.1e9
    assert plan.token_bytes == 61 * (512 + 64) * 2
    # What is not there is not said to be held in 8 bits.
    assert (plan.quantization, plan.uncounted) == (None, "fp8")
    assert "As files hold them, in fp8, they may take less." in report(plan)


def test_layers_with_windows_hold_less_of_a_long_request(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, GPT_OSS)
    one = 2 * 3 * 2880 * 2880 + 4 * 3 * 2880  # an expert's matrices and biases
    assert plan.in_memory["experts"] == 24 * 32 * (one + 2 * 2880 + 4)
    assert [(group.num_layers, group.sliding_window) for group in plan.groups] == [(12, None), (12, 128)]
    longest = plan.concurrency[-1]
    assert longest.length == 131072
    small = plan_of(tmp_path, GPT_OSS, 2**33).problem
    assert small is not None and "only a smaller model works" in small
    assert 8192 < longest.blocks < 8192 + 64  # 8192 of the full layers; of the others what a step and a window need


@pytest.mark.slow  # 48 layers of 512 experts
def test_states_of_a_published_hybrid(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, QWEN3_NEXT)
    assert 79e9 < plan.weights / 2 < 80e9
    assert plan.token_bytes == 12 * 2 * 2 * 256 * 2
    assert plan.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128)
    assert plan.step.states == 4 * plan.state_bytes
    assert plan.in_memory["norms"] < 2**21 and plan.in_memory["other"] == 0


def test_encoders_hold_blocks_for_one_step_only(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, MODERN_BERT)
    assert plan.in_memory["head"] and not plan.in_memory["other"]
    assert plan.limit == "max_num_batched_tokens"
    assert plan.fit is not None and plan.fit.num_blocks == plan.max_num_batched_tokens // 16 + 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return write_checkpoint(folder, "llama", hidden_size=64, intermediate_size=128, num_key_value_heads=2)


@pytest.mark.parametrize("kind", ["awq", "gguf"])
def test_quantized_files_are_counted_as_they_are_held(kind: str, llama: Path, tmp_path: Path) -> None:
    if kind == "awq":
        quantize_folder(llama, tmp_path, "awq")
        folder = tmp_path
    else:
        folder = tmp_path / "model.gguf"
        write_gguf(llama, folder, "Q8_0")
    plan, full = (plan_of(path, dtype="bfloat16") for path in (folder, llama))
    assert (plan.quantization, plan.uncounted, full.quantization) == (kind, None, None)
    assert kind in report(plan)[0]
    for part in ("attention", "mlp"):
        assert plan.in_memory[part] < 0.7 * full.in_memory[part]
        assert plan.on_disk is not None and plan.on_disk[part] <= plan.in_memory[part]


def test_adapters_take_part_of_the_steps(llama: Path) -> None:
    plain, adapted = plan_of(llama), plan_of(llama, enable_lora=True)
    assert adapted.step.activations > plain.step.activations
    assert adapted.in_memory == plain.in_memory
