"""From a two-layer perceptron to a Llama, one component at a time, on the characters of a text.

`python -m quire.train.ladder --data play.txt` trains five models under the same conditions and prints what each
component buys. The first sees one character only, so it can learn no more than which character follows which; the
rest is what attention and depth add. The full trainer (`quire train`) does not use this module.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.train.model import MLP, Attention, DecoderLayer, ModelConfig, RMSNorm, rope_tables

WIDTH = 128
CONTEXT = 16
ROWS = 32
FEED_FORWARD = 352
LAYERS = 4


class Perceptron(nn.Module):
    """Two linear layers with a ReLU between; with 65 outputs, an embedding in front makes 33,217 parameters."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] -> logits [rows, tokens, vocab_size]."""
        logits: Tensor = self.out(F.relu(self.hidden(x)))
        return logits


class CharacterModel(nn.Module):
    """An embedding, any number of blocks on the residual stream, and a head that gives logits."""

    def __init__(self, vocab_size: int, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        cos, sin = rope_tables(block_config(vocab_size))
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [rows, tokens] -> logits [rows, tokens, vocab_size]; tokens is at most CONTEXT."""
        x = self.embedding(token_ids)
        cos, sin = (self.get_buffer(name)[: token_ids.shape[1]] for name in ("rope_cos", "rope_sin"))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(x)
        return logits


class ResidualAttention(nn.Module):
    """Normalised attention, added to the residual stream: a decoder layer without its feed-forward half."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, config.rms_norm_eps)
        self.attention = Attention(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, tokens, width] -> [rows, tokens, width]."""
        out: Tensor = x + self.attention(self.norm(x), cos, sin)
        return out


class SwiGLUHead(nn.Module):
    """A Llama's feed-forward half, final norm and output layer, in place of the perceptron."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(WIDTH, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.out_norm = RMSNorm(WIDTH, config.rms_norm_eps)
        self.out = nn.Linear(WIDTH, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] -> logits [rows, tokens, vocab_size]."""
        logits: Tensor = self.out(self.out_norm(x + self.mlp(self.norm(x))))
        return logits


def block_config(vocab_size: int) -> ModelConfig:
    """Return the sizes that all variants share."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=WIDTH // 8,
        max_position_embeddings=CONTEXT,
    )


def variants(vocab_size: int) -> dict[str, Callable[[], CharacterModel]]:
    """Name and builder of each model, from the simplest to the complete one."""
    config = block_config(vocab_size)

    def normed() -> nn.Module:
        return nn.Sequential(RMSNorm(WIDTH, config.rms_norm_eps), Perceptron(vocab_size))

    return {
        "perceptron": lambda: CharacterModel(vocab_size, [], Perceptron(vocab_size)),
        "+ RMSNorm": lambda: CharacterModel(vocab_size, [], normed()),
        "+ attention with RoPE": lambda: CharacterModel(vocab_size, [ResidualAttention(config)], normed()),
        "+ SwiGLU": lambda: CharacterModel(vocab_size, [ResidualAttention(config)], SwiGLUHead(config)),
        f"+ {LAYERS} layers": lambda: CharacterModel(
            vocab_size, [DecoderLayer(config) for _ in range(LAYERS)], SwiGLUHead(config)
        ),
    }


@dataclass(frozen=True)
class VariantResult:
    """What one model reached."""

    name: str
    num_parameters: int
    val_loss: float


def train_variants(text: str, steps: int, seed: int = 0, learning_rate: float = 2e-3) -> list[VariantResult]:
    """Train every variant for `steps` steps on the first nine tenths of `text`; losses are in nats on the rest."""
    alphabet = sorted(set(text))
    index = {character: number for number, character in enumerate(alphabet)}
    ids = torch.tensor([index[character] for character in text])
    cut = len(ids) * 9 // 10
    results = []
    for name, build in variants(len(alphabet)).items():
        torch.manual_seed(seed)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        for _ in range(steps):
            loss = _loss(model, ids[:cut], rows=ROWS)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        torch.manual_seed(seed)
        with torch.no_grad():
            val_loss = float(_loss(model, ids[cut:], rows=8 * ROWS))
        results.append(VariantResult(name, sum(parameter.numel() for parameter in model.parameters()), val_loss))
    return results


def _loss(model: CharacterModel, ids: Tensor, rows: int) -> Tensor:
    """Return the mean next-character loss over `rows` windows at random places."""
    starts = torch.randint(0, len(ids) - CONTEXT, (rows, 1))
    windows = ids[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main(argv: list[str] | None = None) -> int:
    """Print one line per variant."""
    parser = argparse.ArgumentParser(description="Show what each component of a Llama buys on a character text.")
    parser.add_argument("--data", required=True, help="text file")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for result in train_variants(Path(args.data).read_text(encoding="utf-8"), args.steps, args.seed):
        sys.stdout.write(
            f"{result.name:<24} {result.num_parameters:>9} parameters   validation loss {result.val_loss:.3f}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
