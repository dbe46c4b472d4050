"""The text part of a model that takes images too: its tensors under the names that a text model of its own has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import WeightSource
from quire.layers.builder import Builder

BODIES = ("language_model.model.", "model.language_model.")  # as published, and as transformers 5 saves them
HEADS = ("language_model.lm_head.", "lm_head.")


@dataclass(frozen=True, slots=True)
class TextWeights:
    """Tensors of the text part: "model.norm.weight" stands for "language_model.model.norm.weight"."""

    source: WeightSource

    def __contains__(self, name: str) -> bool:
        return any(full in self.source for full in _full_names(name))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor; one that is missing is asked for under the first of its names."""
        names = _full_names(name)
        return self.source.read(next((full for full in names if full in self.source), names[0]), shape)


def _full_names(name: str) -> list[str]:
    """Return the names that a tensor of the text part may have."""
    body, head = name.removeprefix("model."), name.removeprefix("lm_head.")
    return [prefix + body for prefix in BODIES] if body != name else [prefix + head for prefix in HEADS]


class TextPart:
    """Comes before the text model among the bases of a class, and hands it `TextWeights`.

    Whether the output head is the embedding table is decided by the weights: config.json says it of the whole model
    and of its text part, not always the same.
    """

    ignorable: ClassVar[tuple[str, ...]] = (
        r"rotary_emb\.inv_freq$",
        r"^(model\.)?(vision_tower|vision_model|multi_modal_projector)\.",
    )

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        weights = TextWeights(builder.weights)
        info = replace(info, tie_word_embeddings="lm_head.weight" not in weights)
        super().__init__(info, replace(builder, weights=weights), max_model_len)  # type: ignore[call-arg]
