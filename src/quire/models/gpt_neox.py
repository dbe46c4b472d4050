"""GPT-NeoX (Black et al. 2022) and Pythia: blocks in parallel, queries, keys and values stored head by head."""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(
    body="gpt_neox",
    embedding="embed_in",
    attention="attention",
    qkv=("query_key_value",),
    attention_output="dense",
    mlp_input=("dense_h_to_4h",),
    mlp_output="dense_4h_to_h",
    final_norm="final_layer_norm",
    head="embed_out",
)


class GPTNeoXForCausalLM(BlockDecoder):
    """A quarter of each head is rotated, unless the config says otherwise."""

    # Older files hold the causal mask of every layer.
    ignorable: ClassVar[tuple[str, ...]] = (r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$")

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Biases everywhere, those of attention unless the config has none."""
        bias = info.fields.flag("attention_bias", True)
        return BlockOptions(
            names=NAMES,
            parallel=info.fields.flag("use_parallel_residual", True),
            qkv_by_group=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=True,
        )
