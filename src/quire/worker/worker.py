"""One worker: one device, one rank. Loads the model, owns the KV cache, executes steps."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from quire.checkpoint.folder import resolve_model
from quire.checkpoint.hf_config import ModelInfo
from quire.chrome_trace import ChromeTrace
from quire.config import DeviceConfig, EngineConfig
from quire.errors import ConfigError, echo
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.kernels.memory import DeviceMemory, as_memory_error
from quire.layers.lora import LoRASlots
from quire.lora.store import AdapterStore
from quire.models.interface import Model
from quire.models.loader import load_model
from quire.models.pooling import PoolingModel
from quire.sampling.grammars import GrammarStore
from quire.sampling.processors import load_processors
from quire.step import KVCacheGroup, KVCacheSpec, PendingOutput, SchedulerOutput, StoredBlocks
from quire.tokenizer.tokenizer import Tokenizer
from quire.worker.disk_store import DiskStore, StoreGeometry, header_nbytes
from quire.worker.fingerprint import fingerprint
from quire.worker.footprint import graph_bytes
from quire.worker.graphs import new_slots
from quire.worker.model_runner import ModelRunner, new_cache
from quire.worker.warm_up import PROFILE_BLOCKS, largest_step, warm_up

logger = logging.getLogger(__name__)

DISK_FOLDER = Path("~/.cache/quire/kv")  # of the disk tier, where no other is named


def new_backend(config: EngineConfig) -> Backend:
    """Return the backend of a single rank. Raises ConfigError for what the device cannot do."""
    model, device = config.model, config.device
    if device.device != "cuda":
        _check_gpu_options(device)
    return create_backend(
        device.device,
        model.dtype,
        config.cache.kv_cache_dtype,
        device.num_threads,
        model.quantization,
        device.simd_level,
        batch_invariant=device.batch_invariant,
        enforce_eager=device.enforce_eager,
        max_cudagraph_capture_size=device.max_cudagraph_capture_size,
        attention_backend=device.attention_backend,
    )


def _check_gpu_options(device: DeviceConfig) -> None:
    """Raise `ConfigError` for an option that would change nothing, because only a GPU has what it is about."""
    defaults = DeviceConfig()
    for name, what in (
        ("attention_backend", "choice of attention kernels"),
        ("max_cudagraph_capture_size", "graphs"),
    ):
        value = getattr(device, name)
        if value != getattr(defaults, name):
            raise ConfigError(f"{name}: {value!r} is not allowed; device {device.device!r} has no {what}", param=name)
    if device.enforce_eager:
        logger.info("enforce_eager changes nothing: device %s has no CUDA graphs", device.device)


class Worker:
    """Loads on construction; `allocate` must be called before the first step.

    Args:
        config: with device, dtype and max_model_len resolved (no "auto" left).
        info: the model's config.json, parsed.
        new_backend: returns the rank's backend, again after a `sleep`; that of one of several ranks has collectives.

    Raises:
        ModelError: the checkpoint is broken. ConfigError: the device does not support an option.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        new_backend: Callable[[EngineConfig], Backend] = new_backend,
    ) -> None:
        self.config, self._model_len = config, config.max_model_len
        self._new_backend = new_backend
        self._processors = load_processors(config.model.logits_processors)
        self.backend = new_backend(config)
        if not self.backend.compiled_before():
            # A warning, so that it is seen by default: the wait would look like a hang.
            logger.warning("compiling kernels; this takes up to a minute and happens on the first start only")
        self._info = info
        self.adapters: AdapterStore | None = None
        self.model: Model | None = self._load()
        self._spec = self.model.kv_cache_spec()
        self._store: DiskStore | None = None  # the runner's, which closes it
        self.runner: ModelRunner | None = None
        self.grammars = GrammarStore(
            self._load_tokenizer, info.vocab_size + config.lora.lora_extra_vocab_size, info.eos_token_ids
        )

    def _load(self) -> Model:
        started, options = time.perf_counter(), self.config.model
        slots = new_slots(self.config, self._info, self.backend) if self.config.lora.enable_lora else None
        model = load_model(
            self._info,
            self.backend,
            max_model_len=self._model_len,
            load_format=options.load_format,
            strategy=options.safetensors_load_strategy,
            allow_nonfinite=options.allow_nonfinite,
            seed=options.seed,
            lora=slots,
            latent_cache=self.config.cache.latent_cache,
        )
        if slots is not None:
            _check_adaptable(self._info, model, slots)
            self.adapters = AdapterStore(slots, self.config.lora.max_cpu_loras or slots.num_slots)
        logger.info("loaded %s in %.2f s", self._info.path.name, time.perf_counter() - started)
        return model

    def _load_tokenizer(self) -> Tokenizer:
        model = self.config.model
        if model.tokenizer is None:
            return Tokenizer.from_folder(self._info.path)
        return Tokenizer.from_folder(resolve_model(model.tokenizer, download_dir=model.download_dir))

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache."""
        return self._spec

    def device_memory(self) -> DeviceMemory:
        """See `Executor`: a GPU's is measured while the largest step runs, with a cache of a block and no graphs yet.

        Raises:
            MemoryError: such a step does not fit beside the weights.
        """
        measured = self.backend.measure(self._run_largest_step)
        if measured is None:
            return DeviceMemory(self.backend.available_memory())
        assert measured.step is not None
        graphs = graph_bytes(self.config, measured.step, measured.total)
        logger.info("measured: %s, of them %d bytes for graphs", measured, graphs)
        return dataclasses.replace(measured, used=measured.used + graphs)

    def _run_largest_step(self) -> None:
        limits = self.config.scheduler
        with as_memory_error():
            cache = self.config.cache
            swaps = cache.swap_space != 0 and not cache.kv_resident_layers
            runner = self._new_runner(PROFILE_BLOCKS, self._model_len, 1 if swaps else 0)
            try:
                runner.graphs.compile_ahead()  # side by side, before this step has to wait for one after the other
                runner.submit(largest_step(runner, limits.max_num_seqs, limits.max_num_batched_tokens)).result()
            finally:
                runner.close()

    def allocate(
        self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
    ) -> None:
        """Allocate KV cache and persistent batch, open the disk tier, and compile kernels.

        The last `num_layerwise_blocks` blocks are layerwise, see `kernels/backend.py`.
        Once, and after each `sleep`; one of level 2 has the weights read again.

        Raises:
            MemoryError: the KV cache does not fit.
            ConfigError: the host blocks do not, or another engine uses the disk tier. ModelError: the weights do not.
        """
        if self.model is None:
            self.model = self._load()
        with ExitStack() as undo:
            self._store = self._open_store()
            if self._store is not None:
                undo.callback(self._store.close)
            with as_memory_error():
                self.runner = self._new_runner(
                    num_blocks, max_model_len, num_host_blocks, num_layerwise_blocks, self._store
                )
            undo.callback(self.runner.close)
            started = time.perf_counter()
            warm_up(self.runner)
            if self.adapters is not None:
                self.adapters.slots.warm_up()
            undo.pop_all()
        logger.info("kernels ready in %.2f s", time.perf_counter() - started)

    def _new_runner(
        self,
        num_blocks: int,
        max_model_len: int,
        num_host_blocks: int,
        num_layerwise_blocks: int = 0,
        store: DiskStore | None = None,
    ) -> ModelRunner:
        assert self.model is not None
        return ModelRunner(
            self.model,
            self.backend,
            num_blocks=num_blocks,
            block_size=self.config.cache.block_size,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
            max_model_len=max_model_len,
            groups=self._groups(),
            num_host_blocks=num_host_blocks,
            num_layerwise_blocks=num_layerwise_blocks,
            num_resident_layers=self.config.cache.kv_resident_layers,
            store=store,
            grammars=self.grammars,
            jump_forward=self.config.scheduler.jump_forward,
            processors=self._processors,
            adapters=self.adapters,
        )

    def has_adapters(self) -> bool:
        """Whether LoRA is on, and the model loaded."""
        return self.adapters is not None

    def stored_blocks(self) -> StoredBlocks:
        """See `Executor`; to be called before the first step."""
        store = self._store
        return StoredBlocks() if store is None else StoredBlocks(store.num_slots, store.hash_key, store.scan())

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step; see `Executor`."""
        assert self.runner is not None, "allocate() comes before submit()"
        return self.runner.submit(plan)

    def idle(self) -> bool:
        return self.runner is not None and self.runner.graphs.capture_next()

    def start_profile(self, trace: ChromeTrace) -> None:
        """See `Executor`."""
        self.backend.start_profile(trace)

    def stop_profile(self, path: Path) -> list[Path]:
        """See `Executor`."""
        return self.backend.stop_profile(path)

    def sleep(self, level: int) -> int:
        """Free the KV cache and all buffers of steps, at level 2 also the weights; return how many bytes."""
        before = self.backend.used_memory()
        if self.runner is not None:
            self.runner.close()
        self.runner = self._store = None
        if level > 1:
            self.model = None
            self._close_adapters()
            self.backend = self._new_backend(self.config)  # the old one may cache the memory of weights
        self.backend.release_memory()
        return max(0, before - self.backend.used_memory())

    def close(self) -> None:
        """Free model and KV cache even if this object stays referenced."""
        self.grammars.close()
        self._close_adapters()
        if self.runner is not None:
            self.runner.close()
        self.runner = self.model = None
        if self.backend.name == "cuda":  # PyTorch caches memory that others need
            self.backend.release_memory()

    def _close_adapters(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        self.adapters = None

    def _groups(self) -> list[KVCacheGroup]:
        """Return the groups of layers, by the context length before it was fit to memory, as in the engine."""
        return self._spec.groups(self._model_len)

    def _open_store(self) -> DiskStore | None:
        """Open the disk tier; None if there is to be none, or its files cannot be used, which is warned of.

        Raises `ConfigError` if kv_disk_dir is no folder, or one that this user may not use.
        """
        cache, model = self.config.cache, self.config.model
        if not cache.kv_disk_space:
            return None
        folder = (DISK_FOLDER if cache.kv_disk_dir is None else Path(cache.kv_disk_dir)).expanduser()
        if cache.kv_disk_dir is not None:
            _check_usable(folder)
        identity = fingerprint(
            self._info,
            self.backend,
            self._spec,
            load_format=model.load_format,
            seed=model.seed,
            block_size=cache.block_size,
            max_model_len=self._model_len,
            digest_cache=folder / "weights.json",
        )
        largest = max(self._groups(), key=lambda group: len(group.layers))
        layers = [self._spec.layers[index] for index in largest.layers]
        samples = [new_cache(self.backend, layer, 1, cache.block_size) for layer in layers]
        geometry = StoreGeometry(
            fingerprint=identity,
            block_nbytes=sum(self.backend.block_nbytes(sample) for sample in samples),
            block_size=cache.block_size,
            header_nbytes=header_nbytes(cache.block_size),
        )
        try:
            store = DiskStore(folder, geometry, cache.kv_disk_space)
        except OSError as error:  # a cache that is damaged or full is no reason not to serve
            reason = error.strerror or error
            logger.warning("no prefixes are kept on disk: kv_disk_dir %s cannot be used (%s)", folder, reason)
            return None
        logger.info("disk tier: %d blocks of %d bytes in %s", store.num_slots, store.block_nbytes, store.folder)
        return store


def _check_usable(folder: Path) -> None:
    """Raise `ConfigError` if the folder of the disk tier is the wrong one. A disk that is full or broken is not."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except (FileExistsError, NotADirectoryError, PermissionError):
        usable = False
    except OSError:
        return
    if not usable:
        raise ConfigError(
            f"kv_disk_dir is {echo(str(folder))} (expected a folder that this user may write to)", param="kv_disk_dir"
        )


def _check_adaptable(info: ModelInfo, model: Model, slots: LoRASlots) -> None:
    if isinstance(model, PoolingModel):
        raise ConfigError(
            f"enable_lora is for models that generate text, not for {info.architecture}", param="enable_lora"
        )
    if not slots.targets:
        raise ConfigError(
            f"enable_lora: {info.architecture} has no layers that adapters could change here", param="enable_lora"
        )
