"""How much a step reads and computes: noted while the model itself runs on shapes, so that no formula has to know it.

`WorkCounter` is a `ShapeBackend` whose ops say which weights they read and what they multiply. Memory is counted in
`footprint.py`, and seconds are made of this in `simulate/cost.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.checkpoint.tensor import Tensor
from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.experts import Expert
from quire.kernels.shapes import ShapeBackend, ShapeCache, ShapeExperts, ShapeHeads, ShapeWeight

# S' = e^decay S (1), k S' (2), S' + k (...)^T (2), q S (2): operations for each element of a delta net's state.
DELTA_FLOPS = 7


@dataclass(frozen=True, slots=True)
class Mixture:
    """Layers of experts: `num_bytes` of all of them, `number` in each layer, of which a token sees `chosen`."""

    number: int
    chosen: int
    num_bytes: int

    def touched(self, rows: int) -> float:
        """Return the bytes that `rows` tokens are expected to read, each with experts drawn evenly from all.

        An expert is read by none of them with the probability (1 - chosen / number) ** rows.
        """
        return self.num_bytes * (1.0 - (1.0 - self.chosen / self.number) ** rows)


@dataclass(frozen=True, slots=True)
class Work:
    """What some of a step's rows ask for.

    Attributes:
        num_bytes: of weights read once, however many rows there are. flops: of each row.
        mixtures: weights of which more are read the more rows there are.
    """

    num_bytes: float
    flops: float
    mixtures: tuple[Mixture, ...] = ()

    def read(self, rows: int) -> float:
        """Return the bytes of weights that `rows` rows read."""
        return self.num_bytes + sum(mixture.touched(rows) for mixture in self.mixtures) if rows else 0.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What steps of a model do.

    Attributes:
        token: for every token. sample: beside that, for those whose logits are wanted: the output head, and what of the
            last layer others can leave out. pair_flops: of attention, per query and key, in all layers.
    """

    token: Work
    sample: Work
    pair_flops: float


class WorkCounter(ShapeBackend):
    """Notes what ops read and compute since `begin_work`. Products with adapters are left out."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sizes: dict[int, tuple[object, int]] = {}  # by identity; weights of one shape are equal
        self._within_experts = False
        self.begin_work()

    @property
    def num_packed(self) -> int:
        """Elements of all weights but experts and heads."""
        return sum(made.outputs * made.inputs for made, _ in self._sizes.values() if isinstance(made, ShapeWeight))

    def begin_work(self) -> None:
        """Forget what was noted."""
        self._used: set[int] = set()
        self._mixtures: Counter[tuple[int, int]] = Counter()
        self._flops = self._pair_flops = 0.0

    def work(self, weights: int) -> tuple[Work, float]:
        """Return what was done since `begin_work`, for all rows together, and the FLOPs per pair of attention.

        Args:
            weights: bytes of the whole model. Of tables only a few rows are read, and vectors are always read.
        """
        packed = sum(size for _, size in self._sizes.values())
        read = sum(self._sizes[key][1] for key in self._used)
        mixtures = tuple(Mixture(*kind, size) for kind, size in sorted(self._mixtures.items()))
        return Work(weights - packed + read, self._flops, mixtures), self._pair_flops

    def pack_linear(self, parts: Any, biases: Any = None, **options: bool) -> ShapeWeight:
        """Note its size."""
        before = self.num_bytes
        made = super().pack_linear(parts, biases, **options)
        if not self._within_experts:
            self._sizes[id(made)] = made, self.num_bytes - before
        return made

    def pack_heads(self, matrices: Sequence[Tensor]) -> ShapeHeads:
        """Note their size."""
        before = self.num_bytes
        made = super().pack_heads(matrices)
        self._sizes[id(made)] = made, self.num_bytes - before
        return made

    def pack_experts(self, experts: Iterable[Expert]) -> ShapeExperts:
        """Note their size."""
        before, self._within_experts = self.num_bytes, True
        made = super().pack_experts(experts)
        self._within_experts = False
        self._sizes[id(made)] = made, self.num_bytes - before
        return made

    def _product(self, x: np.ndarray, weight: ShapeWeight) -> np.ndarray:
        self._multiply(x.shape[0], weight)
        return super()._product(x, weight)

    def head_linear(self, x: np.ndarray, weight: ShapeHeads) -> np.ndarray:
        """Note it: each row has one head's matrix."""
        self._multiply(x.shape[0], weight)
        return super().head_linear(x, weight)

    def _multiply(self, rows: int, weight: ShapeWeight | ShapeHeads) -> None:
        if rows:
            self._used.add(id(weight))
            self._flops += 2.0 * rows * weight.outputs * weight.inputs

    def experts(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, packed: ShapeExperts, kind: str
    ) -> np.ndarray:
        """Note those that tokens choose."""
        if ids.size:
            self._mixtures[packed.number, ids.shape[1]] += self._sizes[id(packed)][1]
            self._flops += sum(2.0 * ids.size * part.outputs * part.inputs for part in (packed.first, packed.last))
        return super().experts(x, ids, weights, packed, kind)

    def causal_conv(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None,
        state: np.ndarray,
        metadata: AttentionMetadata,
        activation: str | None = None,
    ) -> np.ndarray:
        """Note it: each channel by itself."""
        self._flops += 2.0 * x.size * weight.shape[0]
        return super().causal_conv(x, weight, bias, state, metadata, activation)

    def gated_delta(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        decay: np.ndarray,
        beta: np.ndarray,
        state: np.ndarray,
        metadata: AttentionMetadata,
    ) -> np.ndarray:
        """Note it: one pass over the state [rows, Hv, Dk, Dv] for each token."""
        self._flops += DELTA_FLOPS * v.size * state.shape[2]
        return super().gated_delta(q, k, v, decay, beta, state, metadata)

    def paged_attention(
        self, q: np.ndarray, cache: ShapeCache, metadata: AttentionMetadata, params: AttentionParams, fresh: Any = None
    ) -> np.ndarray:
        """Note what comparing a query with a key, and adding its value, takes in all heads."""
        self._pair_flops += 2.0 * params.num_heads * (params.head_size + params.out_size)
        return super().paged_attention(q, cache, metadata, params, fresh)
