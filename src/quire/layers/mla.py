"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads from one small vector per token.

    latent = norm(kv_a(x)), cached beside a rotated key that all heads share
    k_nope[h] = W_UK[h] latent;  v[h] = W_UV[h] latent

Neither is materialized ("weight absorption"): q_nope[h] . (W_UK[h] latent) is (W_UK[h]^T q_nope[h]) . latent. So
queries are projected to the latent space, heads attend to the cached vectors, and W_UV is applied to their outputs.
Without `Builder.latent_cache`, keys and values of every head are computed and cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.checkpoint.tensor import Tensor
from quire.errors import ConfigError
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, LayerCache
from quire.layers.attention import take_rows
from quire.layers.builder import Builder, share_of
from quire.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.step import LayerKVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Sizes of a layer.

    Attributes:
        heads: of the whole model. nope, rope: elements of a head's query and key that are not rotated, and that are.
        value: elements of a head's value. rank: of the latent vector. query_rank: of the queries' own; None: they are
            projected in one go.
    """

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    query_rank: int | None = None

    @property
    def key(self) -> int:
        """Elements of a head's query and key."""
        return self.nope + self.rope


class LatentAttention:
    """One layer's projections, cache and attention; ranks split the heads and all hold the latent vectors."""

    def __init__(
        self,
        builder: Builder,
        hidden_size: int,
        sizes: LatentSizes,
        rotary: RotaryEmbedding,
        *,
        scale: float,
        eps: float,
        bias: bool = False,
    ) -> None:
        self.backend, self.sizes, self.rotary = builder.backend, sizes, rotary
        self.num_heads = share_of(builder.backend, sizes.heads, "number of attention heads")
        self.queries = QueryProjection(builder, hidden_size, sizes, eps=eps, bias=bias)
        self.kv_a_proj = ReplicatedLinear(
            builder, "kv_a_proj_with_mqa", hidden_size, sizes.rank + sizes.rope, bias=bias
        )
        self.kv_a_layernorm = RMSNorm(builder, "kv_a_layernorm", sizes.rank, eps)
        self.attention: AbsorbedAttention | MaterializedAttention
        if builder.latent_cache:
            self.attention = AbsorbedAttention(builder, sizes, self.num_heads, scale)
        else:
            self.attention = MaterializedAttention(builder, sizes, self.num_heads, scale)
        self.o_proj = RowParallelLinear(builder, "o_proj", sizes.heads * sizes.value, hidden_size, bias=bias)

    def __call__(
        self,
        positions: Array,
        x: Array,
        cache: LayerCache,
        metadata: AttentionMetadata,
        rows: Array | None = None,
    ) -> Array:
        """x [T, hidden] at `positions` [T] -> [T, hidden], or [R, hidden] of the token indices `rows`."""
        nope, rope, rank, tokens = self.sizes.nope, self.sizes.rope, self.sizes.rank, x.shape[0]
        q = self.queries(x).reshape(tokens * self.num_heads, self.sizes.key)
        both = self.kv_a_proj(x)
        q_rope, k_rope = self.backend.concat([q[:, nope:]]), both[:, rank:]
        self.rotary(positions, q_rope.reshape(tokens, self.num_heads * rope), k_rope)
        latent = self.kv_a_layernorm(both[:, :rank])
        own = cache.wait_for_load(metadata)
        out = self.attention.attend(q[:, :nope], q_rope, latent, k_rope, cache, own)
        cache.save()
        return self.o_proj(self.attention.values(take_rows(self.backend, out, rows)))

    def cache_spec(self) -> LayerKVSpec:
        """Return what this layer caches per token."""
        return self.attention.cache_spec()


class QueryProjection:
    """Queries of this rank's heads, by way of a vector of `query_rank` elements where there is one."""

    def __init__(self, builder: Builder, hidden_size: int, sizes: LatentSizes, *, eps: float, bias: bool) -> None:
        outputs, rank = (sizes.heads * sizes.key,), sizes.query_rank
        self.first: ReplicatedLinear | None = None
        if rank is None:
            self.last = ColumnParallelLinear(builder, ("q_proj",), hidden_size, outputs)
            return
        self.first = ReplicatedLinear(builder, "q_a_proj", hidden_size, rank, bias=bias)
        self.norm = RMSNorm(builder, "q_a_layernorm", rank, eps)
        self.last = ColumnParallelLinear(builder, ("q_b_proj",), rank, outputs)

    def __call__(self, x: Array) -> Array:
        """[T, hidden] -> [T, Hq * D]."""
        return self.last(x if self.first is None else self.norm(self.first(x)))


class AbsorbedAttention:
    """Attention in the latent space: a token's cache is its latent vector and its rotated key."""

    def __init__(self, builder: Builder, sizes: LatentSizes, num_heads: int, scale: float) -> None:
        self.backend, self.num_heads = builder.backend, num_heads
        if self.backend.kv_dtype == "int8":
            raise ConfigError(
                "kv_cache_dtype is int8; latent vectors are cached in float32, bfloat16, float16, or on a GPU in fp8. "
                "With latent_cache off, keys and values of all heads can be cached in int8",
                param="kv_cache_dtype",
            )
        keys, values = split_heads(builder, sizes, num_heads)
        self.to_latent = self.backend.pack_heads([key.transposed() for key in keys])
        self.to_values = self.backend.pack_heads(values)
        self.params = AttentionParams(num_heads, 1, sizes.rank + sizes.rope, scale, value_size=sizes.rank)

    def attend(
        self, q: Array, q_rope: Array, latent: Array, k_rope: Array, kv_cache: LayerCache, metadata: AttentionMetadata
    ) -> Array:
        """q [T*Hq, nope], q_rope [T*Hq, rope], latent [T, rank], k_rope [T, rope] -> [T, Hq * rank]."""
        tokens = latent.shape[0]
        self.backend.write_latent(self.backend.concat([latent, k_rope]), kv_cache.cache, metadata.slot_mapping)
        queries = self.backend.concat([self.backend.head_linear(q, self.to_latent), q_rope])
        queries = queries.reshape(tokens, self.num_heads * self.params.head_size)
        return self.backend.paged_attention(queries, kv_cache.cache, metadata, self.params)

    def values(self, out: Array) -> Array:
        """Outputs of heads in the latent space [R, Hq * rank] -> [R, Hq * value]."""
        rows = out.reshape(out.shape[0] * self.num_heads, self.params.out_size)
        values = self.backend.head_linear(rows, self.to_values)
        return values.reshape(out.shape[0], self.num_heads * values.shape[1])

    def cache_spec(self) -> LayerKVSpec:
        """One vector for each token."""
        return LayerKVSpec(1, self.params.head_size, self.backend.kv_dtype, latent=True)


class MaterializedAttention:
    """Multi-head attention: keys and values of all heads are computed and cached, values padded to the size of keys."""

    def __init__(self, builder: Builder, sizes: LatentSizes, num_heads: int, scale: float) -> None:
        self.backend, self.sizes, self.num_heads = builder.backend, sizes, num_heads
        if sizes.value > sizes.key:
            raise ConfigError(
                f"latent_cache is off; it must be on for this model, whose values are larger than its keys "
                f"({sizes.value} and {sizes.key} elements)",
                param="latent_cache",
            )
        self.kv_b_proj = ColumnParallelLinear(
            builder, ("kv_b_proj",), sizes.rank, (sizes.heads * (sizes.nope + sizes.value),)
        )
        self.params = AttentionParams(num_heads, num_heads, sizes.key, scale)

    def attend(
        self, q: Array, q_rope: Array, latent: Array, k_rope: Array, kv_cache: LayerCache, metadata: AttentionMetadata
    ) -> Array:
        """As in `AbsorbedAttention` -> [T, Hq * D]; only the first elements of each head are of its value."""
        concat, nope, tokens = self.backend.concat, self.sizes.nope, latent.shape[0]
        rows, width = tokens * self.num_heads, self.num_heads * self.sizes.key
        made = self.kv_b_proj(latent).reshape(rows, nope + self.sizes.value)
        shared = concat([k_rope] * self.num_heads).reshape(rows, self.sizes.rope)
        keys, values = concat([made[:, :nope], shared]), made[:, nope:]
        missing = self.sizes.key - self.sizes.value
        values = concat([values, keys[:, :missing]] if missing else [values])  # padding, see `values`
        keys, values = keys.reshape(tokens, width), values.reshape(tokens, width)
        self.backend.write_kv(keys, values, kv_cache.cache, metadata.slot_mapping)
        queries = concat([q, q_rope]).reshape(tokens, width)
        return self.backend.paged_attention(queries, kv_cache.cache, metadata, self.params)

    def values(self, out: Array) -> Array:
        """Padded values [R, Hq * D] -> [R, Hq * value]."""
        rows = out.reshape(out.shape[0] * self.num_heads, self.sizes.key)
        return self.backend.concat([rows[:, : self.sizes.value]]).reshape(
            out.shape[0], self.num_heads * self.sizes.value
        )

    def cache_spec(self) -> LayerKVSpec:
        """Keys and values of all heads for each token."""
        return LayerKVSpec(self.num_heads, self.sizes.key, self.backend.kv_dtype)


def split_heads(builder: Builder, sizes: LatentSizes, num_heads: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return W_UK [nope, rank] and W_UV [value, rank] of each of this rank's heads, which kv_b_proj holds in turn."""
    step = sizes.nope + sizes.value
    whole = builder.get("kv_b_proj.weight", (sizes.heads * step, sizes.rank))
    first = builder.backend.rank * num_heads
    starts = [head * step for head in range(first, first + num_heads)]
    return (
        [whole.rows(start, start + sizes.nope) for start in starts],
        [whole.rows(start + sizes.nope, start + step) for start in starts],
    )
