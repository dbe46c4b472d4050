"""EXAONE 4 (LG AI Research 2025): OLMo 2's layers with norms of heads; those with a window rotate, others do not."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions
from quire.models.olmo2 import Olmo2ForCausalLM


class Exaone4ForCausalLM(Olmo2ForCausalLM):
    """The small models have no windows, and rotate everywhere."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """No biases."""
        windows = info.layer_windows
        full = [layer for layer, window in enumerate(windows) if window is None]
        has_window = info.fields.values.get("sliding_window") is not None
        return DecoderOptions(qk_norm="head", unrotated_layers=frozenset(full if has_window else ()))
