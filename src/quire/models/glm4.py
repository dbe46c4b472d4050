"""GLM-4-0414 and GLM-Z1 (GLM team 2025): GLM with norms before and after each part of a layer, as Gemma 2 has them."""

from __future__ import annotations

from typing import ClassVar

from quire.models.gemma2 import SandwichLayer
from quire.models.glm import GlmForCausalLM
from quire.models.llama import DecoderLayer


class Glm4Layer(SandwichLayer):
    """The names are its own."""

    norm_names: ClassVar[tuple[str, str, str, str]] = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class Glm4ForCausalLM(GlmForCausalLM):
    """The rest is GLM's."""

    layer_class: ClassVar[type[DecoderLayer]] = Glm4Layer
