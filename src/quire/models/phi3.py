"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama's decoder, its projections of the same input stored as one."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """The smaller ones rotate a part of each head and stretch their context with longrope."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """No biases; other stretched contexts than longrope were only in early files, with a scaling of their own."""
        assert info.rope is not None
        if info.rope.rope_type not in ("default", "longrope"):
            key = "rope_scaling" if info.fields.values.get("rope_scaling") else "rope_parameters"
            raise info.fields.error(key, "a rope_type of default or longrope")
        return DecoderOptions(fused=True)
