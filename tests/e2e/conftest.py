"""Small models for whole-engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import ALONE


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with grouped heads, float32, without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"), "llama", num_key_value_heads=2)


@pytest.fixture(scope="module", autouse=True)
def _compute_anew() -> None:
    """Let no module compare with what another one, which may have changed the engine, has computed."""
    ALONE.clear()
