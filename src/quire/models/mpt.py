"""MPT (MosaicML 2023): ALiBi, no biases anywhere."""

from __future__ import annotations

from quire.checkpoint.fields import Fields
from quire.checkpoint.hf_config import ModelInfo
from quire.layers.attention import alibi_slopes
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(
    body="transformer",
    embedding="wte",
    blocks="blocks",
    attention_norm="norm_1",
    attention="attn",
    qkv=("Wqkv",),
    attention_output="out_proj",
    mlp_norm="norm_2",
    mlp="ffn",
    mlp_input=("up_proj",),
    mlp_output="down_proj",
    final_norm="norm_f",
)


class MptForCausalLM(BlockDecoder):
    """Only the variant of the published base models; other settings of MPT's training code are refused."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Everything about attention lies in `attn_config`."""
        fields = info.fields
        attention = fields.inner("attn_config") or Fields({}, fields.path, "attn_config")
        if not fields.flag("no_bias", True):
            raise fields.error("no_bias", "true")
        if fields.values.get("logit_scale") is not None:
            raise fields.error("logit_scale", "null")
        if fields.text("norm_type", "layernorm") not in ("layernorm", "low_precision_layernorm"):
            raise fields.error("norm_type", "layernorm or low_precision_layernorm")
        if attention.text("attn_type", "multihead_attention") != "multihead_attention":
            raise attention.error("attn_type", "multihead_attention")
        if not attention.flag("alibi", True):
            raise attention.error("alibi", "true")
        for key in ("qk_ln", "prefix_lm"):
            if attention.flag(key, False):
                raise attention.error(key, "false")
        if attention.values.get("clip_qkv"):
            raise attention.error("clip_qkv", "null")
        return BlockOptions(
            names=NAMES,
            norm_bias=False,
            attention_scale=attention.number("softmax_scale", None),
            alibi_slopes=alibi_slopes(info.num_attention_heads, attention.number("alibi_bias_max", 8.0)),
        )
