"""`PoolingModel`: any model as one that makes a vector or a score: its hidden states, and what comes after pooling.

The body is an encoder, or a decoder without its output head. What follows the pooled vector is the body's own
classifier, a decoder's `score` layer, the difference of two rows of its output head, or sentence-transformers' dense
layers. Pooling itself is the worker's (`worker.pooler`), since the tokens of a text may come in several steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.pooling_spec import LogitScore, PoolingDense, PoolingSpec
from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import Array, AttentionMetadata, KVCache
from quire.layers.activation import Activation, tanh
from quire.layers.builder import Builder
from quire.layers.linear import ReplicatedLinear
from quire.models.interface import Model
from quire.models.registry import model_class
from quire.step import KVCacheSpec


class PoolingModel:
    """A body and what follows its pooled vectors.

    Attributes:
        spec: how hidden states are pooled. num_token_types: of encoders that mark the texts of a pair; 0 of others.
    """

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        assert info.pooling is not None
        self.spec: PoolingSpec = info.pooling
        self.body: Model = model_class(info.architecture)(info, replace(builder, headless=True), max_model_len)
        self.vocab_size, self.causal = info.vocab_size, info.causal
        self.num_token_types: int = getattr(self.body, "num_token_types", 0)
        self._steps: list[Callable[[Array], Array]] = []
        own: Any = getattr(self.body, "project", None)
        if self.spec.logit_score is not None:
            self._steps.append(_LogitScore(info, builder, self.spec.logit_score))
        elif own is not None:
            self._steps.append(own)
        elif self.spec.task == "classify":
            self._steps.append(ReplicatedLinear(builder, "score", info.hidden_size, len(self.spec.labels)))
        self._steps += [_Dense(builder, dense) for dense in self.spec.dense]

    @property
    def ignorable(self) -> tuple[str, ...]:
        """See `Model`; the output head, where there is one, is not needed."""
        return (*self.body.ignorable, r"^(lm_head|embed_out|score)\.")

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`.

        Where tokens see those that follow, nothing is of use after its step, and no block is given back before.
        """
        spec = self.body.kv_cache_spec()
        if self.causal:
            return spec
        layers = [msgspec.structs.replace(layer, sliding_window=None) for layer in spec.layers]
        return msgspec.structs.replace(spec, layers=layers, one_step=True)

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        return self.body.forward(input_ids, positions, kv_caches, metadata)

    def project(self, pooled: Array) -> Array:
        """Pooled vectors [R, H], or [R, n * H] of n kinds, -> vectors or logits [R, N] before normalisation."""
        for step in self._steps:
            pooled = step(pooled)
        return pooled


class _Dense:
    """activation(linear(x))."""

    def __init__(self, builder: Builder, dense: PoolingDense) -> None:
        self.backend = builder.backend
        at = builder.under(dense.folder)
        self.linear = ReplicatedLinear(at, "linear", dense.in_features, dense.out_features, bias=dense.bias)
        self.tanh = dense.activation == "tanh"
        self.act = None if dense.activation in ("identity", "tanh") else Activation(self.backend, dense.activation)

    def __call__(self, x: Array) -> Array:
        """[R, in_features] -> [R, out_features]."""
        x = self.linear(x)
        if self.tanh:
            return tanh(self.backend, x)
        return x if self.act is None else self.act(x)


class _LogitScore:
    """One row made of those of the output head: of all logits only these are computed."""

    def __init__(self, info: ModelInfo, builder: Builder, score: LogitScore) -> None:
        self.backend = builder.backend
        shape = (info.vocab_size, info.hidden_size)
        if info.tie_word_embeddings or not builder.has("lm_head.weight"):
            body = builder.under_if("model", "embed_tokens.weight")
            table = body.get("embed_tokens.weight", shape)
        else:
            table = builder.get("lm_head.weight", shape)
        rows = [table.rows(index, index + 1).to_float32().astype(np.float32) for index in score.token_ids]
        row = rows[0] if len(rows) == 1 else rows[0] - rows[1]
        self.weight = self.backend.pack_linear([HostTensor(row, "float32")], exact=True)

    def __call__(self, hidden: Array) -> Array:
        """Last hidden states [R, H] -> logits, or their differences [R, 1]."""
        return self.backend.linear(hidden, self.weight)
