"""Qwen3-MoE (Yang et al. 2025): Qwen3's attention, and many small experts without a shared one."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.qwen2_moe import small_experts
from quire.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Layers may be dense as in Qwen2-MoE."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Qwen3's norms on q and k."""
        return replace(Qwen3ForCausalLM.options(info), moe=small_experts(info))
