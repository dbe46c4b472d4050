"""`PoolingModel`: a model that computes embeddings or scores: a body, and the layers after pooling.

The body is an encoder, or a decoder without its output head. The pooled vector goes through the body's classifier, a
decoder's `score` layer, one or two rows of its output head, or sentence-transformers' dense layers. `worker.pooler`
pools, since the tokens of a text may be computed in several steps.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.pooling_spec import LogitScore, PoolingDense, PoolingSpec
from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import Array, AttentionMetadata, KVCache
from quire.layers.activation import Activation
from quire.layers.builder import Builder
from quire.layers.linear import ReplicatedLinear
from quire.models.interface import Model
from quire.step import KVCacheSpec


class PoolingModel:
    """A body, and the layers after pooling; `spec` says how hidden states are pooled."""

    def __init__(self, body: Model, info: ModelInfo, builder: Builder) -> None:
        assert info.pooling is not None
        self.spec: PoolingSpec = info.pooling
        self.body, self.causal = body, info.causal
        self.vocab_size, self.supports_graphs = body.vocab_size, body.supports_graphs
        self.num_token_types, self.classifier = body.num_token_types, body.classifier
        self.ignored_weights = (*body.ignored_weights, r"^(lm_head|embed_out|score)\.")  # output heads are not used
        self._steps: list[Callable[[Array], Array]] = []
        if self.spec.logit_score is not None:
            self._steps.append(_LogitScore(info, builder, self.spec.logit_score))
        elif self.classifier is not None:
            self._steps.append(self.classifier)
        elif self.spec.task == "classify":
            self._steps.append(ReplicatedLinear(builder, "score", info.hidden_size, len(self.spec.labels)))
        self._steps += [_Dense(builder, dense) for dense in self.spec.dense]

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`.

        Without causal attention, nothing is read after the step, and no block is freed before its end.
        """
        spec = self.body.kv_cache_spec()
        if self.causal:
            return spec
        layers = [msgspec.structs.replace(layer, sliding_window=None) for layer in spec.layers]
        return msgspec.structs.replace(spec, layers=layers, one_step=True)

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        return self.body.forward(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Array) -> Array:
        """Not available: there is no output head."""
        raise AssertionError("a pooling model has no logits")

    def project(self, pooled: Array) -> Array:
        """Pooled vectors [R, H], or [R, n * H] of n kinds, -> vectors or logits [R, N] before normalisation."""
        for step in self._steps:
            pooled = step(pooled)
        return pooled


class _Dense:
    """activation(linear(x))."""

    def __init__(self, builder: Builder, dense: PoolingDense) -> None:
        at = builder.under(dense.folder)
        self.linear = ReplicatedLinear(at, "linear", dense.in_features, dense.out_features, bias=dense.bias)
        self.act = None if dense.activation == "identity" else Activation(builder.backend, dense.activation)

    def __call__(self, x: Array) -> Array:
        """[R, in_features] -> [R, out_features]."""
        x = self.linear(x)
        return x if self.act is None else self.act(x)


class _LogitScore:
    """The logit of one token, or the difference of two, as one row made of rows of the output head."""

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
