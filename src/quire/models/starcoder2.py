"""StarCoder2 (Lozhkov et al. 2024): layer norms, grouped heads, a plain feed-forward layer, biases everywhere."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(mlp_input=("c_fc",), mlp_output="c_proj")


class Starcoder2ForCausalLM(BlockDecoder):
    """Attends through a sliding window where config.json sets one."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """The projections have biases unless the config has none; the norms always do."""
        bias = info.fields.flag("use_bias", True)
        return BlockOptions(names=NAMES, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
