"""GPT-J (Wang & Komatsuzaki 2021): parallel blocks with one norm, neighbours rotated, an output head with a bias."""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions

NAMES = BlockNames(
    body="transformer",
    embedding="wte",
    blocks="h",
    attention_norm="ln_1",
    attention="attn",
    attention_output="out_proj",
    mlp_input=("fc_in",),
    mlp_output="fc_out",
    final_norm="ln_f",
)


class GPTJForCausalLM(BlockDecoder):
    """The first `rotary_dim` values of each head are rotated."""

    # Older files hold the causal mask of every layer.
    ignorable: ClassVar[tuple[str, ...]] = (r"\.attn\.(masked_)?bias$",)

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Biases in the feed-forward layer and the head only."""
        return BlockOptions(
            names=NAMES, parallel=True, shared_norm=True, mlp_bias=True, head_bias=True, interleaved=True
        )
