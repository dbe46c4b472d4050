"""Builds the model of an architecture. Modules of families are imported only when needed.

A new family is a function in a file beside this one, and a row in `checkpoint.families` that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.transformers_config import FALLBACK
from quire.checkpoint.weights import WeightSource
from quire.layers.builder import Builder
from quire.models.decoder import Decoder, DecoderOptions
from quire.models.interface import Model
from quire.models.pooling import PoolingModel

VISION_WEIGHTS = r"^(model\.)?(vision_tower|vision_model|multi_modal_projector|visual)\."


def options_of(architecture: str) -> Callable[[ModelInfo], DecoderOptions]:
    """Return the function that gives the options of an architecture, one of `ModelInfo.architecture`."""
    module, _, name = FAMILIES[architecture].options.partition(".")
    found: Callable[[ModelInfo], DecoderOptions] = getattr(import_module(f"quire.models.{module}"), name)
    return found


def build_model(info: ModelInfo, builder: Builder, max_model_len: int) -> Model:
    """Build the model of `info`; one that computes vectors or scores is a `PoolingModel` without output head."""
    body_builder = builder if info.pooling is None else replace(builder, headless=True)
    body: Model
    if info.architecture == FALLBACK:
        fallback = import_module("quire.models.fallback")
        body = fallback.TransformersForCausalLM(info, body_builder, max_model_len)
    else:
        options, body_info = options_of(info.architecture)(info), info
        if FAMILIES[info.architecture].within is not None:
            weights = LanguageModelWeights(builder.weights)
            body_builder = replace(body_builder, weights=weights)
            # The config has a value for the whole model and one for its language model, which may differ.
            body_info = replace(info, tie_word_embeddings="lm_head.weight" not in weights)
            options = replace(options, ignored_weights=(*options.ignored_weights, VISION_WEIGHTS))
        body = Decoder(body_info, body_builder, max_model_len, options)
    return body if info.pooling is None else PoolingModel(body, info, builder)


@dataclass(frozen=True, slots=True)
class LanguageModelWeights:
    """Tensors of the language model within a model that takes images, under the names of a text model.

    "model.norm.weight" stands for "language_model.model.norm.weight".
    """

    source: WeightSource

    BODIES = ("language_model.model.", "model.language_model.")  # as published, and as transformers 5 saves them
    HEADS = ("language_model.lm_head.", "lm_head.")

    def __contains__(self, name: str) -> bool:
        return any(full in self.source for full in self._full_names(name))

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor; one that is missing is read under the first of its names."""
        names = self._full_names(name)
        return self.source.read(next((full for full in names if full in self.source), names[0]), shape)

    def _full_names(self, name: str) -> list[str]:
        body, head = name.removeprefix("model."), name.removeprefix("lm_head.")
        return [prefix + body for prefix in self.BODIES] if body != name else [prefix + head for prefix in self.HEADS]
