"""Mistral, Ministral, Mixtral. Windows and rotations of layers come with `ModelInfo`."""

from __future__ import annotations

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.moe import MoENames
from quire.models.decoder import DecoderOptions
from quire.models.experts import DENSE_SIZE, read_experts, read_routing


def mistral(info: ModelInfo) -> DecoderOptions:
    """Mistral (Jiang et al. 2023): Llama's decoder with a sliding window; no biases, whatever the config says.

    Ministral (2024) has windows in some layers only; Ministral 3 (2025) scales the rotary embeddings, and queries by
    position (`RopeParameters.query_growth`). Either is the language model of Mistral Small 3.1 and later.
    """
    return DecoderOptions()


def mixtral(info: ModelInfo) -> DecoderOptions:
    """Mixtral (Jiang et al. 2024): eight experts, two for each token, weighted by a softmax over those two."""
    routing = read_routing(info.fields, "num_local_experts", renormalize=True)
    names = MoENames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
    return DecoderOptions(moe=read_experts(info, routing, size=DENSE_SIZE, names=names))
