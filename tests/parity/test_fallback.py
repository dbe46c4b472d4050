"""Models that run on transformers' own code, through our cache and our products."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
