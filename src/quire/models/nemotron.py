"""Nemotron-4 and Minitron (Parmar et al. 2024): layer norms around 1, a plain feed-forward layer with squared relu."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(mlp_input=("up_proj",))


class NemotronForCausalLM(BlockDecoder):
    """Half of each head is rotated, unless the config says otherwise."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Biases if the config asks for them; the norms always have them."""
        bias = info.fields.flag("attention_bias", False)
        return BlockOptions(
            names=NAMES,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=info.fields.flag("mlp_bias", False),
            norm_offset=1.0,
        )
