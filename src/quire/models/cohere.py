"""Cohere's Command R (2024): parallel blocks with one norm, neighbours rotated, scaled logits."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockOptions


class CohereForCausalLM(BlockDecoder):
    """Command R+ has norms on query and key heads."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Norms have no shift."""
        bias = info.fields.flag("attention_bias", False)
        return BlockOptions(
            parallel=True,
            shared_norm=True,
            qkv_bias=bias,
            output_bias=bias,
            norm_bias=False,
            head_norm="joint" if info.fields.flag("use_qk_norm", False) else None,
            interleaved=True,
            logit_scale=info.fields.number("logit_scale", 0.0625),
        )
