"""Falcon (Almazrouei et al. 2023): parallel blocks, few KV heads; ALiBi instead of rotation in the RW models.

transformers rounds ALiBi's biases to bfloat16, whatever the model's dtype; here they stay float32.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.attention import alibi_slopes
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(
    body="transformer",
    embedding="word_embeddings",
    blocks="h",
    attention="self_attention",
    qkv=("query_key_value",),
    attention_output="dense",
    mlp_input=("dense_h_to_4h",),
    mlp_output="dense_4h_to_h",
    final_norm="ln_f",
)


class FalconForCausalLM(BlockDecoder):
    """Queries, keys and values are stored by KV head, of which the first models had one or as many as heads."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """The norms always have biases, the projections if the config asks for them."""
        fields, names = info.fields, NAMES
        parallel, norms = fields.flag("parallel_attn", True), 1
        if fields.flag("new_decoder_architecture", False):
            if not parallel:
                raise fields.error("parallel_attn", "true, with new_decoder_architecture")
            norms = fields.integer("num_ln_in_parallel_attn", 2, low=1, high=2)
        if norms == 2:
            names = replace(NAMES, attention_norm="ln_attn", mlp_norm="ln_mlp")
        slopes = None
        if fields.flag("alibi", False):
            # The bias is added before the scaling of q.k.
            slopes = alibi_slopes(info.num_attention_heads) * info.head_dim**-0.5
        bias = fields.flag("bias", False)
        return BlockOptions(
            names=names,
            parallel=parallel,
            shared_norm=parallel and norms == 1,
            qkv_by_group=True,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            alibi_slopes=slopes,
        )
