"""The learning-rate schedule and the row length per step: plain functions of the step number."""

from __future__ import annotations

import math

from quire.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of step `step` (counted from 0): linear warm-up, then half a cosine down to min_lr_ratio of the peak.

    Loshchilov and Hutter 2017, without restarts.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def row_length(config: TrainConfig, step: int) -> int:
    """Tokens per row at `step`: context_length first, max_position in the last `long_fraction` of the steps."""
    is_long = step >= round(config.steps * (1 - config.long_fraction))
    return config.max_position if is_long else config.context_length
