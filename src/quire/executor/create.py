"""Makes the executor that a config asks for. Imports the data plane, and with it numpy or torch, only when called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.checkpoint.hf_config import ModelInfo
    from quire.config import EngineConfig
    from quire.executor.base import Executor


def create_executor(config: EngineConfig, info: ModelInfo) -> Executor:
    """Return an executor with the model loaded; `config` has no "auto" left.

    Raises:
        ModelError: the checkpoint is broken. ConfigError: the device cannot do what is asked.
    """
    from quire.worker.worker import Worker  # lazy: the engine's own import stays free of kernels

    return Worker(config, info)
