"""Configurations of families with experts: what does not fit together is named before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.errors import ModelError
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import FAMILIES

BACKEND = create_backend("reference", "float32", "float32", num_threads=1)
CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}


def load(folder: Path, family: str, **config: Any) -> Any:
    settings = {**FAMILIES[family], "architectures": [CLASSES[family]], "model_type": family, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return load_model(load_model_info(folder), BACKEND, load_format="dummy")


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6 (expected an integer from 1 to 5)"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0 (expected an integer from 1 to 8192)"),
        ("qwen2_moe", {"mlp_only_layers": [0, 2]}, "mlp_only_layers is [0, 2] (expected a list of layers below 2)"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes' (expected true or false)"),
        ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit is 9.0 (expected 7.0)"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3 (expected a divisor of n_routed_experts, 8)"),
        ("glm4_moe", {"n_group": 4, "topk_group": 5}, "topk_group is 5 (expected an integer from 1 to 4)"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok is 3 (expected an integer from 1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0 (expected null)"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is true (expected false)"),
    ],
)
def test_what_does_not_fit_is_named(family: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(tmp_path, family, **config)
    assert message in str(caught.value)


@pytest.mark.parametrize("family", CLASSES)
def test_what_fits_is_built(family: str, tmp_path: Path) -> None:
    assert load(tmp_path, family).vocab_size == 160
