"""Ops that some backends do in one go, for those that have nothing to gain from it: one op after the other."""

from __future__ import annotations

from typing import Any, Protocol

from quire.kernels.backend import Array, HeadNorms, KVCache


class _Steps(Protocol):
    """The ops that the fused ones consist of."""

    rms_norm: Any
    rotary_embedding: Any
    write_kv: Any


class OneByOne:
    """Fused ops as what they mean."""

    def rotary_write_kv(
        self: _Steps,
        positions: Array,
        q: Array,
        k: Array,
        v: Array,
        cos_sin: Array,
        head_size: int,
        interleaved: bool,
        cache: KVCache,
        slot_mapping: Array,
        norms: HeadNorms | None = None,
    ) -> tuple[Array, Array]:
        """See `Backend.rotary_write_kv`."""
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], norms[2]), self.rms_norm(k, norms[1], norms[2])
        self.rotary_embedding(positions, q, k, cos_sin, head_size, interleaved)
        self.write_kv(k, v, cache, slot_mapping)
        return q, k
