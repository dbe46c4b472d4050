"""Folders with one quantized weight, "m.weight", and reading it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.quantization.parse import parse_quantization
from quire.checkpoint.quantization.parts import combine_parts
from quire.checkpoint.safetensors import open_safetensors
from quire.checkpoint.weights import StoredTensor

Open = Callable[[dict[str, torch.Tensor], dict[str, Any]], dict[str, StoredTensor]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Return a function that writes parts of module "m" and opens them by a quantization_config."""

    def write(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, StoredTensor]:
        named = {f"m.{suffix}": part.contiguous() for suffix, part in parts.items()}
        save_file(named, tmp_path / "model.safetensors")
        stored = parse_quantization({"quantization_config": config}, tmp_path / "config.json")
        assert stored is not None
        return combine_parts(open_safetensors(tmp_path), stored).tensors

    return write
