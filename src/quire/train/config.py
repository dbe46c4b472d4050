"""Every option of `quire train`, once, with its help text, limits and the named presets.

No PyTorch here: the command line builds its options from `TrainConfig` before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, echo
from quire.options import option

MUST_BE_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "max_position",
    "context_length",
    "batch_tokens",
    "steps",
    "threads",
    "eval_every",
    "save_every",
    "learning_rate",
    "grad_clip",
)


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run; lengths are in tokens."""

    out: str = option("quire-model", "folder that receives the checkpoint, the loss curve and the figures")
    data: str | None = option(None, "text file to train on; without it the built-in chat corpus is used")
    shakespeare: str | None = option(None, "with the built-in corpus: text file mixed in as plain prose or plays")
    chat_fraction: float = option(0.6, "share of chat rows where --shakespeare is mixed with the built-in corpus")
    tokenizer: str = option("bpe", "kind of tokenizer", choices=("bpe", "char"))
    vocab_size: int = option(1024, "largest number of tokens of a bpe tokenizer")
    hidden_size: int = option(256, "width of the model")
    intermediate_size: int = option(704, "width of the feed-forward layers")
    num_layers: int = option(5, "number of decoder layers")
    num_heads: int = option(8, "number of attention heads")
    num_kv_heads: int = option(4, "number of key/value heads; must divide --num-heads")
    max_position: int = option(1024, "longest context the model is made for")
    context_length: int = option(256, "row length for most of the training")
    long_fraction: float = option(0.15, "last share of the steps that trains with rows of --max-position tokens")
    batch_tokens: int = option(4096, "tokens per step; the number of rows is this divided by the row length")
    steps: int = option(2600, "number of optimizer steps")
    learning_rate: float = option(1.5e-3, "peak learning rate of AdamW")
    min_lr_ratio: float = option(0.05, "final learning rate as a share of the peak")
    warmup_steps: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.1, "weight decay of the matrices")
    grad_clip: float = option(1.0, "largest gradient norm")
    prompt_weight: float = option(0.1, "loss weight of the user's side of a chat; the assistant's side has 1")
    precision: str = option(
        "bf16", "compute precision; weights and optimizer state stay in float32", choices=("bf16", "fp32")
    )
    seed: int = option(0, "seed of the weights, the data order and the generated corpus")
    threads: int = option(2, "PyTorch threads; a run repeats bit by bit only with the same number")
    eval_every: int = option(200, "steps between measurements of the validation loss")
    save_every: int = option(100, "steps between saves of the resumable state and the checkpoint")
    resume: bool = option(False, "continue from the state saved in --out")
    stop_after: int | None = option(None, "stop after this step, leaving a state from which --resume continues")
    passage_tokens: int = option(256, "longest passage of the held-back test text")

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    def validate(self) -> None:
        """Raise ConfigError for the first option that cannot work."""
        for name in MUST_BE_POSITIVE:
            self._require(getattr(self, name) > 0, name, "must be above 0")
        for name in ("chat_fraction", "long_fraction", "min_lr_ratio", "prompt_weight"):
            self._require(0 <= getattr(self, name) <= 1, name, "must be between 0 and 1")
        self._require(self.tokenizer in ("bpe", "char"), "tokenizer", 'must be "bpe" or "char"')
        self._require(self.precision in ("bf16", "fp32"), "precision", 'must be "bf16" or "fp32"')
        self._require(self.hidden_size % self.num_heads == 0, "num_heads", "must divide hidden_size")
        self._require(self.head_dim % 2 == 0, "num_heads", "must leave an even head size (hidden_size / num_heads)")
        self._require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", "must divide num_heads")
        longest = f"max_position ({self.max_position})"
        self._require(self.context_length <= self.max_position, "context_length", f"must not exceed {longest}")
        self._require(
            self.batch_tokens >= self.max_position, "batch_tokens", f"must be at least {longest}, the longest row"
        )
        self._require(2 <= self.passage_tokens <= self.max_position, "passage_tokens", "must be 2 to max_position")
        for name in ("data", "shakespeare"):
            path = getattr(self, name)
            self._require(path is None or Path(path).is_file(), name, "must be an existing text file")
        self._require(not (self.data and self.shakespeare), "shakespeare", "cannot be combined with --data")

    def _require(self, condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{name}={echo(getattr(self, name))}: {rule}", param=name)


@dataclass(frozen=True)
class TrainResult:
    """What a finished (or stopped) run leaves behind."""

    out: Path
    step: int
    num_parameters: int
    train_loss: float
    metrics: dict[str, Any]
    """Contents of metrics.json; empty if the run was stopped before its last step."""


PRESETS: dict[str, dict[str, Any]] = {
    "demo": {"passage_tokens": 128},
    "shakespeare-char": {
        "tokenizer": "char",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "max_position": 16,
        "context_length": 16,
        "passage_tokens": 16,
        "batch_tokens": 512,
        "long_fraction": 0.0,
        "steps": 2000,
    },
}
"""Named sets of options; "demo" is the recipe of the model in the box, "shakespeare-char" a first experiment."""


def config_from_preset(name: str, **overrides: Any) -> TrainConfig:
    """Return the preset with some options replaced. Raises ConfigError for an unknown preset name."""
    if name not in PRESETS:
        raise ConfigError(f"preset={echo(name)}: must be one of {', '.join(sorted(PRESETS))}", param="preset")
    return dataclasses.replace(TrainConfig(), **{**PRESETS[name], **overrides})
