"""A model folder that needs no weights: a config, to be loaded with dummy weights; and requests to an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine_request import EngineRequest
from quire.sampling_params import SamplingParams

CONFIG = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
  "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
  "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 999,
  "tie_word_embeddings": false, "torch_dtype": "float32", "rope_theta": 10000.0
}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json only."""
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path


def request(
    request_id: str, max_tokens: int = 4, *, prompt: tuple[int, ...] = (1, 2, 3), sequences: int = 1
) -> EngineRequest:
    """A greedy request."""
    return EngineRequest(
        request_id,
        list(prompt),
        SamplingParams(temperature=0.0, max_tokens=max_tokens, n=sequences),
        max_tokens=max_tokens,
        sequence_ids=[request_id] if sequences == 1 else [f"{request_id}-{number}" for number in range(sequences)],
        seeds=list(range(sequences)),
    )
