"""One worker: one device, one rank. Loads the model, owns the KV cache, executes steps."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path

from quire.checkpoint.folder import resolve_model
from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from quire.sampling.grammars import GrammarStore
from quire.sampling.processors import load_processors
from quire.step import KVCacheGroup, KVCacheSpec, ModelOutput, SchedulerOutput
from quire.tokenizer.tokenizer import Tokenizer
from quire.worker.disk_store import DiskStore, StoreGeometry, header_nbytes
from quire.worker.fingerprint import fingerprint
from quire.worker.model_runner import ModelRunner
from quire.worker.warm_up import warm_up

logger = logging.getLogger(__name__)

DISK_FOLDER = Path("~/.cache/quire/kv")  # of the disk tier, where no other is named


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
        self._processors = load_processors(config.model.logits_processors)
        self.backend = create_backend(
            config.device.device,
            config.model.dtype,
            config.cache.kv_cache_dtype,
            config.device.num_threads,
            config.model.quantization,
            config.device.simd_level,
            batch_invariant=config.device.batch_invariant,
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
        self._info = info
        self._store: DiskStore | None = None  # the runner's, which closes it
        self.runner: ModelRunner | None = None
        self.grammars = GrammarStore(self._load_tokenizer, info.vocab_size, info.eos_token_ids)

    def _load_tokenizer(self) -> Tokenizer:
        model = self.config.model
        if model.tokenizer is None:
            return Tokenizer.from_folder(self._info.path)
        return Tokenizer.from_folder(resolve_model(model.tokenizer, download_dir=model.download_dir))

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache."""
        return self.model.kv_cache_spec()

    def available_memory(self) -> int:
        """Return the bytes that are free for the KV cache, weights being loaded."""
        return self.backend.available_memory()

    def allocate(self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0) -> None:
        """Allocate KV cache and persistent batch, once, open the disk tier, compile what the first step would have to.

        Raises:
            MemoryError: the KV cache does not fit.
            ConfigError: the host blocks do not, or the disk tier cannot be used.
        """
        with ExitStack() as undo:
            self._store = self._open_store(max_model_len)
            if self._store is not None:
                undo.callback(self._store.close)
            self.runner = ModelRunner(
                self.model,
                self.backend,
                num_blocks=num_blocks,
                block_size=self.config.cache.block_size,
                max_num_seqs=self.config.scheduler.max_num_seqs,
                max_num_batched_tokens=self.config.scheduler.max_num_batched_tokens,
                max_model_len=max_model_len,
                groups=self._groups(),
                num_host_blocks=num_host_blocks,
                store=self._store,
                grammars=self.grammars,
                jump_forward=self.config.scheduler.jump_forward,
                processors=self._processors,
            )
            undo.callback(self.runner.close)
            started = time.perf_counter()
            warm_up(self.runner)
            undo.pop_all()
        logger.info("kernels ready in %.2f s", time.perf_counter() - started)

    def num_disk_blocks(self) -> int:
        """Return how many slots the disk tier has; 0 without one."""
        return 0 if self._store is None else self._store.capacity

    def stored_blocks(self) -> list[tuple[int, bytes]]:
        """Return (slot, header) of what the disk tier holds; to be called before the first step."""
        return [] if self._store is None else self._store.scan()

    def hash_key(self) -> bytes | None:
        """Return the key under which the disk tier's blocks are named; None without one."""
        return None if self._store is None else self._store.hash_key

    def prepare_grammar(self, grammar: str) -> None:
        """Begin to compile a grammar in a thread."""
        self.grammars.request(grammar)

    def prepared_grammars(self, wait: float = 0.0) -> dict[str, str | None]:
        """Return the grammars that became ready; see `Executor`."""
        return self.grammars.poll(wait)

    def release_grammar(self, grammar: str) -> None:
        """Let go of a grammar that a request used."""
        self.grammars.release(grammar)

    def end_ids(self) -> list[int]:
        """Return the tokens that end a text which has a grammar."""
        return self.grammars.end_ids

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step."""
        assert self.runner is not None, "allocate() comes before execute()"
        return self.runner.execute(step)

    def close(self) -> None:
        """Drop model and cache, so that their memory can be reused even if somebody keeps this object."""
        self.grammars.close()
        if self.runner is not None:
            self.runner.close()
        self.runner = None
        del self.model

    def _groups(self) -> list[KVCacheGroup]:
        """Return the groups of layers, as the engine counted them: by the context before memory was looked at."""
        assert self.config.model.max_model_len is not None, "settled by the engine"
        return self.kv_cache_spec().groups(self.config.model.max_model_len)

    def _open_store(self, max_model_len: int) -> DiskStore | None:
        """Open the disk tier, if the config asks for one."""
        cache, model = self.config.cache, self.config.model
        if not cache.kv_disk_space:
            return None
        assert model.max_model_len is not None, "settled by the engine"
        folder = DISK_FOLDER if cache.kv_disk_dir is None else Path(cache.kv_disk_dir)
        folder = folder.expanduser()
        spec = self.kv_cache_spec()
        identity = fingerprint(
            self._info,
            self.backend,
            spec,
            load_format=model.load_format,
            seed=model.seed,
            block_size=cache.block_size,
            model_len=model.max_model_len,
            max_model_len=model.max_model_len,
            notes=folder / "weights.json",
        )
        largest = max(self._groups(), key=lambda group: len(group.layers))
        layers = [spec.layers[index] for index in largest.layers]
        samples = [self.backend.new_kv_cache(1, cache.block_size, at.num_kv_heads, at.head_size) for at in layers]
        geometry = StoreGeometry(
            fingerprint=identity,
            block_nbytes=sum(self.backend.block_nbytes(sample) for sample in samples),
            block_size=cache.block_size,
            header_nbytes=header_nbytes(cache.block_size),
        )
        store = DiskStore(folder, geometry, cache.kv_disk_space)
        logger.info("disk tier: %d blocks of %d bytes in %s", store.capacity, store.block_nbytes, store.folder)
        return store
