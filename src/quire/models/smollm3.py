"""SmolLM3 (Bakouch et al. 2025): Llama's decoder, with layers that do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.llama import DecoderOptions, LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Layers without rotation (Yang et al. 2025, "Rope to Nope and Back Again") may have a sliding window."""

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Llama's; `no_rope_layers` has a 1 for each layer that does rotate."""
        fields, layers = info.fields, info.num_hidden_layers
        rotated = fields.values.get("no_rope_layers")
        if rotated is None:
            interval = fields.integer("no_rope_layer_interval", 4, low=1)
            rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(rotated, list) or len(rotated) < layers or any(value not in (0, 1) for value in rotated):
            raise fields.error("no_rope_layers", f"a list of {layers} zeros and ones")
        unrotated = frozenset(layer for layer in range(layers) if not rotated[layer])
        return replace(LlamaForCausalLM.options(info), unrotated_layers=unrotated)
