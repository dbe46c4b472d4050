"""Token embeddings and the output head, split over ranks by vocabulary rows; learned position tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import Array
from quire.layers.builder import Builder


class VocabParallelEmbedding:
    """A [vocab_size, width] table; each rank holds an equal range of rows, the last one padded with zeros.

    The packed table also serves as the output head of models that tie the two.
    """

    def __init__(self, builder: Builder, name: str, vocab_size: int, width: int) -> None:
        self.backend = builder.backend
        self.vocab_size = vocab_size
        table = builder.get(f"{name}.weight", (vocab_size, width))
        self.rows_per_rank = -(-vocab_size // self.backend.world_size)
        self.first_row = self.backend.rank * self.rows_per_rank
        parts = [table.rows(self.first_row, self.first_row + self.rows_per_rank)]
        padding = self.rows_per_rank - parts[0].shape[0]
        if padding:
            parts.append(HostTensor(np.zeros((padding, width), table.array.dtype), table.dtype))
        self.weight = self.backend.pack_linear(parts, table=True)
        self.lora = None if builder.lora is None else builder.lora.embedding(builder.prefix + name, vocab_size, width)

    def __call__(self, ids: Array) -> Array:
        """Token ids [T] -> [T, width]."""
        first_row = None if self.backend.world_size == 1 else self.first_row
        rows = self.backend.all_reduce(self.backend.embedding(ids, self.weight, first_row))
        return rows if self.lora is None else self.lora(rows, ids)

    def logits(self, hidden: Array) -> Array:
        """Hidden rows [R, width] -> scores of every real token [R, vocab_size]."""
        logits = self.backend.all_gather(self.backend.linear(hidden, self.weight))
        return logits[:, : self.vocab_size] if self.backend.world_size > 1 else logits


class LMHead:
    """Scores every token: with the embedding's own table where the model ties them, else with its own matrix."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        vocab_size: int,
        width: int,
        *,
        tied_to: VocabParallelEmbedding | None,
        bias: bool = False,
    ) -> None:
        self.table: VocabParallelEmbedding | None = None
        self.bias: Array = None
        self.adapters, self.lora = builder.lora, None
        if builder.headless:
            return
        # A separate table is never looked up: adapters change it as the head.
        self.table = tied_to or VocabParallelEmbedding(replace(builder, lora=None), name, vocab_size, width)
        self.lora = None if builder.lora is None else builder.lora.head(builder.prefix + name, vocab_size, width)
        self.bias = builder.backend.vector(builder.get(f"{name}.bias", (vocab_size,))) if bias else None

    def __call__(self, hidden: Array) -> Array:
        """Hidden rows [R, width] -> logits [R, vocab_size], wider where adapters may add to the vocabulary."""
        assert self.table is not None, "a headless model has no logits"
        logits = self.table.logits(hidden)
        logits = logits if self.bias is None else logits + self.bias
        if self.adapters is None or self.lora is None:
            return logits
        return self.lora(self.adapters.widen(logits), hidden)


class PositionEmbedding:
    """A learned vector per position. `skip`: the number of first rows that stand for no position (OPT)."""

    def __init__(self, builder: Builder, name: str, num_positions: int, width: int, *, skip: int = 0) -> None:
        self.backend = builder.backend
        table = builder.get(f"{name}.weight", (num_positions + skip, width))
        self.weight = self.backend.pack_linear([table.rows(skip, num_positions + skip)], table=True, exact=True)

    def __call__(self, positions: Array) -> Array:
        """Positions [T] -> [T, width]."""
        return self.backend.embedding(positions, self.weight)
