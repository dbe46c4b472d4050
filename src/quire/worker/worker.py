"""One worker: one device, one rank. Loads the model, owns the KV cache, executes steps."""

from __future__ import annotations

import logging
import time

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from quire.step import KVCacheSpec, ModelOutput, SchedulerOutput
from quire.worker.model_runner import ModelRunner
from quire.worker.warm_up import warm_up

logger = logging.getLogger(__name__)


class Worker:
    """Loads on construction; `allocate` must be called before the first step.

    Args:
        config: with device, dtype and max_model_len settled (no "auto" left).
        info: the model's config.json, parsed.

    Raises:
        ModelError: the checkpoint is broken. ConfigError: the device cannot do what is asked.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self.config = config
        self.backend = create_backend(
            config.device.device,
            config.model.dtype,
            config.cache.kv_cache_dtype,
            config.device.num_threads,
            config.model.quantization,
            config.device.simd_level,
        )
        if not self.backend.compiled_before():
            # A warning, so that it is seen by default: the wait would look like a hang.
            logger.warning("compiling kernels; this takes up to a minute and happens on the first start only")
        started = time.perf_counter()
        assert config.model.max_model_len is not None, "settled by the engine"
        self.model = load_model(
            info,
            self.backend,
            max_model_len=config.model.max_model_len,
            load_format=config.model.load_format,
            allow_nonfinite=config.model.allow_nonfinite,
            seed=config.model.seed,
        )
        logger.info("loaded %s in %.2f s", info.path.name, time.perf_counter() - started)
        self.runner: ModelRunner | None = None

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache."""
        return self.model.kv_cache_spec()

    def available_memory(self) -> int:
        """Return the bytes that are free for the KV cache, weights being loaded."""
        return self.backend.available_memory()

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache and the persistent batch, once, and compile what the first step would have to."""
        self.runner = ModelRunner(
            self.model,
            self.backend,
            num_blocks=num_blocks,
            block_size=self.config.cache.block_size,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        started = time.perf_counter()
        warm_up(self.runner)
        logger.info("kernels ready in %.2f s", time.perf_counter() - started)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step."""
        assert self.runner is not None, "allocate() comes before execute()"
        return self.runner.execute(step)

    def close(self) -> None:
        """Drop model and cache, so that their memory can be reused even if somebody keeps this object."""
        if self.runner is not None:
            self.runner.close()
        self.runner = None
        del self.model
