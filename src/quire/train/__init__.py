"""Training a small Llama from scratch: `train(TrainConfig(...))` writes a checkpoint that any engine can serve.

Needs PyTorch and Matplotlib (`pip install 'quire[train]'`). The configuration can be read without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.train.config import PRESETS, TrainConfig, TrainResult

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PRESETS", "TrainConfig", "TrainResult", "train"]


def train(config: TrainConfig, progress: Callable[[str], None] | None = None) -> TrainResult:
    """Train as configured and write the checkpoint, the loss curve and the figures to `config.out`.

    `progress` receives one line of text now and then instead of the progress bar. Raises ConfigError for
    values that cannot work, and ModuleNotFoundError if PyTorch is not installed.
    """
    from quire.train.trainer import run_training

    return run_training(config, progress)
