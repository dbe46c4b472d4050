"""Drives a model directly, without engine or scheduler: paged caches, hand-made metadata, scattered blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.kernels.backend import AttentionMetadata, Backend, LayerCache
from quire.models.interface import Model

ROWS = 16  # sequences with states at a time


@dataclass
class _Sequence:
    row: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)


class ModelDriver:
    """Feeds tokens of named sequences to a model, any number of sequences and tokens per step."""

    def __init__(
        self, model: Model, backend: Backend, *, block_size: int = 4, num_blocks: int = 128, seed: int = 0
    ) -> None:
        self.model, self.backend, self.block_size = model, backend, block_size
        spec, rng = model.kv_cache_spec(), np.random.default_rng(seed)
        self.caches: list[Any] = [
            LayerCache(
                backend.new_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_size, latent=layer.latent)
            )
            for layer in spec.layers
        ]
        # States hold what earlier sequences left: ops begin with zeros by themselves.
        self.caches += [
            tuple(backend.from_numpy(rng.standard_normal((ROWS, *shape)).astype(np.float32)) for shape in layer.shapes)
            for layer in spec.states
        ]
        self.free = rng.permutation(num_blocks).tolist()
        self.rows = rng.permutation(ROWS).tolist()
        self.sequences: dict[str, _Sequence] = {}

    def step(self, work: dict[str, list[int]]) -> dict[str, np.ndarray]:
        """Append tokens to sequences and compute them in one step; return the logits after each, [tokens, vocab]."""
        positions, slots, lengths = [], [], []
        for name, tokens in work.items():
            if name not in self.sequences:
                self.sequences[name] = _Sequence(self.rows[len(self.sequences) % ROWS])
            sequence = self.sequences[name]
            new = list(range(sequence.length, sequence.length + len(tokens)))
            sequence.length += len(tokens)
            while len(sequence.blocks) * self.block_size < sequence.length:
                sequence.blocks.append(self.free.pop())
            positions += new
            slots += [sequence.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in new]
            lengths.append(len(tokens))
        hidden = self.model.forward(
            self._array([token for tokens in work.values() for token in tokens], np.int64),
            self._array(positions, np.int64),
            self.caches,
            self._metadata([self.sequences[name] for name in work], slots, lengths),
        )
        logits = np.array(self.backend.to_numpy(self.model.compute_logits(hidden)))
        return dict(zip(work, np.split(logits, np.cumsum(lengths)[:-1])))

    def greedy(self, prompt: list[int], steps: int, name: str = "greedy") -> list[int]:
        """Return the `steps` most likely tokens after `prompt`, computed one by one."""
        tokens, found = prompt, []
        for _ in range(steps):
            tokens = [int(self.step({name: tokens})[name][-1].argmax())]
            found += tokens
        return found

    def _metadata(self, sequences: list[_Sequence], slots: list[int], lengths: list[int]) -> AttentionMetadata:
        seq_lens = [sequence.length for sequence in sequences]
        tables = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), np.int32)
        for row, sequence in zip(tables, sequences):
            row[: len(sequence.blocks)] = sequence.blocks
        return AttentionMetadata(
            cu_query_lens=self._array(np.cumsum([0, *lengths]), np.int32),
            seq_lens=self._array(seq_lens, np.int32),
            block_tables=self._array(tables, np.int32),
            slot_mapping=self._array(slots, np.int64),
            state_rows=self._array([sequence.row for sequence in sequences], np.int64),
        )

    def _array(self, values: object, dtype: type) -> object:
        return self.backend.from_numpy(np.asarray(values, dtype=dtype))
