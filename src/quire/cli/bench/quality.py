"""`quire bench quality`: what quantizing weights, activations, keys and values costs, as perplexity on held-out text.

Every passage is scored by each variant with `prompt_logprobs`: the model predicts each of its tokens from those before.
The first variant is what the others are compared with, token by token on the same text; the error given with a
difference is its standard error over passages. The demo model comes with passages that it was not trained on.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import OFFLINE_GROUPS, LogOptions, engine_config, open_llm, options_from
from quire.cli.output import write_json
from quire.config import DEMO_MODEL, EngineConfig
from quire.errors import ConfigError
from quire.options import option
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.frontend.llm import LLM

# name -> dtype, quantization, kv_cache_dtype
VARIANTS: dict[str, tuple[str, str | None, str]] = {
    "float32": ("float32", None, "float32"),
    "bfloat16": ("bfloat16", None, "bfloat16"),
    "int8": ("bfloat16", "int8", "bfloat16"),
    "int8-weight-only": ("bfloat16", "int8-weight-only", "bfloat16"),
    "int4": ("bfloat16", "int4", "bfloat16"),
    "kv-int8": ("bfloat16", None, "int8"),
}
VARIED = ("dtype", "quantization", "kv_cache_dtype")  # no flags of this command
PASSAGES_FILE = "test_passages.jsonl.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """Quality benchmark"""

    text: str | None = option(
        None, "File with text to score, UTF-8; default: held-out passages of the demo model.", metavar="FILE"
    )
    passage_len: int = option(512, "Tokens per passage of a text file.", low=2, metavar="TOKENS")
    num_passages: int | None = option(None, "Score only this number of passages, evenly spread.", low=1)
    variant: list[str] = option(
        [], "Variant to score, " + ", ".join(VARIANTS) + "; default: all; the first is the baseline."
    )
    output_json: str | None = option(None, "File for the result.", metavar="FILE")


FLAGS = [*flags_of((QualityOptions,)), *(flag for flag in flags_of(OFFLINE_GROUPS) if flag.name not in VARIED)]


@dataclass(frozen=True, slots=True)
class Score:
    """The loss of one variant on each passage: the sum of -log p [nats], and the number of predicted tokens."""

    losses: tuple[tuple[float, int], ...]
    weight_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens that were predicted."""
        return sum(count for _, count in self.losses)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return sum(total for total, _ in self.losses) / self.num_tokens

    def difference(self, other: Score) -> tuple[float, float]:
        """Return how many nats per token this is above `other`, and the standard error of that over passages."""
        pairs = [(mine - theirs, count) for (mine, count), (theirs, _) in zip(self.losses, other.losses, strict=True)]
        mean = sum(delta for delta, _ in pairs) / self.num_tokens
        spread = sum((delta - count * mean) ** 2 for delta, count in pairs)
        return mean, math.sqrt(spread * len(pairs) / max(1, len(pairs) - 1)) / self.num_tokens


def run(values: dict[str, Any]) -> int:
    """Score every variant and print the table."""
    options: QualityOptions = options_from(QualityOptions, values)
    config = engine_config({"enable_prefix_caching": False, **values})
    names = options.variant or list(VARIANTS)
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"variant: {name!r} is not one of {', '.join(VARIANTS)}", param="variant")
    texts = read_texts(options, config.model.model)
    logs.setup(options_from(LogOptions, values).log_level)
    scores: dict[str, Score] = {}
    for name in names:
        scores[name] = score(variant_of(config, name), texts, options)
        if len(scores) == 1:
            print_head(scores[name], name)
        print_row(name, scores[name], scores[names[0]])
    if options.output_json is not None:
        write_json(options.output_json, as_json(scores, names[0]), "output_json")
    return 0


def read_texts(options: QualityOptions, model: str) -> list[str]:
    """Return the passages, or the whole text of the file as one. Raises ConfigError."""
    if options.text is not None:
        try:
            return [Path(options.text).expanduser().read_text("utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text: cannot read {options.text!r}: {error}", param="text") from None
    if model != DEMO_MODEL:
        raise ConfigError("text: a file is needed for models other than the demo's", param="text")
    from quire.demo import demo_model_path

    with gzip.open(demo_model_path() / PASSAGES_FILE, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def variant_of(config: EngineConfig, name: str) -> EngineConfig:
    """Return the config with the dtypes of a variant."""
    dtype, quantization, kv_dtype = VARIANTS[name]
    return config.replace(dtype=dtype, quantization=quantization, kv_cache_dtype=kv_dtype)


def score(config: EngineConfig, texts: Sequence[str], options: QualityOptions) -> Score:
    """Load the model as `config` says and score all passages."""
    from quire.engine.resolve import load_info
    from quire.models.loader import weight_bytes

    with open_llm(config) as llm:
        passages = cut(llm, texts, options)
        prompts = [{"prompt_token_ids": ids} for ids in passages]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        losses = []
        for ids, output in zip(passages, llm.generate(prompts, params, use_tqdm=False), strict=True):
            found = output.prompt_logprobs or []
            total = sum(entry[token].logprob for entry, token in zip(found, ids, strict=True) if entry is not None)
            losses.append((-total, len(ids) - 1))
    held = weight_bytes(load_info(config), config.model.dtype, config.model.quantization)
    return Score(tuple(losses), held)


def cut(llm: LLM, texts: Sequence[str], options: QualityOptions) -> list[list[int]]:
    """Return the token ids of the passages to score, each short enough for the model. Raises ConfigError."""
    longest = min(options.passage_len, llm.max_model_len - 1) if options.text else llm.max_model_len - 1
    tokenizer = llm.get_tokenizer()
    whole = [tokenizer.encode(text) for text in texts]
    pieces = [ids[start : start + longest] for ids in whole for start in range(0, len(ids), longest)]
    passages = [ids for ids in pieces if len(ids) > 1]  # the first token of a passage is not predicted
    if not passages:
        raise ConfigError("text: there are no two tokens in it", param="text")
    count = min(options.num_passages or len(passages), len(passages))
    return [passages[index * len(passages) // count] for index in range(count)]


def print_head(first: Score, name: str) -> None:
    """Print the title and the names of the columns."""
    print(f"Perplexity on {len(first.losses)} passages, {first.num_tokens} predicted tokens")
    print(f"  {'':<18}{'nats/token':>12}{'perplexity':>12}{'above ' + name:>24}{'weights MB':>12}")


def print_row(name: str, score: Score, first: Score) -> None:
    """Print one variant's figures."""
    delta = ""
    if score is not first:
        mean, error = score.difference(first)
        delta = f"{mean:+.5f} ± {error:.5f}"
    ppl = math.exp(min(score.loss, 700.0))
    print(f"  {name:<18}{score.loss:>12.5f}{ppl:>12.4f}{delta:>24}{score.weight_bytes / 1e6:>12.1f}", flush=True)


def as_json(scores: dict[str, Score], first: str) -> dict[str, Any]:
    """Return the result file's content."""
    result = {}
    for name, found in scores.items():
        mean, error = found.difference(scores[first])
        result[name] = {
            "nats_per_token": found.loss,
            "perplexity": math.exp(min(found.loss, 700.0)),
            "difference": mean,
            "difference_error": error,
            "weight_bytes": found.weight_bytes,
        }
    return {"compared_with": first, "num_tokens": scores[first].num_tokens, "variants": result}


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Measure what each kind of quantization costs, as perplexity on held-out text.",
    arguments=(),
)
