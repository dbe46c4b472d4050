"""GPT-2 (Radford et al. 2019): learned positions, layer norms before each block, one fused q/k/v projection.

Its files hold linear weights as [in, out].
"""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, KVCache
from quire.layers.activation import Activation
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, PositionEmbedding, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.step import KVCacheSpec


class GPT2Attention:
    """Self-attention of one layer."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int) -> None:
        hidden, heads = info.hidden_size, info.num_attention_heads
        self.c_attn = QKVParallelLinear(
            builder,
            ("c_attn",),
            hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=info.head_dim,
            bias=True,
            transposed=True,
        )
        scale = info.head_dim**-0.5 if info.fields.flag("scale_attn_weights", True) else 1.0
        if info.fields.flag("scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        local_heads = self.c_attn.num_heads
        self.attention = Attention(
            builder.backend, AttentionParams(local_heads, local_heads, info.head_dim, scale=scale)
        )
        self.c_proj = RowParallelLinear(builder, "c_proj", hidden, hidden, bias=True, transposed=True)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        q, k, v = self.c_attn(x)
        return self.c_proj(self.attention(positions, q, k, v, kv_cache, metadata))


class GPT2MLP:
    """Feed-forward layer."""

    def __init__(self, builder: Builder, info: ModelInfo) -> None:
        hidden, inner = info.hidden_size, info.intermediate_size
        self.c_fc = ColumnParallelLinear(builder, ("c_fc",), hidden, (inner,), bias=True, transposed=True)
        self.act = Activation(builder.backend, info.hidden_act)
        self.c_proj = RowParallelLinear(builder, "c_proj", inner, hidden, bias=True, transposed=True)

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block:
    """x = x + attention(norm(x)); x = x + mlp(norm(x))."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int) -> None:
        self.ln_1 = LayerNorm(builder, "ln_1", info.hidden_size, info.norm_eps)
        self.attn = GPT2Attention(builder.under("attn"), info, layer)
        self.ln_2 = LayerNorm(builder, "ln_2", info.hidden_size, info.norm_eps)
        self.mlp = GPT2MLP(builder.under("mlp"), info)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        x = x + self.attn(positions, self.ln_1(x), kv_cache, metadata)
        return x + self.mlp(self.ln_2(x))


class GPT2LMHeadModel:
    """Word and position embeddings, blocks, final norm, output head."""

    # Older files hold the causal mask of every layer.
    ignorable: ClassVar[tuple[str, ...]] = (r"\.attn\.(masked_)?bias$",)

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        if info.fields.flag("add_cross_attention", False):
            raise info.fields.error("add_cross_attention", "false: only the decoder-only model is supported")
        self.backend = builder.backend
        self.vocab_size, hidden = info.vocab_size, info.hidden_size
        body = builder.under_if("transformer", "wte.weight")
        self.wte = VocabParallelEmbedding(body, "wte", info.vocab_size, hidden)
        self.wpe = PositionEmbedding(body, "wpe", info.max_position_embeddings, hidden)
        self.h = [GPT2Block(body.under(f"h.{layer}"), info, layer) for layer in range(info.num_hidden_layers)]
        self.ln_f = LayerNorm(body, "ln_f", hidden, info.norm_eps)
        tied_to = self.wte if info.tie_word_embeddings else None
        self.lm_head = LMHead(builder, "lm_head", info.vocab_size, hidden, tied_to=tied_to)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([block.attn.attention.kv_spec() for block in self.h])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        x = self.wte(input_ids) + self.wpe(positions)
        for block, kv_cache in zip(self.h, kv_caches, strict=True):
            x = block(positions, x, kv_cache, metadata)
        return self.ln_f(wanted_rows(self.backend, x, metadata))

    def compute_logits(self, hidden: Array) -> Array:
        """See `Model.compute_logits`."""
        return self.lm_head(hidden)
