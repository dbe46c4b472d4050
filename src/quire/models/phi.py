"""Phi-1, Phi-1.5 and Phi-2 (Li et al. 2023): parallel blocks with one norm, heads rotated in part, and biases."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(attention_output="dense", mlp_input=("fc1",), mlp_output="fc2", final_norm="final_layernorm")


class PhiForCausalLM(BlockDecoder):
    """The output head has a bias too."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """No published model has norms on queries and keys."""
        if info.fields.flag("qk_layernorm", False):
            raise info.fields.error("qk_layernorm", "false")
        return BlockOptions(
            names=NAMES,
            parallel=True,
            shared_norm=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
        )
