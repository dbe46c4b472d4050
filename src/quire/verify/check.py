"""`verify`, behind `quire verify`: compares logits of whole and chunked prompts, greedy text, and attention layers.

Errors are relative to the largest expected value. Of layers, the scores of queries and keys are compared rather than
queries and keys, since the dimensions of a head may be ordered differently on the two sides.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ModelError
from quire.kernels.gpu.probe import check_gpu
from quire.tokenizer.tokenizer import Tokenizer
from quire.verify.driver import ModelDriver
from quire.verify.oracle import LayerTrace, Oracle

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
QUANTIZED_TOLERANCE = 0.25
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Im Jahre 1905 erschienen vier Arbeiten; e = mc^2 steht in der letzten. \u7b2c\u4e00\u7ae0\u3002",
)
CHUNKS = (1, 5, 2, 9)  # lengths of the chunks of prompts, repeated


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Relative errors of one attention layer: what it stores of a token, its scores, and what came out.

    `first_scores` are those of the first token with itself, which no rotation changes.
    """

    layer: int
    values: float
    scores: float
    first_scores: float
    output: float

    def worst(self) -> float:
        """Return the largest of `values`, `scores` and `output`."""
        return max(self.values, self.scores, self.output)


@dataclass(slots=True)
class Report:
    """The result of a comparison.

    Attributes:
        oracle: class of transformers' model. reads_files: whether it read the weights by itself.
        logits, chunked: largest relative errors of prompts computed whole, and in chunks beside another sequence; those
            of hidden states if `compares_hidden`, for embedding models. scores: of the logits of classes.
        greedy_matches: how many of the `greedy_tokens` of our greedy texts transformers would have chosen as well.
        largest_margin: where transformers would have chosen another token, how much larger its logit is, relative to
            the largest logit; the largest of all these.
        layers: errors by layer, if they were compared. first: a description of the first layer that differs.
    """

    oracle: str
    dtype: str
    tolerance: float
    reads_files: bool
    num_prompts: int = 0
    num_tokens: int = 0
    logits: float = 0.0
    chunked: float = 0.0
    scores: float = 0.0
    compares_hidden: bool = False
    greedy_matches: int = 0
    greedy_tokens: int = 0
    largest_margin: float = 0.0
    layers: list[LayerErrors] = field(default_factory=list)
    first: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether logits are within the tolerance, and every greedy choice that is clearer than it is the same."""
        return max(self.logits, self.chunked, self.scores, self.largest_margin) <= self.tolerance


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
        config: resolved; its dtype, quantization and device are those of our model.
        length: of prompts [tokens]. num_tokens: of greedy text.
        tolerance: relative error of logits that passes; by default by dtype and quantization.
        all_layers: compare layers even if nothing differs.

    Raises:
        ConfigError: transformers is not installed, or there is no GPU although one is asked for.
        ModelError: one of the two cannot load the model.
    """
    if config.device.device == "cuda":
        check_gpu()  # before transformers' model is loaded
    prompts = prompts_of(info, tokenizer, length, config.model.seed)
    oracle = Oracle(info, config.model.load_format, config.model.hf_overrides)
    longest = max(map(len, prompts)) + (num_tokens if info.pooling is None else 0)
    driver = ModelDriver(config, info, length=min(longest, info.longest_model_len))
    if tolerance is None:
        quantized = config.model.quantization is not None
        tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCES[config.model.dtype]
    report = Report(oracle.name, config.model.dtype, tolerance, oracle.reads_files, len(prompts))
    try:
        for prompt in prompts:
            if info.pooling is None:
                _compare_prompt(report, oracle, driver, prompt, num_tokens)
            else:
                _compare_text(report, oracle, driver, prompt, info.causal)
        if all_layers or not report.agrees:
            report.layers = layer_errors(_trace(config, info, driver, prompts[0]), oracle.trace(prompts[0]))
            report.first = first_difference(report.layers, tolerance)
    finally:
        driver.close()
    return report


def _trace(config: EngineConfig, info: ModelInfo, driver: ModelDriver, prompt: list[int]) -> list[LayerTrace]:
    """Return the inputs and outputs of attention layers; latent attention runs with materialized keys and values."""
    found = driver.trace(prompt)
    if found or not config.cache.latent_cache:
        return found
    plain = ModelDriver(config.replace(latent_cache=False), info, length=len(prompt))
    try:
        return plain.trace(prompt)
    finally:
        plain.close()


def _compare_prompt(report: Report, oracle: Oracle, driver: ModelDriver, prompt: list[int], num_tokens: int) -> None:
    expected = oracle.logits(prompt)
    logits = driver.forward("whole", prompt)
    report.logits = max(report.logits, relative_error(logits, expected))
    report.chunked = max(report.chunked, relative_error(_in_chunks(driver, prompt), expected))
    text = [int(logits[-1].argmax())]
    while len(text) < num_tokens:
        text.append(int(driver.forward("whole", text[-1:])[-1].argmax()))
    driver.finish("whole")
    report.num_tokens += len(prompt) + len(text)
    # If the oracle, given our text, would choose each of its tokens next, then its own greedy text is the same.
    theirs = oracle.logits(prompt + text)[len(prompt) - 1 : -1]
    chosen = theirs[np.arange(len(text)), text]
    report.greedy_tokens += len(text)
    report.greedy_matches += int((theirs.argmax(axis=1) == text).sum())
    margin = (theirs.max(axis=1) - chosen).max() / max(float(np.abs(theirs).max()), 1e-30)
    report.largest_margin = max(report.largest_margin, float(margin))


def _compare_text(report: Report, oracle: Oracle, driver: ModelDriver, text: list[int], causal: bool) -> None:
    report.compares_hidden = True
    expected, hidden = oracle.logits(text), driver.forward("whole", text)
    driver.finish("whole")
    report.logits = max(report.logits, relative_error(hidden, expected))
    if causal:
        report.chunked = max(report.chunked, relative_error(_in_chunks(driver, text), expected))
    scores = oracle.scores(text)
    if scores is not None:
        report.scores = max(report.scores, relative_error(driver.scores(hidden), scores))
    report.num_tokens += len(text)


def _in_chunks(driver: ModelDriver, prompt: list[int]) -> np.ndarray:
    """Return the logits of a prompt that is computed in chunks, whose blocks are not contiguous."""
    found, start, number = [], 0, 0
    while start < len(prompt):
        stop = start + CHUNKS[number % len(CHUNKS)]
        found.append(driver.forward("chunked", prompt[start:stop]))
        driver.forward("beside", prompt[start:stop][:1])
        start, number = stop, number + 1
    driver.finish("chunked")
    driver.finish("beside")
    return np.concatenate(found)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest expected value; infinity where shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        error = np.abs(actual.astype(np.float64) - expected).max() / max(float(np.abs(expected).max()), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


def layer_errors(ours: list[LayerTrace], theirs: list[LayerTrace]) -> list[LayerErrors]:
    """Compare layer by layer."""
    found = []
    for layer, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        our_scores, their_scores = scores_of(our), scores_of(their)
        width = their.values.shape[2]  # a cache may pad values
        found.append(
            LayerErrors(
                layer,
                relative_error(our.values[..., :width], their.values),
                relative_error(our_scores, their_scores),
                relative_error(our_scores[:, :1, :1], their_scores[:, :1, :1]),
                relative_error(our.output[..., :width], their.output),
            )
        )
    return found


def scores_of(trace: LayerTrace) -> np.ndarray:
    """Return queries times keys of each head, zero above the diagonal, [Hq, T, T]."""
    keys = np.repeat(trace.keys, trace.queries.shape[1] // trace.keys.shape[1], axis=1)
    return np.tril(np.einsum("qhd,khd->hqk", trace.queries, keys))


def first_difference(errors: list[LayerErrors], tolerance: float) -> str | None:
    """Describe which layer differs first and in what; None if none does."""
    for at in errors:
        if at.worst() <= tolerance:
            continue
        if at.values > tolerance and at.scores > tolerance:
            return f"layer {at.layer}: queries, keys and values differ: {_before(at.layer)}"
        if at.values > tolerance:
            return f"layer {at.layer}: values differ, scores agree: the value projection"
        if at.scores > tolerance and at.first_scores <= tolerance:
            return (
                f"layer {at.layer}: scores differ from the second token on, values agree: rotary positions "
                "(rope_theta, rope_scaling, how much of a head is rotated)"
            )
        if at.scores > tolerance:
            return (
                f"layer {at.layer}: scores differ, values agree: query and key projections, their norms, or the scale"
            )
        return f"layer {at.layer}: scores and values agree, attention's output differs: window, mask, softcap or sinks"
    return None


def _before(layer: int) -> str:
    if layer == 0:
        return "the embedding, the first norm, or the projections"
    return f"what layer {layer - 1} adds after its attention (output projection, feed-forward layer), or norms"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "agrees": report.agrees,
        "oracle": report.oracle,
        "dtype": report.dtype,
        "tolerance": report.tolerance,
        "weights_read_by_oracle": report.reads_files,
        "compared": "hidden states" if report.compares_hidden else "logits",
        "logits_error": report.logits,
        "scores_error": report.scores,
        "pieces_error": report.chunked,
        "greedy": {
            "same": report.greedy_matches,
            "tokens": report.greedy_tokens,
            "largest_lead": report.largest_margin,
        },
        "first_difference": report.first,
        "layers": [
            {"layer": at.layer, "values": at.values, "scores": at.scores, "output": at.output} for at in report.layers
        ],
    }
