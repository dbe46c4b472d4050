"""StableLM 2 (Bellagente et al. 2024) and its predecessors: Llama's layers, but with layer norms."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.models.blocks import BlockDecoder, BlockNames, BlockOptions


class StableLmForCausalLM(BlockDecoder):
    """A quarter of each head is rotated, unless the config says otherwise. The 12B is parallel, with head norms."""

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """Parallel blocks share their norm."""
        parallel = info.fields.flag("use_parallel_residual", False)
        return BlockOptions(
            names=BlockNames(query_norm="q_layernorm", key_norm="k_layernorm"),
            parallel=parallel,
            shared_norm=parallel,
            qkv_bias=info.fields.flag("use_qkv_bias", False),
            head_norm="split" if info.fields.flag("qk_layernorm", False) else None,
        )
