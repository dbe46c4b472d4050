"""`Model`, the interface through which the worker uses models: what they compute, and what they cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.kernels.backend import Array, AttentionMetadata
from quire.step import KVCacheSpec


@dataclass(slots=True)
class HiddenStates:
    """Hidden states between layers, and between pipeline stages (vLLM's intermediate tensors).

    Attributes:
        residual: the residual stream [T, H]. The next layer overwrites it.
        update: the output of the last layer [T, H], which the next norm adds to the stream, as adding and normalizing
            are one op. None if there is nothing to add.
    """

    residual: Array
    update: Array | None = None

    def take_update(self) -> Array | None:
        """Return `update` and drop the reference, so that its memory is free once it has been added."""
        update, self.update = self.update, None
        return update


class Model(Protocol):
    """A language model on one backend and one rank.

    Attributes:
        ignored_weights: regular expressions for tensors that some files hold and the model does not use.
        vocab_size: columns of the logits.
        supports_graphs: whether steps consist of backend ops only, so that `Backend.graph` can repeat them.
        num_token_types: rows of the table of token types that encoders for pairs of texts have; 0 for other models.
        position_axes (optional, 1 by default): axes of positions, 3 where rotations go by time, height and width.
        classifier: pooled hidden states [R, H] -> logits of classes [R, N]; None for models without such a head.
    """

    ignored_weights: tuple[str, ...]
    vocab_size: int
    supports_graphs: bool
    num_token_types: int
    classifier: Callable[[Array], Array] | None

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return the specs of the layers' caches and states, in the order in which `forward` takes them."""

    def forward(self, input_ids: Array, positions: Array, kv_caches: list[Any], metadata: AttentionMetadata) -> Array:
        """Compute the step's tokens and write their keys and values to the caches.

        `kv_caches` has a `LayerCache` for each attention layer, then for each layer with states a tuple of arrays, of
        the shapes of its `LayerStateSpec` with a row for each sequence in front.

        input_ids and positions are int64 [T], flat over all sequences, or positions [axes, T] if the model has several
        axes. Returns hidden states after the final norm, [T, H], or [R, H] of the rows `metadata.logits_indices`.
        """

    def compute_logits(self, hidden: Array) -> Array:
        """Hidden rows [R, H] -> logits float32 [R, vocab_size]."""
