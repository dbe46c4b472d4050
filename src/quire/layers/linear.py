"""Linear layers that own their sharding: each reads its tensors, takes its rank's share, and packs it at once.

Column-parallel layers split the outputs, row-parallel ones the inputs (Shoeybi et al. 2019, section 3): a column
layer followed by a row layer needs one sum over ranks. Weights are [out, in]; `transposed` reads the [in, out] of
GPT-2's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.backend import Array
from quire.layers.activation import activation_name
from quire.layers.builder import Builder, share_of, span_of
from quire.layers.lora import Shard, Split


def read_matrices(
    builder: Builder,
    names: Sequence[str],
    sizes: Sequence[int],
    in_features: int,
    split: Split,
    *,
    bias: bool,
    transposed: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return one [size, in_features] matrix per entry of `sizes`, and one bias [size] each if asked for (else none).

    There is one name per size, or a single name for a tensor that holds all matrices and that `split` splits.
    """
    fused = len(names) < len(sizes)
    stored = list(zip(names, [sum(sizes)] if fused else sizes, strict=True))
    matrices: list[Tensor] = []
    for name, size in stored:
        matrix = builder.get(f"{name}.weight", (in_features, size) if transposed else (size, in_features))
        matrices.append(matrix.transposed() if transposed else matrix)
    biases = [builder.get(f"{name}.bias", (size,)) for name, size in stored if bias]
    if fused:
        return split(matrices[0]), [part for whole in biases for part in split(whole)]
    return matrices, biases


def split_rows(fused: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return matrices, or vectors, of these sizes, which a tensor holds one below the other."""
    return [fused.rows(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def split_by_kv_head(fused: Tensor, num_heads: int, num_kv_heads: int, head_size: int) -> list[Tensor]:
    """Return queries, keys and values of a tensor that holds, for each KV head, its queries, its key and its value.

    The first axis is the one that is split; the parts are those that separate tensors would hold.
    """
    queries, rest = num_heads // num_kv_heads, fused.shape[1:]
    groups = fused.array.reshape(num_kv_heads, queries + 2, head_size, *rest)
    parts = groups[:, :queries], groups[:, queries], groups[:, queries + 1]
    return [HostTensor(part.reshape(-1, *rest), fused.dtype) for part in parts]


def column_shard(builder: Builder, names: Sequence[str], sizes: Sequence[int]) -> Shard:
    """Return a function that takes this rank's share of the rows of matrix number i, of these sizes."""
    spans = [span_of(builder.backend, size, f"size of {'/'.join(names)}") for size in sizes]
    return lambda i, tensor: [tensor.rows(spans[i].start, spans[i].stop)]


class ReplicatedLinear:
    """A projection that every rank holds whole; the base of the layers below.

    Args:
        names, sizes: as in `read_matrices`. exact: never quantized.
        shard: which rows of matrix number i, and of its bias, this rank holds; all of them by default.
        split: splits a single tensor of all matrices; by default they lie one below the other.
        columns: the columns that this rank holds, (first, last + 1), for results that are summed over ranks.
        gated: two matrices, gate and up, for `Backend.gated_linear`.
    """

    def __init__(
        self,
        builder: Builder,
        names: str | Sequence[str],
        in_features: int,
        sizes: int | Sequence[int],
        *,
        bias: bool = False,
        transposed: bool = False,
        exact: bool = False,
        shard: Shard = lambda i, tensor: [tensor],
        split: Split | None = None,
        columns: tuple[int, int] | None = None,
        gated: bool = False,
    ) -> None:
        names = (names,) if isinstance(names, str) else names
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        self.backend = builder.backend
        split = split or partial(split_rows, sizes=sizes)
        matrices, biases = read_matrices(builder, names, sizes, in_features, split, bias=bias, transposed=transposed)
        if columns is not None:
            matrices = [matrix.columns(*columns) for matrix in matrices]
            biases = biases if builder.backend.rank == 0 else []  # the sum over ranks must hold the bias once
        self.lora = None
        if builder.lora is not None:
            self.lora = builder.lora.linear(builder.prefix, names, in_features, sizes, shard, split, columns)
        self.weight = self.backend.pack_linear(
            [piece for i, matrix in enumerate(matrices) for piece in shard(i, matrix)],
            [piece for i, vector in enumerate(biases) for piece in shard(i, vector)] or None,
            gated=gated and self.lora is None,  # what adapters add comes before the activation
            exact=exact,
        )

    def __call__(self, x: Array) -> Array:
        """[T, in_features] -> [T, this rank's outputs]."""
        y = self.backend.linear(x, self.weight)
        return y if self.lora is None else self.lora(y, x)


class ColumnParallelLinear(ReplicatedLinear):
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
        shard = column_shard(builder, names, sizes)
        super().__init__(builder, names, in_features, sizes, bias=bias, transposed=transposed, shard=shard)


class GatedColumnParallelLinear(ReplicatedLinear):
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
        self.activation, sizes = activation_name(hidden_act), (out_features, out_features)
        shard = column_shard(builder, names, sizes)
        super().__init__(builder, names, in_features, sizes, bias=bias, shard=shard, gated=True)

    def __call__(self, x: Array) -> Array:
        """[T, in_features] -> [T, this rank's outputs]."""
        if self.lora is None:
            return self.backend.gated_linear(x, self.weight, self.activation)
        return self.backend.gated_activation(super().__call__(x), self.activation)


class RowParallelLinear(ReplicatedLinear):
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
        mine = span_of(builder.backend, in_features, f"size of {name}")
        columns = mine.start, mine.stop
        super().__init__(builder, name, in_features, out_features, bias=bias, transposed=transposed, columns=columns)

    def __call__(self, x: Array) -> Array:
        """[T, this rank's inputs] -> [T, out_features], the same on every rank."""
        return self.backend.all_reduce(self.partial(x))

    def partial(self, x: Array) -> Array:
        """[T, this rank's inputs] -> [T, out_features], this rank's part of the sum."""
        return super().__call__(x)


class QKVParallelLinear(ReplicatedLinear):
    """Query, key and value projections in one packed weight, split by heads.

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head. `heads` and `kv_heads` are this rank's,
    among those of the model. A single tensor holds all queries, then all keys, then all values, or with `by_kv_head`
    what `split_by_kv_head` says. If `gated`, the tensor of queries holds each head's query and then its gate.
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
        by_kv_head: bool = False,
        gated: bool = False,
    ) -> None:
        backend = builder.backend
        self.heads = span_of(backend, num_heads, "number of attention heads")
        copies = max(1, backend.world_size // num_kv_heads)
        self.num_kv_heads = share_of(backend, num_kv_heads * copies, "number of key/value heads")
        self.num_heads, first_kv_head = len(self.heads), backend.rank // copies * self.num_kv_heads
        self.kv_heads = range(first_kv_head, first_kv_head + self.num_kv_heads)
        self.q_size, self.kv_size, self.gated = self.num_heads * head_size, self.num_kv_heads * head_size, gated

        def shard(i: int, tensor: Tensor) -> list[Tensor]:
            if i > 0:
                return [tensor.rows(self.kv_heads.start * head_size, self.kv_heads.stop * head_size)]
            if not gated:
                return [tensor.rows(self.heads.start * head_size, self.heads.stop * head_size)]
            halves = range(2 * self.heads.start, 2 * self.heads.stop)
            pieces = [tensor.rows(half * head_size, (half + 1) * head_size) for half in halves]
            return [*pieces[::2], *pieces[1::2]]

        super().__init__(
            builder,
            names,
            in_features,
            ((1 + gated) * num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size),
            bias=bias,
            transposed=transposed,
            shard=shard,
            split=(lambda fused: split_by_kv_head(fused, num_heads, num_kv_heads, head_size)) if by_kv_head else None,
        )

    def __call__(self, x: Array) -> tuple[Array, ...]:
        """[T, in_features] -> q [T, Hq*D], k [T, Hkv*D], v [T, Hkv*D] of this rank, views of one array.

        If `gated`, the gate [T, Hq*D] follows.
        """
        qkv = super().__call__(x)
        k_start = (1 + self.gated) * self.q_size
        v_start = k_start + self.kv_size
        q, k, v = qkv[:, : self.q_size], qkv[:, k_start:v_start], qkv[:, v_start:]
        return (q, k, v, qkv[:, self.q_size : k_start]) if self.gated else (q, k, v)
