"""Models that run on transformers' own code, through our cache and our products."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire import LLM, SamplingParams
from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.plan import make_plan
from quire.engine.resolve import load_info
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import FAMILIES, SMALL, oracle_logits, write_checkpoint
from tests.helpers.model_driver import ModelDriver
from tests.helpers.ranks import run_ranks
from tests.parity.harness import TOLERANCE, assert_close, tokens

WIDE = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Families that transformers has; what they are here for.
FOREIGN: dict[str, dict[str, Any]] = {
    "persimmon": SMALL,  # no class of ours
    "helium": {**WIDE, "head_dim": 8},
    "gemma2": {**WIDE, "query_pre_attn_scalar": 16, "sliding_window": 7},  # windows, soft caps
    "gpt_oss": {**WIDE, **EXPERTS, "sliding_window": 7},  # sinks, experts
    "mixtral": {**WIDE, **EXPERTS},
    "deepseek_v3": {  # values narrower than keys
        **SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt2": FAMILIES["gpt2"],
    "qwen3": {**FAMILIES["qwen3"], "tie_word_embeddings": True},
}
QUICK = ("persimmon", "gemma2")


def write(folder: Path, family: str) -> Path:
    return write_checkpoint(folder, family, **FOREIGN[family])


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, config in FOREIGN.items():
        monkeypatch.setitem(FAMILIES, family, config)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,)) for name in FOREIGN]
)
def test_logits_match(family: str, device: str, tmp_path: Path) -> None:
    folder, prompt, other = write(tmp_path, family), tokens(31), tokens(9, seed=1)
    backend = create_backend(device, "float32", "float32", num_threads=1)
    model = ModelDriver(load_model(load_model_info(folder, model_impl="transformers"), backend), backend)
    expected = oracle_logits(folder, prompt)
    assert_close(model.step({"whole": prompt})["whole"], expected)
    pieces = [
        model.step({"a": prompt[:5]})["a"],
        model.step({"b": other, "a": prompt[5:18]})["a"],
        model.step({"a": prompt[18:]})["a"],
    ]
    assert_close(np.concatenate(pieces), expected)


def test_an_engine_serves_one_and_quantizes_it(tmp_path: Path) -> None:
    folder = write(tmp_path, "persimmon")
    prompts = [{"prompt_token_ids": tokens(n, seed=n)} for n in (3, 11, 6)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, max_num_batched_tokens=16) as llm:
        texts = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert texts == alone
    for prompt, text in zip(prompts, texts, strict=True):
        ids = prompt["prompt_token_ids"]
        choices = oracle_logits(folder, ids + list(text))[len(ids) - 1 : -1].argmax(axis=1)
        assert list(text) == choices.tolist()
    with LLM(str(folder), skip_tokenizer_init=True, quantization="int8") as llm:
        assert len(llm.generate(prompts[:1], params)[0].outputs[0].token_ids) == 8


def test_two_ranks_split_it_by_its_plan(tmp_path: Path) -> None:
    folder, prompt = write(tmp_path, "qwen3"), tokens(13)
    backend = create_backend("reference", "float32", "float32", num_threads=1)
    info = load_model_info(folder, model_impl="transformers")

    loading = threading.Lock()  # transformers loads one model at a time in a process

    def work(backend: Backend) -> np.ndarray:
        with loading:
            model = load_model(info, backend)
        assert model.kv_cache_spec().layers[0].num_kv_heads == 1
        return ModelDriver(model, backend).step({"a": prompt})["a"]

    for logits in run_ranks(2, backend, work):
        assert_close(logits, oracle_logits(folder, prompt), 10 * TOLERANCE)


def test_it_is_planned_without_being_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path, "qwen3")
    config = EngineConfig.from_kwargs(model=str(folder), model_impl="transformers", dtype="float32")
    plan = make_plan(config, load_info(config), 2**32, ())
    assert plan.architecture == "TransformersForCausalLM" and plan.problem is None
    assert plan.weights > 4 * 160 * 32


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="BloomForCausalLM of transformers does not take attention functions"):
        load_model(
            load_model_info(
                write_checkpoint(tmp_path / "bloom", "bloom"), {"max_position_embeddings": 64}, "transformers"
            ),
            create_backend("reference", "float32", "float32"),
        )
    llama = write_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(ModelError, match="layer type 'linear_attention' is not supported through transformers"):
        load_model_info(llama, {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 2}, "transformers")
    with pytest.raises(ModelError, match="quantized weights are not supported through transformers"):
        load_model_info(llama, {"quantization_config": {"quant_method": "awq"}}, "transformers")
    with pytest.raises(ModelError, match="architecture 'PersimmonForCausalLM' is not supported"):
        load_model_info(llama, {"architectures": ["PersimmonForCausalLM"], "model_type": "persimmon"}, "quire")
    with pytest.raises(ConfigError, match="model_impl"):
        EngineConfig.from_kwargs(model="x", model_impl="vllm")


# What a configuration of a model has in common, in a few spellings; small enough for a test.
TINY: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "sliding_window", "hidden_size_per_layer_input", "num_buckets"), 8),
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "decoder_attention_heads": 4,
    "v_head_dim": 12,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_tiny(model_type: str, folder: Path) -> Any:
    """Return a small model of transformers with random weights, which are also in the folder; skip if none is made."""
    import torch
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    try:
        usual = kind().to_dict()
        changes: dict[str, Any] = {name: TINY[name] for name in TINY if isinstance(usual.get(name), int)}
        if isinstance(usual.get("layer_types"), list):
            changes["layer_types"] = [*dict.fromkeys(usual["layer_types"])][:2] * 2
            del changes["layer_types"][2:]
        config = kind(**changes)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        if sum(parameter.numel() for parameter in model.parameters()) > 10**8:
            pytest.skip("it does not get small")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.05)
        model.save_pretrained(folder)
    except Exception as error:  # transformers' own checks of sizes that do not fit together
        pytest.skip(f"{type(error).__name__}: {error}")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_causal_language_model_of_transformers_is_right_or_refused(model_type: str, tmp_path: Path) -> None:
    import torch

    model, ids = make_tiny(model_type, tmp_path), tokens(17)
    backend = create_backend("reference", "float32", "float32", num_threads=1)
    try:
        ours = load_model(load_model_info(tmp_path, model_impl="transformers"), backend)
    except ModelError as error:
        assert str(tmp_path) in error.message
        return
    with torch.no_grad():
        assert_close(ModelDriver(ours, backend).step({"a": ids})["a"], model(torch.tensor([ids])).logits[0].numpy())
