"""Mistral (Jiang et al. 2023): Llama's decoder, attending through a sliding window where config.json sets one."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """The windows come with `ModelInfo.layer_windows`."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """No biases, whatever the config says."""
        return DecoderOptions()
