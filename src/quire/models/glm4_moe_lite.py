"""GLM-4.7-Flash (GLM team 2026): DeepSeek-V3 with fewer and larger heads; config.json lists the layers with experts."""

from __future__ import annotations

from quire.models.deepseek_v3 import DeepseekV3ForCausalLM


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """Nothing but the defaults of config.json differs."""
