"""Where training rows come from: plain text cut into three parts, and generated chats.

A row is `length + 1` token ids with one loss weight each. Rows depend only on the generator handed in, and the
trainer seeds that from the step number, so the position in the data needs no saving: it is the step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from quire.demo.corpus import conversation
from quire.train.tokenizer import BOS, render_chat, token_id

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


def split_text(text: str) -> dict[Split, str]:
    """Cut into the first 80 %, the next 10 % and the last 10 %, each moved forward to the next line start."""

    def line_start(position: int) -> int:
        newline = text.find("\n", position)
        return position if newline < 0 else newline + 1

    first, second = line_start(len(text) * 8 // 10), line_start(len(text) * 9 // 10)
    return {"train": text[:first], "val": text[first:second], "test": text[second:]}


class Source(Protocol):
    """One kind of training text."""

    name: str

    def row(self, rng: random.Random, length: int, split: Split) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return token ids and loss weights, both [length + 1]; the first id is the beginning-of-sequence token."""
        ...

    def test_passages(self, max_tokens: int) -> Iterator[str]:
        """Return pieces of the test split; each has at most `max_tokens`, with its beginning-of-sequence token."""
        ...


class TextSource:
    """Windows of a text, each starting at a random line start."""

    def __init__(self, text: str, tokenizer: Tokenizer, name: str = "text") -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._bos = token_id(tokenizer, BOS)
        self._parts = split_text(text)
        self._ids: dict[Split, NDArray[np.int64]] = {}
        self._starts: dict[Split, NDArray[np.int64]] = {}
        for split, part in self._parts.items():
            encoding = tokenizer.encode(part, add_special_tokens=False)
            self._ids[split] = np.array(encoding.ids, dtype=np.int64)
            line_starts = [
                index for index, (begin, _) in enumerate(encoding.offsets) if begin == 0 or part[begin - 1] == "\n"
            ]
            self._starts[split] = np.array(line_starts, dtype=np.int64)

    def num_tokens(self, split: Split) -> int:
        """Return the length of one split."""
        return len(self._ids[split])

    def row(self, rng: random.Random, length: int, split: Split) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return a window that starts with the beginning-of-sequence token; wraps around at the end of the split."""
        ids, starts = self._ids[split], self._starts[split]
        start = int(starts[rng.randrange(len(starts))])
        window = np.take(ids, range(start, start + length), mode="wrap")
        return np.concatenate(([self._bos], window)), np.ones(length + 1, dtype=np.float32)

    def test_passages(self, max_tokens: int) -> Iterator[str]:
        """Return whole lines, as many as fit; a line that is too long by itself is cut between tokens."""
        passage = ""
        for line in self._parts["test"].splitlines(keepends=True):
            if len(self._tokenizer.encode(passage + line).ids) <= max_tokens:
                passage += line
                continue
            if passage:
                yield passage
            passage = line
            while len((encoding := self._tokenizer.encode(passage)).ids) > max_tokens:
                cut = encoding.offsets[max_tokens - 1][1]
                yield passage[:cut]
                passage = passage[cut:]
        if passage:
            yield passage


class ChatSource:
    """Generated dialogues, one after another until the row is full; a row never starts inside one."""

    name = "chat"
    num_passages = 800

    def __init__(self, tokenizer: Tokenizer, prompt_weight: float, seed: int) -> None:
        self._tokenizer = tokenizer
        self._bos = token_id(tokenizer, BOS)
        self._prompt_weight = prompt_weight
        self._seed = seed

    def row(self, rng: random.Random, length: int, split: Split) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Assistant tokens weigh 1, all others `prompt_weight`, and the beginning of a dialogue 0."""
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= length:
            ids.append(self._bos)
            weights.append(0.0)
            for text, is_assistant in render_chat(conversation(rng, split)):
                piece = self._tokenizer.encode(text, add_special_tokens=False).ids
                ids.extend(piece)
                weights.extend([1.0 if is_assistant else self._prompt_weight] * len(piece))
        return np.array(ids[: length + 1], dtype=np.int64), np.array(weights[: length + 1], dtype=np.float32)

    def test_passages(self, max_tokens: int) -> Iterator[str]:
        """Return dialogues made of held-back cases; the few that are too long are left out."""
        rng = random.Random(f"{self._seed} test passages")
        for _ in range(self.num_passages):
            text = "".join(piece for piece, _ in render_chat(conversation(rng, "test")))
            if len(self._tokenizer.encode(text).ids) <= max_tokens:
                yield text


@dataclass(frozen=True)
class Batch:
    """Inputs and targets int64 [rows, length]; weights float32 [rows, length] belong to the targets."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    weights: NDArray[np.float32]


def make_batch(
    sources: list[Source], shares: list[float], seed: str, rows: int, length: int, split: Split = "train"
) -> Batch:
    """Draw `rows` rows, each from a source picked by its share; the same arguments give the same batch."""
    rng = random.Random(seed)
    drawn = [rng.choices(sources, weights=shares)[0].row(rng, length, split) for _ in range(rows)]
    ids = np.stack([row for row, _ in drawn])
    weights = np.stack([weight for _, weight in drawn])
    return Batch(inputs=ids[:, :-1], targets=ids[:, 1:], weights=weights[:, 1:])
