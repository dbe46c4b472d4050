"""Gated delta net (Yang et al. 2024, Gated Delta Networks, section 3.4): linear attention with a state of fixed size.

    q, k, v = split(silu(conv(in_proj(x))));  out = out_proj(norm(delta_rule(q / |q|, k / |k|, v)) * silu(z))

The state of a sequence is a matrix for each head, and the last inputs of the convolution. The matrix's decay at a
token, and the share of the token that is written to it (beta), are computed from the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.backend import Array, Arrays, AttentionMetadata
from quire.layers.attention import take_rows
from quire.layers.builder import Builder, span_of
from quire.layers.linear import RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.short_conv import ShortConv
from quire.step import LayerStateSpec

UNIT_EPS = 1e-6  # is added to the squared length under the root


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Heads and their sizes; `value_heads / key_heads` adjacent value heads share a key head.

    taps: inputs of the convolution. by_key_head: the files have in_proj_qkvz, with query, key, values and gates of one
    key head after the other, and in_proj_ba, instead of in_proj_qkv, in_proj_z, in_proj_b and in_proj_a.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_key_head: bool = False

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


class GatedDeltaNet:
    """One layer, a `Mixer`; ranks split the key heads, and the value heads that go with them."""

    def __init__(self, builder: Builder, hidden_size: int, sizes: DeltaSizes, *, eps: float, activation: str) -> None:
        self.backend = backend = builder.backend
        mine = span_of(backend, sizes.key_heads, "number of key heads of linear attention")
        self.key_size, self.value_heads = len(mine) * sizes.key_dim, len(mine) * sizes.shared
        self.value_size = self.value_heads * sizes.value_dim
        read = _read_by_key_head if sizes.by_key_head else _read_separate
        inputs, gates = read(builder, hidden_size, sizes, mine)
        self.in_proj = self.backend.pack_linear(inputs)
        self.gates = self.backend.pack_linear(gates, exact=True)  # small, and errors in them accumulate in the state
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        parts = (_span(mine, sizes.key_dim), _span(mine, sizes.key_dim, keys), _values(mine, sizes, 2 * keys))
        self.conv = ShortConv(builder, "conv1d", 2 * keys + values, sizes.taps, mine=parts, activation=activation)
        heads = range(mine.start * sizes.shared, mine.stop * sizes.shared)
        self.dt_bias = self.backend.vector(builder.get("dt_bias", (sizes.value_heads,)).rows(heads.start, heads.stop))
        rates = builder.get("A_log", (sizes.value_heads,)).rows(heads.start, heads.stop).to_float32()
        self.rates = self.backend.vector(HostTensor(-np.exp(rates), "float32"))
        self.norm = RMSNorm(builder, "norm", sizes.value_dim, eps)
        self.out_proj = RowParallelLinear(builder, "out_proj", values, hidden_size)
        # Vectors of length 1 are RMS norms, scaled; the query's scale takes attention's 1 / sqrt(size) as well.
        self.unit_eps = UNIT_EPS / sizes.key_dim
        self.query_scale = self._constant(sizes.key_dim, 1.0 / sizes.key_dim)
        self.key_scale = self._constant(sizes.key_dim, sizes.key_dim**-0.5)
        self.matrix_shape = (self.value_heads, sizes.key_dim, sizes.value_dim)

    def _constant(self, size: int, value: float) -> Array:
        return self.backend.vector(HostTensor(np.full(size, value, np.float32), "float32"))

    def __call__(
        self, positions: Array, x: Array, cache: Arrays, metadata: AttentionMetadata, rows: Array | None = None
    ) -> Array:
        """[T, H] -> [T, H], or [R, H] of the token indices `rows`. `cache` is what `cache_spec` says."""
        window, matrices = cache
        mixed = self.backend.linear(x, self.in_proj)
        width = 2 * self.key_size + self.value_size
        qkv = self.conv(mixed[:, :width], window, metadata)
        q = self.backend.rms_norm(qkv[:, : self.key_size], self.query_scale, self.unit_eps)
        k = self.backend.rms_norm(qkv[:, self.key_size : 2 * self.key_size], self.key_scale, self.unit_eps)
        gates = self.backend.linear(x, self.gates)
        beta = self.backend.activation(gates[:, : self.value_heads], "sigmoid")
        decay = self.backend.activation(gates[:, self.value_heads :] + self.dt_bias, "softplus") * self.rates
        out = self.backend.gated_delta(q, k, qkv[:, 2 * self.key_size :], decay, beta, matrices, metadata)
        out, z = take_rows(self.backend, out, rows), take_rows(self.backend, mixed[:, width:], rows)
        return self.out_proj(self.norm(out) * self.backend.activation(z, "silu"))

    def cache_spec(self) -> LayerStateSpec:
        """Return the state of a sequence: the convolution's last inputs, and the matrices."""
        return LayerStateSpec((self.conv.state_shape, self.matrix_shape))


def _span(heads: range, size: int, start: int = 0) -> range:
    """Return the rows of these heads, of `size` rows each, in a tensor whose first head begins at row `start`."""
    return range(start + heads.start * size, start + heads.stop * size)


def _values(heads: range, sizes: DeltaSizes, start: int = 0) -> range:
    return _span(heads, sizes.shared * sizes.value_dim, start)


def _rows(tensor: Tensor, span: range) -> Tensor:
    return tensor.rows(span.start, span.stop)


def _read_separate(
    builder: Builder, hidden_size: int, sizes: DeltaSizes, mine: range
) -> tuple[list[Tensor], list[Tensor]]:
    """Return matrices of queries, keys, values, z, one below the other, and of beta and decay."""
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    qkv = builder.get("in_proj_qkv.weight", (2 * keys + values, hidden_size))
    z = builder.get("in_proj_z.weight", (values, hidden_size))
    spans = (_span(mine, sizes.key_dim), _span(mine, sizes.key_dim, keys), _values(mine, sizes, 2 * keys))
    inputs = [*(_rows(qkv, span) for span in spans), _rows(z, _values(mine, sizes))]
    gates = [builder.get(f"in_proj_{name}.weight", (sizes.value_heads, hidden_size)) for name in ("b", "a")]
    return inputs, [_rows(gate, _span(mine, sizes.shared)) for gate in gates]


def _read_by_key_head(
    builder: Builder, hidden_size: int, sizes: DeltaSizes, mine: range
) -> tuple[list[Tensor], list[Tensor]]:
    """As `_read_separate`, from tensors that hold all parts of a key head together."""
    values = sizes.shared * sizes.value_dim
    widths = (sizes.key_dim, sizes.key_dim, values, values)
    qkvz = builder.get("in_proj_qkvz.weight", (sizes.key_heads * sum(widths), hidden_size))
    ba = builder.get("in_proj_ba.weight", (2 * sizes.value_heads, hidden_size))
    return _reorder(qkvz, widths, mine), _reorder(ba, (sizes.shared, sizes.shared), mine)


def _reorder(tensor: Tensor, widths: tuple[int, ...], heads: range) -> list[Tensor]:
    """Return the first parts of all heads, then the second ones, and so on; each head has parts of these widths."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    return [
        _rows(tensor, range(head * sum(widths) + start, head * sum(widths) + start + width))
        for start, width in zip(starts, widths)
        for head in heads
    ]
