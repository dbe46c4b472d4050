"""Estimates a worker's memory before it takes any: from config.json, weight headers, and shapes.

The model's own constructor names the tensors, and the step's own code (`StepGraphs`, the model's `forward`) runs on
arrays without data (`kernels/meta.py`), so that the estimate cannot diverge from what happens.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.mapped import RESIDENT_BYTES
from quire.checkpoint.open import has_weights, open_weights
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import Checkpoint, DryRunWeights, MetaWeights, WeightSource
from quire.config import EngineConfig
from quire.kernels.backend import Backend, LayerCache
from quire.kernels.cpu.sizes import INSTRUCTION_BYTES, SCRATCH_BYTES
from quire.kernels.meta import (
    MetaBackend,
    MetaCache,
    Mixture,
    Processor,
    WeightKind,
    Work,
)
from quire.layers.builder import Builder
from quire.models.interface import Model
from quire.models.registry import build_model
from quire.step import KVCacheSpec
from quire.worker.graphs import MAX_GRAPHS, SequenceStates, StepGraphs, dummy_inputs, new_slots
from quire.worker.input_batch import InputBatch

PARTS = ("embeddings", "attention", "convolutions", "mlp", "experts", "norms", "head", "other")
_PATTERNS = {
    # Of generating models, and what encoders have behind their layers.
    "head": re.compile(r"(^|\.)lm_head|(^|\.)embed_out\.|^(head|classifier|score|pooler|[\w.]*\.pooler)\."),
    # With the routers; an expert that all tokens see is an ordinary feed-forward layer.
    "experts": re.compile(
        r"(^|\.)(experts|router)\.|(mlp|moe|feed_forward)\.(gate\.|(in|out)put_linear|expert_bias)|e_score_"
    ),
    "norms": re.compile(r"(?i:norm)|(^|\.)ln_"),
    "embeddings": re.compile(r"embed|(^|\.)(wte|wpe)\."),
    "attention": re.compile(r"attn|attention"),
    "convolutions": re.compile(r"(^|\.)conv\."),
    "mlp": re.compile(r"mlp|moe|ffn|fc\d|feed_forward|(^|\.)(intermediate|output)\.dense"),
}
DRAWING_SHARES = 2  # of the vocabulary's keys, for each thread, while tokens are drawn
KEY_BYTES = 8
FLOAT_BYTES = 4
DRAWING_COPIES = 2  # of all logits, in float32, while a GPU draws tokens
GRAPHS_BYTES = 512 * 2**20  # at most, of all CUDA graphs of a model, beside the arrays that they compute in
GRAPHS_PART = 32  # and no more than one part in so many of a GPU


def part_of(name: str) -> str:
    """Return which of `PARTS` a tensor belongs to, by its name."""
    return next((part for part, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def graph_bytes(config: EngineConfig, step: int, total: int) -> int:
    """Return the bytes that CUDA graphs of a config may take of a GPU of `total` bytes; 0 without any.

    They share a pool of arrays, as large as those of their largest step: its part of the `step` bytes that one of
    `max_num_batched_tokens` takes. The driver keeps the launches themselves: some MiB for each size of batch.
    """
    limits = config.scheduler
    if config.device.enforce_eager:
        return 0
    tokens = min(config.device.max_cudagraph_capture_size, limits.max_num_batched_tokens)
    return step * tokens // limits.max_num_batched_tokens + min(GRAPHS_BYTES, total // GRAPHS_PART)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What steps take beside weights and KV cache.

    Attributes:
        activations: the arena of programs: hidden states, logits, and all between.
        inputs: tokens, block tables and options of the sequences.
        sampling: keys of the tokens that are drawn among. programs: recorded instructions. threads: their own memory.
        states: of all sequences that may run, in layers that keep one.
    """

    activations: int
    inputs: int
    sampling: int
    programs: int
    threads: int
    states: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.activations + self.inputs + self.sampling + self.programs + self.threads + self.states


@dataclass(frozen=True, slots=True)
class StepWork:
    """What steps of a model do.

    Attributes:
        token: for every token. sample: beside that, for rows whose logits are computed: the output head, and what of
            the last layer others can leave out. pair_flops: of attention, per query and key, in all layers.
    """

    token: Work
    sample: Work
    pair_flops: float


class Footprint:
    """Memory of the model of `info` as `config` would have it, which is resolved but for the context length.

    Attributes:
        spec: what the layers cache.
        on_disk: bytes of the weight files by part, and "unused"; None if there are none.
        in_memory: bytes of weights as packed, by part. loading: most bytes while they are read, all included.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        self._info, self._resolved_len = info, config.max_model_len
        self._threads = config.device.num_threads or _num_cores()
        self._gpu = config.device.device == "cuda"
        checkpoint = None
        load_format = config.model.load_format
        if load_format != "dummy" and has_weights(info, load_format):
            checkpoint = open_weights(info, load_format)
        log = _WeightLog(MetaWeights() if checkpoint is None else DryRunWeights(checkpoint), checkpoint)
        self._backend = MetaBackend(
            config.model.dtype,
            config.cache.kv_cache_dtype,
            config.model.quantization,
            self._threads,
            None if self._gpu else Processor.of_level(config.device.simd_level),
            log.packed,
        )
        backend = cast(Backend, self._backend)
        self._lora = new_slots(config, info, backend) if config.lora.enable_lora else None
        builder = Builder(log, backend, lora=self._lora, latent_cache=config.cache.latent_cache)
        self._model: Model = build_model(info, builder, 1)
        self.spec: KVCacheSpec = self._model.kv_cache_spec()
        self.in_memory = log.by_part
        self.loading = log.loading
        self.on_disk = None if checkpoint is None else _disk_bytes(checkpoint, log.names)

    @property
    def weights(self) -> int:
        """Bytes of all weights in memory."""
        return sum(self.in_memory.values())

    def tables(self, max_model_len: int) -> int:
        """Return the bytes of what was computed from the context length while loading: rotary angles."""
        return sum(4 * rope.rotary_dim * max_model_len for rope in set(self._info.layer_ropes))

    def step(self, config: EngineConfig) -> StepBytes:
        """Return what steps of this config take at most: a full prefill and a full batch of decodes.

        What only some requests need is not in it: penalties (some bytes for each different token of a text) and
        logprobs of prompts; nor are CUDA graphs (`graph_bytes`).
        """
        limits, length = config.scheduler, config.max_model_len
        backend, block_size = self._backend, config.cache.block_size
        backend.reset()
        tokens, rows = limits.max_num_batched_tokens, min(limits.max_num_seqs, limits.max_num_batched_tokens)
        caches = self._caches(block_size)
        states = SequenceStates(self.spec, cast(Backend, backend), limits.max_num_seqs)
        state_bytes = backend.input_bytes
        graphs = self._graphs(caches, states, tokens, limits.max_num_seqs, -(-length // block_size))
        slots = None if self._lora is None else np.zeros(rows, np.int64)
        groups = 1 + max((cache.group for cache in caches), default=0)
        pools = self._info.pooling is not None  # then all hidden states may be requested
        for count in dict.fromkeys((tokens, rows)):
            inputs = dummy_inputs(groups, count, rows, 0)
            inputs.adapter_slots = slots
            if pools:
                inputs.logits_indices = inputs.logits_indices[:0]
            graphs.run(inputs, all_hidden=pools)
        if self._gpu:
            return StepBytes(
                activations=backend.arena.touched,
                inputs=backend.input_bytes - state_bytes,
                sampling=DRAWING_COPIES * rows * self._model.vocab_size * FLOAT_BYTES,
                programs=0,
                threads=0,
                states=state_bytes,
            )
        return StepBytes(
            activations=backend.arena.touched,
            inputs=backend.input_bytes - state_bytes + self._batch_bytes(config, groups),
            sampling=min(rows, DRAWING_SHARES * self._threads) * self._model.vocab_size * KEY_BYTES,
            programs=MAX_GRAPHS * backend.num_instructions * INSTRUCTION_BYTES,
            threads=self._threads * SCRATCH_BYTES,
            states=state_bytes,
        )

    def step_bytes(self, config: EngineConfig) -> int:
        """Return the bytes of `step`, all together."""
        return self.step(config).total

    def work(self, block_size: int) -> StepWork:
        """Return what the rows of a step read and compute, whatever its size; adapters are left out.

        The model has run for one token, with and without its logits. One that cannot run on meta arrays is
        assumed to read and multiply all of its weights for every token.
        """
        backend, caches = self._backend, self._caches(block_size)
        if not self._model.supports_graphs:
            pair_flops = sum(4.0 * self._info.num_attention_heads * layer.head_size for layer in self.spec.layers)
            return StepWork(Work(self.weights, 2.0 * backend.num_elements), Work(0, 0.0), pair_flops)
        states = SequenceStates(self.spec, cast(Backend, backend), 1)
        graphs = self._graphs(caches, states, 1, 1, 1)
        slots = None if self._lora is None else np.full(1, -1)
        found = []
        for rows in (0, 1):
            backend.reset()
            inputs = dummy_inputs(1 + max((cache.group for cache in caches), default=0), 1, 1, 0)
            inputs.adapter_slots, inputs.logits_indices = slots, inputs.logits_indices[:rows]
            graphs.run(inputs)
            found.append(backend.work(self.weights))
        token, both = found
        beside = {(mixture.number, mixture.chosen): mixture.num_bytes for mixture in token.mixtures}
        mixtures = [
            Mixture(mixture.number, mixture.chosen, mixture.num_bytes - beside.get((mixture.number, mixture.chosen), 0))
            for mixture in both.mixtures
        ]
        sample = Work(
            both.num_bytes - token.num_bytes,
            both.flops - token.flops,
            tuple(mixture for mixture in mixtures if mixture.num_bytes),
        )
        return StepWork(token, sample, backend.pair_flops)

    def _graphs(
        self, caches: list[LayerCache], states: SequenceStates, tokens: int, sequences: int, max_blocks: int
    ) -> StepGraphs:
        return StepGraphs(
            cast(Any, self._model),
            cast(Backend, self._backend),
            cast(Any, caches),
            max_tokens=tokens,
            max_num_seqs=sequences,
            max_blocks=max_blocks,
            states=states.arrays,
            lora=self._lora,
        )

    def _caches(self, block_size: int) -> list[LayerCache]:
        """Return the layers' caches in order, with their groups, which do not change if the context is made shorter."""
        group_of = {
            layer: number for number, group in enumerate(self.spec.groups(self._resolved_len)) for layer in group.layers
        }
        return [LayerCache(MetaCache(block_size), group_of[layer]) for layer in range(len(self.spec.layers))]

    def _batch_bytes(self, config: EngineConfig, groups: int) -> int:
        # Its arrays are zeros: the system has not yet given memory for them.
        return InputBatch(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.cache.block_size,
            vocab_size=self._model.vocab_size,
            num_groups=groups,
        ).nbytes


class _WeightLog:
    """A source that assigns weights to parts by the tensors read for them, and knows what is in memory meanwhile.

    Attributes:
        names: of all tensors read. by_part: bytes of packed weights. loading: most bytes at a time, tensors included.
    """

    def __init__(self, source: WeightSource, checkpoint: Checkpoint | None) -> None:
        self._source, self._checkpoint = source, checkpoint
        self.names: list[str] = []
        self.by_part: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.loading = 0
        self._fresh: list[tuple[str, int]] = []  # tensors read since the last weight was packed
        self._last: list[tuple[str, int]] = []  # the latest that were packed
        self._read = 0

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the source's tensor."""
        tensor = self._source.read(name, shape)
        self.names.append(name)
        self._fresh.append((name, math.prod(shape)))
        return tensor

    def packed(self, kind: WeightKind, nbytes: int, total: int) -> None:
        """Note a weight; `total` bytes are packed with it.

        Matrices of experts and heads may be cut from a tensor that was read for an earlier one.
        """
        sources, self._fresh = self._fresh, []
        self._last = sources or self._last
        if kind in ("expert", "heads"):
            sources = self._last
        if sources:
            part = part_of(sources[-1][0])
        elif kind == "vector":
            part = "norms"  # vectors of ones
        else:  # it was read together with the one before, or not by us
            part = part_of(self.names[-1]) if self.names else "other"
        self.by_part[part] += nbytes
        if self._checkpoint is None:
            unpacked = sum(4 * size for _, size in sources)  # made up in float32
        else:
            stored = self._checkpoint.tensors
            here = sum(stored[name].num_bytes for name, _ in sources if name in stored)
            unpacked = min(self._read, RESIDENT_BYTES) + here
            self._read += here
        self.loading = max(self.loading, total + unpacked)


def _disk_bytes(checkpoint: Checkpoint, names: list[str]) -> Mapping[str, int]:
    found = dict.fromkeys((*PARTS, "unused"), 0)
    read = set(names)
    for name, stored in checkpoint.tensors.items():
        found[part_of(name) if name in read else "unused"] += stored.num_bytes
    return found


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
