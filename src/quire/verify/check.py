"""What `quire verify` does: logits of prompts whole and in pieces, greedy text, and layers where they differ."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ModelError
from quire.kernels.gpu.probe import check_gpu
from quire.tokenizer.tokenizer import Tokenizer
from quire.verify.compare import LayerErrors, first_difference, layer_errors, relative_error
from quire.verify.oracle import LayerTrace, Oracle
from quire.verify.subject import Subject

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
QUANTIZED_TOLERANCE = 0.25  # of weights in few bits: what they are worth is another question
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Im Jahre 1905 erschienen vier Arbeiten; e = mc^2 steht in der letzten. \u7b2c\u4e00\u7ae0\u3002",
)
PIECES = (1, 5, 2, 9)  # lengths that prompts are cut into, over and over


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        logits, pieces: worst relative errors of prompts computed whole, and in pieces beside another sequence; of
            hidden states where the model makes vectors. scores: of the logits of classes, where it has them.
        greedy_same, greedy_tokens: how many tokens of our greedy texts transformers would have chosen, and of how many.
        closest: the largest lead, relative to the largest logit, that transformers' choice had over one that differed.
        layers: errors by layer, where they were looked at. first: the first layer that differs, in words.
    """

    oracle: str
    dtype: str
    tolerance: float
    reads_files: bool
    num_prompts: int = 0
    num_tokens: int = 0
    logits: float = 0.0
    pieces: float = 0.0
    scores: float = 0.0
    vectors: bool = False
    greedy_same: int = 0
    greedy_tokens: int = 0
    closest: float = 0.0
    layers: list[LayerErrors] = field(default_factory=list)
    first: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether logits are within the tolerance, and every greedy choice that is clearer than it is the same."""
        return max(self.logits, self.pieces, self.scores, self.closest) <= self.tolerance


def prompts_of(info: ModelInfo, tokenizer: Tokenizer | None, length: int, seed: int) -> list[list[int]]:
    """Return prompts of up to `length` tokens: a few texts, and random tokens."""
    found = [] if tokenizer is None else [tokenizer.encode(text)[:length] for text in TEXTS]
    largest = max(itertools.chain.from_iterable(found), default=0)
    if largest >= info.vocab_size:
        raise ModelError(
            f"{info.path}: the tokenizer gives token {largest}, but the model has {info.vocab_size} "
            "(skip_tokenizer_init compares random tokens only)"
        )
    random = np.random.default_rng(seed)
    return [*filter(None, found), random.integers(0, info.vocab_size, length).tolist()]


def verify(
    config: EngineConfig,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    *,
    length: int = 48,
    num_tokens: int = 64,
    tolerance: float | None = None,
    all_layers: bool = False,
) -> Report:
    """Compare a model with transformers' of the same folder.

    Args:
        config: resolved; its dtype, quantization and device are those of our side.
        length: of prompts [tokens]. num_tokens: of greedy text.
        tolerance: relative error of logits that passes; by default by dtype and quantization.
        all_layers: look at layers even if nothing differs.

    Raises:
        ConfigError: transformers is not installed, or there is no GPU although one is asked for.
        ModelError: either side cannot load the model.
    """
    if config.device.device == "cuda":
        check_gpu()  # before memory and time are spent on the other side
    prompts = prompts_of(info, tokenizer, length, config.model.seed)
    oracle = Oracle(info, config.model.load_format, config.model.hf_overrides)
    longest = max(map(len, prompts)) + (num_tokens if info.pooling is None else 0)
    subject = Subject(config, info, length=min(longest, info.longest_model_len))
    if tolerance is None:
        quantized = config.model.quantization is not None
        tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCES[config.model.dtype]
    report = Report(oracle.name, config.model.dtype, tolerance, oracle.reads_files, len(prompts))
    try:
        for prompt in prompts:
            if info.pooling is None:
                _compare_prompt(report, oracle, subject, prompt, num_tokens)
            else:
                _compare_text(report, oracle, subject, prompt, info.causal)
        if all_layers or not report.agrees:
            report.layers = layer_errors(_trace(config, info, subject, prompts[0]), oracle.trace(prompts[0]))
            report.first = first_difference(report.layers, tolerance)
    finally:
        subject.close()
    return report


def _trace(config: EngineConfig, info: ModelInfo, subject: Subject, prompt: list[int]) -> list[LayerTrace]:
    """Return what attention layers see; where they cache latents, what they see when they cache keys and values."""
    found = subject.trace(prompt)
    if found or not config.cache.latent_cache:
        return found
    cache = dataclasses.replace(config.cache, latent_cache=False)
    plain = Subject(dataclasses.replace(config, cache=cache), info, length=len(prompt))
    try:
        return plain.trace(prompt)
    finally:
        plain.close()


def _compare_prompt(report: Report, oracle: Oracle, subject: Subject, prompt: list[int], num_tokens: int) -> None:
    expected = oracle.logits(prompt)
    logits = subject.feed("whole", prompt)
    report.logits = max(report.logits, relative_error(logits, expected))
    report.pieces = max(report.pieces, relative_error(_in_pieces(subject, prompt), expected))
    text = [int(logits[-1].argmax())]
    while len(text) < num_tokens:
        text.append(int(subject.feed("whole", text[-1:])[-1].argmax()))
    subject.drop("whole")
    report.num_tokens += len(prompt) + len(text)
    # If the oracle, given our text, would choose each of its tokens next, then its own greedy text is the same.
    told = oracle.logits(prompt + text)[len(prompt) - 1 : -1]
    chosen = told[np.arange(len(text)), text]
    report.greedy_tokens += len(text)
    report.greedy_same += int((told.argmax(axis=1) == text).sum())
    lead = (told.max(axis=1) - chosen).max() / max(float(np.abs(told).max()), 1e-30)
    report.closest = max(report.closest, float(lead))


def _compare_text(report: Report, oracle: Oracle, subject: Subject, text: list[int], causal: bool) -> None:
    report.vectors = True
    expected, hidden = oracle.logits(text), subject.feed("whole", text)
    subject.drop("whole")
    report.logits = max(report.logits, relative_error(hidden, expected))
    if causal:
        report.pieces = max(report.pieces, relative_error(_in_pieces(subject, text), expected))
    scores = oracle.scores(text)
    if scores is not None:
        report.scores = max(report.scores, relative_error(subject.scores(hidden), scores))
    report.num_tokens += len(text)


def _in_pieces(subject: Subject, prompt: list[int]) -> np.ndarray:
    """Return the logits of a prompt that is computed piece by piece, in blocks that lie scattered."""
    found, start, number = [], 0, 0
    while start < len(prompt):
        stop = start + PIECES[number % len(PIECES)]
        found.append(subject.feed("pieces", prompt[start:stop]))
        subject.feed("beside", prompt[start:stop][:1])
        start, number = stop, number + 1
    subject.drop("pieces")
    subject.drop("beside")
    return np.concatenate(found)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "agrees": report.agrees,
        "oracle": report.oracle,
        "dtype": report.dtype,
        "tolerance": report.tolerance,
        "weights_read_by_oracle": report.reads_files,
        "compared": "hidden states" if report.vectors else "logits",
        "logits_error": report.logits,
        "scores_error": report.scores,
        "pieces_error": report.pieces,
        "greedy": {"same": report.greedy_same, "tokens": report.greedy_tokens, "largest_lead": report.closest},
        "first_difference": report.first,
        "layers": [
            {"layer": at.layer, "values": at.values, "scores": at.scores, "output": at.output} for at in report.layers
        ],
    }
