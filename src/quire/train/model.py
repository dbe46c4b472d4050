"""A small Llama in plain PyTorch, written for training from scratch on a CPU.

Here live the modules and their forward pass. Tensor names follow the Hugging Face checkpoint layout
(`model.layers.0.self_attn.q_proj.weight`, ...), so that `state_dict()` can be saved as it is. Inference with a
paged KV cache does not live here: the engine has its own model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network; every field has the meaning of the Hugging Face Llama config key of that name."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each float32 [max_position_embeddings, head_dim]; both halves hold the same angles."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, tokens, head_dim] (Su et al. 2021); dimension i pairs with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> [batch, tokens, hidden]; cos and sin are [tokens, head_dim]."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        group = self.num_heads // self.num_kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward block (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> [batch, tokens, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaBody(nn.Module):
    """Token embedding, decoder layers and final norm (the part Hugging Face calls `model`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_tables(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [batch, tokens] -> hidden states [batch, tokens, hidden]."""
        x = self.embed_tokens(token_ids)
        tokens = token_ids.shape[1]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cos = self.get_buffer("rope_cos")[:tokens].to(dtype)
        sin = self.get_buffer("rope_sin")[:tokens].to(dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """Causal language model; the output head shares its matrix with the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaBody(config)
        self._initialize()

    def _initialize(self) -> None:
        """Draw from Normal(0, 0.02); the two projections into the residual stream are scaled by 1/sqrt(2 layers)."""
        residual_std = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=residual_std if writes_residual else 0.02)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [batch, tokens] -> logits [batch, tokens, vocab_size] in the compute dtype."""
        return F.linear(self.model(token_ids), self.model.embed_tokens.weight)

    def num_parameters(self) -> int:
        """Return the number of trained values (the tied output head counted once)."""
        return sum(parameter.numel() for parameter in self.parameters())
