"""Cohere's Command A and R7B (2024): Command R, in which layers with a window rotate and the others do not."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockOptions
from quire.models.cohere import CohereForCausalLM


class Cohere2ForCausalLM(CohereForCausalLM):
    """Three layers of four have a window."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Command R's; layers of full attention know no positions (Kazemnejad et al. 2023)."""
        full = frozenset(layer for layer, window in enumerate(info.layer_windows) if window is None)
        return replace(CohereForCausalLM.options(info), unrotated_layers=full)
