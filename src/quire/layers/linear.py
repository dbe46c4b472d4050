"""Linear layers that own their sharding: each reads its tensors, cuts out its rank's part, and packs it at once.

Column-parallel layers split the outputs, row-parallel ones the inputs (Shoeybi et al. 2019, section 3): a column
layer followed by a row layer needs one sum over ranks. Weights are [out, in]; `transposed` reads the [in, out] of
GPT-2's files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.backend import Array
from quire.layers.activation import activation_kind
from quire.layers.builder import Builder
from quire.layers.lora import Cut, LoRALayer, Split


def read_stack(
    builder: Builder, names: Sequence[str], sizes: Sequence[int], in_features: int, *, bias: bool, transposed: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return one [size, in_features] matrix per entry of `sizes`, and one bias [size] each if asked for (else none).

    There is one name per size, or a single name for a tensor that holds all of them, one below the other.
    """
    if len(names) == 1 and len(sizes) > 1:
        (matrix,), biases = read_stack(builder, names, [sum(sizes)], in_features, bias=bias, transposed=transposed)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        cuts = list(zip(starts, sizes))
        return (
            [matrix.rows(start, start + size) for start, size in cuts],
            [whole.rows(start, start + size) for whole in biases for start, size in cuts],
        )
    matrices: list[Tensor] = []
    for name, size in zip(names, sizes, strict=True):
        if transposed:
            matrices.append(builder.get(f"{name}.weight", (in_features, size)).transposed())
        else:
            matrices.append(builder.get(f"{name}.weight", (size, in_features)))
    return matrices, [builder.get(f"{name}.bias", (size,)) for name, size in zip(names, sizes) if bias]


def read_columns(
    builder: Builder, names: Sequence[str], sizes: Sequence[int], in_features: int, *, bias: bool, transposed: bool
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return this rank's share of the rows of each matrix and, if asked for, of each bias; see `read_stack`."""
    matrices, biases = read_stack(builder, names, sizes, in_features, bias=bias, transposed=transposed)
    cut = column_cut(builder, names, sizes)
    return [cut(i, matrix) for i, matrix in enumerate(matrices)], [cut(i, b) for i, b in enumerate(biases)] or None


def column_cut(builder: Builder, names: Sequence[str], sizes: Sequence[int]) -> Cut:
    """Return what takes this rank's share of the rows of matrix number i, of these sizes."""
    parallel = builder.parallel
    shares = [parallel.share(size, f"size of {'/'.join(names)}") for size in sizes]
    return lambda i, tensor: tensor.rows(parallel.tp_rank * shares[i], (parallel.tp_rank + 1) * shares[i])


def adaptable(
    builder: Builder, names: Sequence[str], in_features: int, sizes: Sequence[int], cut: Cut, split: Split | None = None
) -> LoRALayer | None:
    """Enter a layer split by output rows as one that adapters may change, see `LoRASlots.linear`; None without."""
    return (
        None
        if builder.lora is None
        else builder.lora.linear(builder.prefix, names, in_features, sizes, cut, split=split)
    )


class ColumnParallelLinear:
    """One or more projections of the same input, side by side in one packed weight, each split by output rows.

    Output: this rank's share of the first, then of the second, and so on: [T, sum(sizes) / tp_size].
    """

    def __init__(
        self,
        builder: Builder,
        names: Sequence[str],
        in_features: int,
        sizes: Sequence[int],
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        self.backend = builder.backend
        self.weight = self.backend.pack_linear(
            *read_columns(builder, names, sizes, in_features, bias=bias, transposed=transposed)
        )
        self.lora = adaptable(builder, names, in_features, sizes, column_cut(builder, names, sizes))

    def __call__(self, x: Array) -> Array:
        """[T, in_features] -> [T, this rank's outputs]."""
        y = self.backend.linear(x, self.weight)
        return y if self.lora is None else self.lora(y, x)


class GatedColumnParallelLinear:
    """act(gate(x)) * up(x), the first half of feed-forward layers with a gate (Shazeer 2020), split by output rows.

    `names` are those of gate and up, or of one tensor that holds gate above up; `hidden_act` is config.json's.
    """

    def __init__(
        self,
        builder: Builder,
        names: Sequence[str],
        in_features: int,
        out_features: int,
        hidden_act: str,
        *,
        bias: bool = False,
    ) -> None:
        self.backend, self.kind = builder.backend, activation_kind(hidden_act)
        sizes = (out_features, out_features)
        matrices, biases = read_columns(builder, names, sizes, in_features, bias=bias, transposed=False)
        self.lora = adaptable(builder, names, in_features, sizes, column_cut(builder, names, sizes))
        # What adapters add comes before the activation.
        self.weight = self.backend.pack_linear(matrices, biases, gated=self.lora is None)

    def __call__(self, x: Array) -> Array:
        """[T, in_features] -> [T, this rank's outputs]."""
        if self.lora is None:
            return self.backend.gated_linear(x, self.weight, self.kind)
        return self.backend.gated_activation(self.lora(self.backend.linear(x, self.weight), x), self.kind)


def split_groups(fused: Tensor, num_heads: int, num_kv_heads: int, head_size: int) -> list[Tensor]:
    """Return queries, keys and values of a tensor that holds, for each KV head, its queries, its key and its value.

    The first axis is the one that is taken apart; the parts are those that separate tensors would hold.
    """
    queries, rest = num_heads // num_kv_heads, fused.shape[1:]
    groups = fused.array.reshape(num_kv_heads, queries + 2, head_size, *rest)
    parts = groups[:, :queries], groups[:, queries], groups[:, queries + 1]
    return [HostTensor(part.reshape(-1, *rest), fused.dtype) for part in parts]


class QKVParallelLinear:
    """Query, key and value projections in one packed weight, split by heads.

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head. `heads` and `kv_heads` are this rank's,
    among those of the model. A single tensor holds all queries, then
    all keys, then all values, or with `by_group` what `split_groups` says.
    """

    def __init__(
        self,
        builder: Builder,
        names: Sequence[str],
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool = False,
        transposed: bool = False,
        by_group: bool = False,
    ) -> None:
        self.backend, parallel = builder.backend, builder.parallel
        self.num_heads = parallel.share(num_heads, "number of attention heads")
        copies = max(1, parallel.tp_size // num_kv_heads)
        self.num_kv_heads = parallel.share(num_kv_heads * copies, "number of key/value heads")
        first_head, first_kv_head = parallel.tp_rank * self.num_heads, parallel.tp_rank // copies * self.num_kv_heads
        self.heads = range(first_head, first_head + self.num_heads)
        self.kv_heads = range(first_kv_head, first_kv_head + self.num_kv_heads)
        self.q_size, self.kv_size = self.num_heads * head_size, self.num_kv_heads * head_size

        sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
        if by_group:
            fused = read_stack(builder, names, [sum(sizes)], in_features, bias=bias, transposed=transposed)
            matrices, biases = (
                [part for whole in tensors for part in split_groups(whole, num_heads, num_kv_heads, head_size)]
                for tensors in fused
            )
        else:
            matrices, biases = read_stack(builder, names, sizes, in_features, bias=bias, transposed=transposed)
        starts = [first_head * head_size, first_kv_head * head_size, first_kv_head * head_size]
        stops = [starts[0] + self.q_size, starts[1] + self.kv_size, starts[2] + self.kv_size]

        def cut(i: int, tensor: Tensor) -> Tensor:
            return tensor.rows(starts[i], stops[i])

        def split(fused: Tensor) -> list[Tensor]:
            return split_groups(fused, num_heads, num_kv_heads, head_size)

        self.weight = self.backend.pack_linear(
            [cut(i, matrix) for i, matrix in enumerate(matrices)], [cut(i, b) for i, b in enumerate(biases)] or None
        )
        self.lora = adaptable(builder, names, in_features, sizes, cut, split if by_group else None)

    def __call__(self, x: Array) -> tuple[Array, Array, Array]:
        """[T, in_features] -> q [T, Hq*D], k [T, Hkv*D], v [T, Hkv*D] of this rank, views of one array."""
        qkv = self.backend.linear(x, self.weight)
        if self.lora is not None:
            qkv = self.lora(qkv, x)
        k_start, v_start = self.q_size, self.q_size + self.kv_size
        return qkv[:, :k_start], qkv[:, k_start:v_start], qkv[:, v_start:]


class GatedQKVParallelLinear:
    """Like `QKVParallelLinear`, with a gate for each output value: q_proj holds each head's query, then its gate.

    Tensors are q_proj, k_proj and v_proj.
    """

    def __init__(
        self,
        builder: Builder,
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        bias: bool = False,
    ) -> None:
        self.backend, parallel = builder.backend, builder.parallel
        self.num_heads = parallel.share(num_heads, "number of attention heads")
        copies = max(1, parallel.tp_size // num_kv_heads)
        self.num_kv_heads = parallel.share(num_kv_heads * copies, "number of key/value heads")
        self.q_size, self.kv_size = self.num_heads * head_size, self.num_kv_heads * head_size
        sizes = (2 * num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size)
        names = ("q_proj", "k_proj", "v_proj")
        stack = read_stack(builder, names, sizes, in_features, bias=bias, transposed=False)
        halves = range(2 * parallel.tp_rank * self.num_heads, 2 * (parallel.tp_rank + 1) * self.num_heads)
        first = parallel.tp_rank // copies * self.kv_size

        def pieces(q: Tensor) -> list[Tensor]:
            """Queries, then gates."""
            found = [q.rows(half * head_size, (half + 1) * head_size) for half in halves]
            return [*found[::2], *found[1::2]]

        def cut(i: int, tensor: Tensor) -> Tensor:
            if i == 0:
                return HostTensor(np.concatenate([piece.to_float32() for piece in pieces(tensor)]), "float32")
            return tensor.rows(first, first + self.kv_size)

        def parts(tensors: list[Tensor]) -> list[Tensor]:
            q, k, v = tensors
            return [*pieces(q), cut(1, k), cut(2, v)]

        matrices, biases = stack
        self.weight = self.backend.pack_linear(parts(matrices), parts(biases) if bias else None)
        self.lora = adaptable(builder, names, in_features, sizes, cut)

    def __call__(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """[T, in_features] -> q [T, Hq*D], k [T, Hkv*D], v [T, Hkv*D], gate [T, Hq*D] of this rank."""
        whole = self.backend.linear(x, self.weight)
        if self.lora is not None:
            whole = self.lora(whole, x)
        k_start = 2 * self.q_size
        v_start = k_start + self.kv_size
        return whole[:, : self.q_size], whole[:, k_start:v_start], whole[:, v_start:], whole[:, self.q_size : k_start]


class RowParallelLinear:
    """A projection whose input is split over ranks, as column-parallel layers leave it; the results are summed."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        self.backend, self.parallel = builder.backend, builder.parallel
        (matrix,), biases = read_stack(builder, [name], [out_features], in_features, bias=bias, transposed=transposed)
        share = self.parallel.share(in_features, f"size of {name}")
        part = matrix.columns(self.parallel.tp_rank * share, (self.parallel.tp_rank + 1) * share)
        # The sum over ranks must hold the bias once.
        self.weight = self.backend.pack_linear([part], biases if bias and self.parallel.tp_rank == 0 else None)
        self.lora = (
            None
            if builder.lora is None
            else builder.lora.linear(
                builder.prefix,
                (name,),
                in_features,
                (out_features,),
                columns=(self.parallel.tp_rank * share, (self.parallel.tp_rank + 1) * share),
            )
        )

    def __call__(self, x: Array) -> Array:
        """[T, this rank's inputs] -> [T, out_features], the same on every rank."""
        return self.parallel.sum_ranks(self.partial(x))

    def partial(self, x: Array) -> Array:
        """[T, this rank's inputs] -> [T, out_features], this rank's part of the sum."""
        y = self.backend.linear(x, self.weight)
        return y if self.lora is None else self.lora(y, x)


class ReplicatedLinear:
    """A projection that every rank holds whole; an `exact` one is never quantized."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        exact: bool = False,
    ) -> None:
        self.backend = builder.backend
        matrices, biases = read_stack(builder, [name], [out_features], in_features, bias=bias, transposed=False)
        self.weight = self.backend.pack_linear(matrices, biases if bias else None, exact=exact)
        self.lora = (
            None if builder.lora is None else builder.lora.linear(builder.prefix, (name,), in_features, (out_features,))
        )

    def __call__(self, x: Array) -> Array:
        """[T, in_features] -> [T, out_features]."""
        y = self.backend.linear(x, self.weight)
        return y if self.lora is None else self.lora(y, x)
