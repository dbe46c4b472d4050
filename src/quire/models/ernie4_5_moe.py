"""ERNIE 4.5 (Baidu 2025): Llama's attention with neighbours rotated, and experts between some dense layers."""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames, MoEOptions
from quire.models.llama import DecoderOptions, LlamaForCausalLM
from quire.models.routing import read_routing

NAMES = MoENames(correction="moe_statics.e_score_correction_bias")


class Ernie4_5_MoeForCausalLM(LlamaForCausalLM):
    """Files that have biases are refused, and layers that foretell more tokens (mtp) are not used."""

    ignorable: ClassVar[tuple[str, ...]] = (*LlamaForCausalLM.ignorable, r"^model\.mtp_")

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Softmax scores with a correction for the choice, renormalized; shared experts."""
        fields, layers = info.fields, range(info.num_hidden_layers)
        if fields.flag("use_bias", False):
            raise fields.error("use_bias", "false")
        first, step = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_interval", 1, low=1)
        last = fields.integer("moe_layer_end_index", -1, low=-1)
        inner = fields.integer("moe_intermediate_size", low=1)
        sparse = {layer for layer in layers if (layer + 1) % step == 0 and first <= layer <= (last % len(layers))}
        moe = MoEOptions(
            routing=read_routing(fields, "moe_num_experts", "moe_k", renormalize=True),
            inner_size=inner,
            hidden_act=info.hidden_act,
            correction=True,
            correction_is_row=True,
            shared_size=inner * fields.integer("moe_num_shared_experts", 2),
            dense_layers=frozenset(layers) - sparse,
            names=NAMES,
        )
        return DecoderOptions(moe=moe, interleaved=True)
