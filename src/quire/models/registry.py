"""From an architecture to its model. Modules of families are imported only when needed.

A new family is a function in a file beside this one, and a row in `checkpoint.families` that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.transformers_config import FALLBACK
from quire.layers.builder import Builder
from quire.models.decoder import Decoder, DecoderOptions
from quire.models.interface import Model
from quire.models.pooling import PoolingModel


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
        body = Decoder(info, body_builder, max_model_len, options_of(info.architecture)(info))
    return body if info.pooling is None else PoolingModel(body, info, builder)
