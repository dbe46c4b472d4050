"""What every model is: how it is built, what it computes, and what it caches. The engine knows models only by this."""

from __future__ import annotations

from typing import ClassVar, Protocol

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, KVCache
from quire.layers.builder import Builder
from quire.step import KVCacheSpec


class Model(Protocol):
    """A decoder-only language model on one backend and one rank.

    Attributes:
        ignorable: regular expressions for tensors that some files hold and nobody needs.
        vocab_size: columns of the logits.
    """

    ignorable: ClassVar[tuple[str, ...]]
    vocab_size: int

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        """Ask `builder` for every tensor, in file order where possible, and pack each at once.

        The constructor is run twice: first with a builder that only notes names and shapes. So it must not look at
        values, and which tensors it asks for may depend on `info` and on `builder.has` alone.
        """

    def kv_cache_spec(self) -> KVCacheSpec:
        """Say what layers cache, or keep as a state, in the order in which `forward` takes the caches."""

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """Compute the step's tokens and write their keys and values to the caches.

        There is a `LayerCache` for each attention layer, then for each layer with states a tuple of arrays, of the
        shapes of its `LayerStateSpec` with a row for each sequence in front.

        input_ids and positions are int64 [T], flat over all sequences; the result is hidden states, ready for
        `compute_logits`: [T, H], or [R, H] of the rows `metadata.wanted`.
        """

    def compute_logits(self, hidden: Array) -> Array:
        """Hidden rows [R, H] -> logits float32 [R, vocab_size]."""
