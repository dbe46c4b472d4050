"""Prompts for benchmarks: random token ids of given lengths, or the lines of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.tokenizer.tokenizer import Tokenizer


DEFAULT_INPUT_LEN = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: its prompt as token ids, and how many tokens to generate. [tokens]"""

    prompt_token_ids: list[int]
    output_len: int


def fitting_input_len(given: int | None, context: int | None, *others: int) -> int:
    """Return the prompt length to use: the given one, else 1024, or less in a shorter context.

    Args:
        context: longest prompt plus output, None if not known. others: what else must fit into it. [tokens]
    """
    if given is not None or context is None:
        return DEFAULT_INPUT_LEN if given is None else given
    return max(1, min(DEFAULT_INPUT_LEN, context - sum(others)))


def random_samples(
    rng: np.random.Generator,
    count: int,
    *,
    vocab_size: int,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[Sample]:
    """Draw `count` samples of uniformly random token ids.

    Args:
        vocab_size: ids are drawn from [0, vocab_size).
        input_len, output_len: lengths; with `range_ratio` r they are uniform in [len * (1 - r), len * (1 + r)].
        prefix_len: tokens in front of every prompt, the same in all of them.
    """
    prefix = rng.integers(0, vocab_size, prefix_len).tolist()
    inputs = _lengths(rng, count, input_len, range_ratio)
    outputs = _lengths(rng, count, output_len, range_ratio)
    return [
        Sample(prefix + rng.integers(0, vocab_size, input_length).tolist(), output_length)
        for input_length, output_length in zip(inputs, outputs, strict=True)
    ]


def _lengths(rng: np.random.Generator, count: int, length: int, range_ratio: float) -> list[int]:
    low = max(1, int(length * (1 - range_ratio)))
    high = max(low, int(length * (1 + range_ratio)))
    return [int(value) for value in rng.integers(low, high + 1, count)]


def file_samples(path: str, count: int, *, tokenizer: Tokenizer, output_len: int) -> list[Sample]:
    """Read samples from JSON lines with "prompt" and optionally "output_tokens"; they repeat if there are too few.

    Raises:
        ConfigError: the file cannot be read, or a line is no such object.
    """
    try:
        lines = [line for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path: cannot read {path!r}: {error}", param="dataset_path") from None
    samples = []
    for number, line in enumerate(lines, 1):
        item = _parsed(line)
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
            raise ConfigError(f'{path}: line {number}: must be a JSON object with "prompt"', param="dataset_path")
        length = item.get("output_tokens", output_len)
        if not isinstance(length, int) or length < 1:
            raise ConfigError(f"{path}: line {number}: output_tokens must be an integer >= 1", param="dataset_path")
        samples.append(Sample(tokenizer.encode(item["prompt"]), length))
    if not samples:
        raise ConfigError(f"dataset_path: {path!r} holds no prompt", param="dataset_path")
    return [samples[index % len(samples)] for index in range(count)]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
