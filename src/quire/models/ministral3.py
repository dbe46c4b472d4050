"""Ministral 3 (Mistral AI 2025): Mistral's decoder with a stretched rotation, under which queries grow with position.

Of models that see images the text part runs; images are not supported yet.
"""

from __future__ import annotations

from quire.models.mistral import MistralForCausalLM
from quire.models.text_part import TextPart


class Ministral3ForCausalLM(MistralForCausalLM):
    """The growth comes with the rotation, see `RopeParameters.query_growth`."""


class Mistral3ForConditionalGeneration(TextPart, Ministral3ForCausalLM):
    """The text part of Mistral Small 3.1 and later, and of Ministral 3; config.json says which of the two it is."""
