"""Rotary tables against transformers' frequencies, for the configs of real models and for every stretching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.rope import RopeParameters, parse_rope
from quire.kernels.create import create_backend
from quire.layers.rotary import RotaryEmbedding, attention_scaling, cos_sin_table, inverse_frequencies

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA32 = {**LLAMA31, "factor": 32.0}
QWEN25_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * i for i in range(64)],
    "long_factor": [1.0 + 0.5 * i for i in range(64)],
    "original_max_position_embeddings": 4096,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

CASES = {
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 4096, 4096),
    "llama-3.1": (LLAMA31, 131072, 131072),
    "llama-3.2": (LLAMA32, 131072, 131072),
    "qwen-2.5-yarn": (QWEN25_YARN, 32768, 131072),
    "deepseek-yarn": (DEEPSEEK_YARN, 163840, 163840),
    "gpt-oss-yarn": (GPT_OSS_YARN, 131072, 131072),
    "yarn-given-scale": ({**QWEN25_YARN, "attention_factor": 1.5}, 32768, 131072),
    "longrope-short": (LONGROPE, 131072, 4096),
    "longrope-long": (LONGROPE, 131072, 131072),
    "dynamic-trained": (DYNAMIC, 4096, 4096),
    "dynamic-stretched": (DYNAMIC, 4096, 6000),
}


def parse(rope: dict[str, Any], max_positions: int) -> RopeParameters:
    fields = ConfigFields({"rope_parameters": rope}, None)  # type: ignore[arg-type]
    return parse_rope(fields, head_dim=128, max_position_embeddings=max_positions)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_scaling_are_those_of_transformers(case: str) -> None:
    rope, max_positions, length = CASES[case]
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=max_positions, rope_parameters=dict(rope)
    )
    expected, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)
    ours = parse(rope, max_positions)
    np.testing.assert_allclose(inverse_frequencies(ours, length), expected.numpy(), rtol=1e-6)
    assert attention_scaling(ours) == pytest.approx(scaling)


def test_table_holds_cosines_then_sines_times_the_scaling() -> None:
    rope = parse(QWEN25_YARN, 32768)
    table = cos_sin_table(rope, 300)
    angles = np.arange(300)[:, None] * inverse_frequencies(rope, 300)
    assert (table.shape, table.dtype) == ((300, 128), np.float32)
    np.testing.assert_allclose(table[:, :64], np.cos(angles) * attention_scaling(rope), atol=3e-5)
    np.testing.assert_allclose(table[:, 64:], np.sin(angles) * attention_scaling(rope), atol=3e-5)


def test_scores_depend_on_distance_only_and_the_unrotated_part_stays() -> None:
    rope = replace(parse({"rope_type": "default"}, 64), rotary_dim=8)
    backend = create_backend("reference", "float32", "float32", num_threads=1)
    rotary = RotaryEmbedding(backend, rope, head_size=12, max_len=64)
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal(12), rng.standard_normal(12)
    q, k = (backend.from_numpy(np.tile(x, (64, 2)).astype(np.float32)) for x in (query, key))
    rotary(backend.from_numpy(np.arange(64)), q, k)
    q, k = backend.to_numpy(q), backend.to_numpy(k)
    np.testing.assert_array_equal(q[:, 8:12], np.tile(query[8:], (64, 1)).astype(np.float32))
    scores = q[:, 12:] @ k[:, 12:].T
    for distance in (0, 1, 20):
        np.testing.assert_allclose(np.diag(scores, distance), scores[0, distance], rtol=1e-4)
    assert abs(scores[0, 20] - scores[0, 0]) > 0.1
