"""The memory plan: what a model would take, and how much would fit, before anything is loaded.

`make_plan` reads config.json and the headers of weight files and combines the sizes of weights and steps
(`worker/footprint.py`), the memory of the machine, and the size of the KV cache that follows; docs/memory.md explains
the arithmetic. The engine itself starts with `check_before_loading`, so that a model that cannot fit is refused before
it is read.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quire.checkpoint.gguf.source import is_gguf
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.open import has_weights
from quire.config import EngineConfig
from quire.engine.advice import command_line, size_text
from quire.engine.kv_cache_size import (
    HOST_DEVICES,
    DoesNotFitError,
    KVCacheSize,
    ReservedBytes,
    block_budget,
    blocks_needed,
    device_bytes,
    fit_kv_cache,
    reserved_bytes,
)
from quire.engine.layerwise import layer_split
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.kernels.gpu.probe import gpu_memory
from quire.kernels.memory import DeviceMemory, available_memory
from quire.step import KVCacheSpec
from quire.worker.footprint import Footprint, StepBytes, graph_bytes

RUNTIME_BYTES = 155 * 2**20  # Python, numpy, Numba and its compiled kernels; measured, see benchmarks/plan_accuracy.py
GPU_RUNTIME_BYTES = 600 * 2**20  # of a GPU: CUDA's context, cuBLAS, kernels; what is measured later counts in its place
LENGTHS = (1024, 4096)  # tokens of the requests that are counted, beside the longest
SMALLER_WEIGHTS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16"},
    {"quantization": "int8"},
    {"quantization": "int4"},
)
SMALLER_GPU_WEIGHTS: tuple[dict[str, Any], ...] = ({"dtype": "bfloat16"}, {"quantization": "fp8"})
SMALL_STEPS = {"max_num_batched_tokens": 256, "max_num_seqs": 16}


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group of layers that share block tables: how many, their window [tokens], and bytes of a token in them."""

    num_layers: int
    sliding_window: int | None
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of `length` tokens, prompt and output together, have room at once; `blocks` each takes."""

    length: int
    blocks: int
    fit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that `quire plan` shows. Sizes in bytes, lengths in tokens.

    Attributes:
        on_disk: weights by part as the files hold them; None where the folder has none. in_memory: as packed.
        quantization: of the weights in memory. uncounted: what config.json says of weights that are not there.
        tables: what is computed from the context length. runtime: the interpreter and its libraries, on a GPU those
            that take its memory. graphs: what CUDA graphs may take.
        block_bytes: of all layers a block serves. token_bytes: one more token of one sequence, in all layers.
        state_bytes: of one sequence whatever its length, in layers that keep a state.
        step: beside weights and KV cache. available: free memory of the machine now.
        budget: of the blocks. fit: what that is enough for; None where it is not.
        wanted_len: the context requested for, or the model's. concurrency: of several lengths.
        limit: what keeps the numbers from being larger. problem: why it does not fit, with a way out.
        layerwise_device_bytes, layerwise_host_bytes: of a layerwise block, where `fit` has some.
        cache: bytes of all blocks that `fit` has, in the memory that is planned.
        peak: most bytes of the engine's process with every block in use.
    """

    model: str
    architecture: str
    dtype: str
    quantization: str | None
    uncounted: str | None
    kv_dtype: str
    has_weights: bool
    on_disk: dict[str, int] | None
    in_memory: dict[str, int]
    tables: int
    runtime: int
    loading: int
    block_size: int
    block_bytes: int
    token_bytes: int
    state_bytes: int
    groups: list[GroupPlan]
    step: StepBytes
    available: int
    budget: int
    fit: KVCacheSize | None
    wanted_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    concurrency: list[Concurrency] = field(default_factory=list)
    limit: str = ""
    problem: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    graphs: int = 0
    layerwise_device_bytes: int = 0
    layerwise_host_bytes: int = 0
    cache: int = 0

    @property
    def weights(self) -> int:
        """Bytes of the weights in memory."""
        return sum(self.in_memory.values())

    @property
    def peak(self) -> int:
        """Most bytes of the engine's process: while loading, or with every block written and the largest step.

        Of one that runs on a GPU, those on the GPU.
        """
        running = self.weights + self.tables + self.step.total + self.graphs + self.cache
        return self.runtime + max(running, self.loading + self.tables)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        step = {**dataclasses.asdict(self.step), "total": self.step.total}
        found = {**dataclasses.asdict(self), "step": step, "weights": self.weights, "peak": self.peak}
        # Keys of the JSON that are older than the names in the code.
        found["thin_device_bytes"] = found.pop("layerwise_device_bytes")
        found["thin_host_bytes"] = found.pop("layerwise_host_bytes")
        if found["fit"] is not None:
            found["fit"]["num_thin_blocks"] = found["fit"].pop("num_layerwise_blocks")
        return found


def make_plan(
    requested: EngineConfig, info: ModelInfo, available: int | None = None, lengths: tuple[int, ...] = ()
) -> Plan:
    """Return the plan of these options.

    Args:
        requested: options as the user gave them. info: the model's config.json.
        available: bytes to plan for; what the machine, or its GPU, has free now if None.
        lengths: of requests to count, in place of the usual ones [tokens].

    Raises:
        ModelError: weight files are there and broken. ConfigError: options that the model cannot have.
    """
    candidate = Candidate(requested, info, memory=None if available is None else DeviceMemory(available))
    config, footprint, memory = candidate.config, candidate.footprint, candidate.memory
    fitted, problem = None, None
    try:
        fitted = candidate.check()
    except ConfigError as error:
        problem = error.message
    room, reserved = candidate.room()
    final = config if fitted is None else config.replace(max_model_len=fitted.max_model_len)
    step = footprint.step(final)
    stored = "gguf" if is_gguf(info.path) else None if info.stored_format is None else info.stored_format.name
    spec, size = footprint.spec, config.cache.block_size
    token_bytes = [layer.block_bytes(1) for layer in spec.layers]
    split = layer_split(config, spec) if fitted is not None and fitted.num_layerwise_blocks else None
    return Plan(
        model=config.model.model,
        architecture=info.architecture,
        dtype=config.model.dtype,
        quantization=config.model.quantization or (None if footprint.on_disk is None else stored),
        uncounted=stored if footprint.on_disk is None else None,
        kv_dtype=config.cache.kv_cache_dtype,
        has_weights=has_weights(info, config.model.load_format),
        on_disk=None if footprint.on_disk is None else dict(footprint.on_disk),
        in_memory=dict(footprint.in_memory),
        tables=footprint.tables(config.max_model_len),
        runtime=candidate.runtime,
        loading=footprint.loading,
        block_size=size,
        block_bytes=candidate.block_bytes,
        token_bytes=sum(token_bytes),
        state_bytes=spec.state_bytes,
        groups=[
            GroupPlan(len(group.layers), group.sliding_window, sum(token_bytes[index] for index in group.layers))
            for group in spec.groups(config.max_model_len)
        ],
        step=step,
        available=memory.free,
        budget=block_budget(config, room, reserved(config)),
        fit=fitted,
        wanted_len=config.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        concurrency=[] if fitted is None else _concurrency(config, spec, fitted, lengths),
        limit="" if fitted is None else _limit(config, spec, fitted),
        problem=problem,
        settings=_settings(final, fitted),
        graphs=0 if candidate.on_host else graph_bytes(final, step.total, memory.total),
        layerwise_device_bytes=0 if split is None else split.layerwise_bytes,
        layerwise_host_bytes=0 if split is None else split.host_bytes,
        cache=0 if fitted is None else device_bytes(config, spec, fitted),
    )


def check_before_loading(requested: EngineConfig, info: ModelInfo) -> ReservedBytes:
    """Return what steps will take.

    Raises:
        ConfigError: the weights, or what was requested beside them, cannot fit into the memory that is free now.
    """
    candidate = Candidate(requested, info)
    candidate.check()
    return candidate.footprint.step_bytes


class Candidate:
    """A model with some options, as the user gave them (`requested`) and resolved (`config`), and the memory for it.

    Args:
        memory: what the device has now if None. footprint: if it is known already.
    """

    def __init__(
        self,
        requested: EngineConfig,
        info: ModelInfo,
        footprint: Footprint | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.requested, self.info, self.config = requested, info, resolve_config(requested, info)
        self._footprint = footprint
        self.on_host = self.config.device.device in HOST_DEVICES
        self.memory = memory or (DeviceMemory(available_memory()) if self.on_host else gpu_memory())
        self.runtime = RUNTIME_BYTES if self.on_host else GPU_RUNTIME_BYTES
        self.form = self.config.model.quantization or self.config.model.dtype

    @cached_property
    def footprint(self) -> Footprint:
        """What the model takes."""
        return self._footprint or Footprint(self.config, self.info)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache."""
        return self.footprint.spec.block_bytes(self.config.cache.block_size, self.config.max_model_len)

    @property
    def loaded(self) -> int:
        """Bytes of the engine once the model is loaded, before there is a KV cache or any step."""
        return self.runtime + self.footprint.weights + self.footprint.tables(self.config.max_model_len)

    def step_bytes(self, config: EngineConfig) -> int:
        """Return the bytes that steps of a config take, CUDA graphs included."""
        step = self.footprint.step_bytes(config)
        return step if self.on_host else step + graph_bytes(config, step, self.memory.total)

    def room(self) -> tuple[int, ReservedBytes]:
        """Return the bytes of which blocks get a share, and what of them is not for blocks, for `fit_kv_cache`.

        On a host it is a share of what will be free once the model is loaded, on a GPU of all that it has.
        """
        memory = self.memory
        if self.on_host:
            return max(0, memory.total - self.loaded), self.step_bytes
        used = DeviceMemory(memory.total, memory.used + self.loaded)
        return memory.total, reserved_bytes(used, self.step_bytes, self.config)

    def fit(self) -> KVCacheSize:
        """Return what fits beside the weights. Raises `ConfigError`."""
        return fit_kv_cache(self.requested, self.config, self.footprint.spec, *self.room(), quiet=True)

    def check(self) -> KVCacheSize:
        """Return what fits beside the weights, or raise `ConfigError` with a command that works."""
        needed, available = self.footprint.weights + self.runtime, self.memory.free
        if needed <= available:
            try:
                return self.fit()
            except DoesNotFitError as error:
                problem, option = error.text, error.param
        else:
            own = "Python's own" if self.on_host else "CUDA's own"
            problem, option = (
                f"model: the weights need {size_text(needed)} in {self.form}, {own} memory included, "
                f"{size_text(available)} are available",
                "model",
            )
        found, smallest = self._smaller_weights()
        size = size_text(smallest + self.runtime)
        if found is None:
            raise ConfigError(
                f"{problem}; even the smallest form of the weights, with {size}, leaves too little, so that only a "
                f"smaller model works: {command_line(EngineConfig(), {})}",
                param=option,
            )
        raise ConfigError(
            f"{problem}; the weights would take {size} in {found.get('quantization') or found['dtype']}; this works: "
            f"{command_line(self.requested, found)}",
            param=option,
        )

    def _smaller_weights(self) -> tuple[dict[str, Any] | None, int]:
        """Return options with which weights fit, if there are any, and the bytes of the smallest weights tried."""
        limits, smallest = self.requested.scheduler, self.footprint.weights
        steps = {name: min(getattr(limits, name), value) for name, value in SMALL_STEPS.items()}
        for changes in SMALLER_WEIGHTS if self.on_host else SMALLER_GPU_WEIGHTS:
            smaller = Candidate(self.requested.replace(**changes), self.info, memory=self.memory)
            if smaller.form == self.form or smaller.footprint.weights >= smallest:
                continue
            smallest = smaller.footprint.weights
            for found in (changes, changes | steps):
                requested = self.requested.replace(**found)
                try:
                    Candidate(requested, self.info, smaller.footprint, self.memory).fit()
                except ConfigError:
                    continue
                return found, smallest
        return None, smallest


def _concurrency(
    config: EngineConfig, spec: KVCacheSpec, fitted: KVCacheSize, lengths: tuple[int, ...]
) -> list[Concurrency]:
    usual = (*(length for length in LENGTHS if length < fitted.max_model_len), fitted.max_model_len)
    found = []
    for length in lengths or usual:
        blocks = blocks_needed(config, spec, length)
        room = fitted.num_blocks // blocks if length <= fitted.max_model_len else 0
        found.append(Concurrency(length, blocks, min(room, config.scheduler.max_num_seqs)))
    return found


def _limit(config: EngineConfig, spec: KVCacheSpec, fitted: KVCacheSize) -> str:
    """Return what keeps more from fitting."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    if cache.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    limits = config.scheduler
    if spec.one_step and fitted.num_blocks >= limits.max_num_batched_tokens // cache.block_size + limits.max_num_seqs:
        return "max_num_batched_tokens"
    most = limits.max_num_seqs * blocks_needed(config, spec, config.max_model_len)
    return "max_num_seqs x max_model_len" if fitted.num_blocks >= most else "memory"


def _settings(config: EngineConfig, fitted: KVCacheSize | None) -> dict[str, Any]:
    """Return what the server would choose by itself."""
    return {
        "device": config.device.device,
        "dtype": config.model.dtype,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "block_size": config.cache.block_size,
        "max_model_len": None if fitted is None else fitted.max_model_len,
        "num_blocks": None if fitted is None else fitted.num_blocks,
        "num_thin_blocks": None if fitted is None else fitted.num_layerwise_blocks,
        "num_host_blocks": None if fitted is None else fitted.num_host_blocks,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
    }
