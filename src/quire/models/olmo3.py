"""OLMo 3 (OLMo team 2025): OLMo 2, three layers of four with a window, and a stretched rotation for the others."""

from __future__ import annotations

from quire.models.olmo2 import Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Windows and rotations come with `ModelInfo.layer_windows` and `ModelInfo.layer_ropes`."""
