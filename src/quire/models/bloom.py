"""BLOOM (BigScience 2022): ALiBi, a norm on the embedding, queries, keys and values stored head by head."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.attention import alibi_slopes
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(
    body="transformer",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    blocks="h",
    attention="self_attention",
    qkv=("query_key_value",),
    attention_output="dense",
    mlp_input=("dense_h_to_4h",),
    mlp_output="dense_4h_to_h",
    final_norm="ln_f",
)


class BloomForCausalLM(BlockDecoder):
    """Positions enter as a bias on attention only."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Biases everywhere."""
        if info.fields.flag("apply_residual_connection_post_layernorm", False):
            raise info.fields.error("apply_residual_connection_post_layernorm", "false")
        return BlockOptions(
            names=NAMES,
            qkv_by_group=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            alibi_slopes=alibi_slopes(info.num_attention_heads),
        )
