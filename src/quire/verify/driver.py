"""`ModelDriver`: our model on its backend and a paged cache, run step by step; traces of its attention layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine_request import EngineRequest
from quire.kernels.backend import Array, Arrays, AttentionMetadata, AttentionOps, AttentionParams, Backend, KVCache
from quire.models.loader import load_model
from quire.models.pooling import PoolingModel
from quire.sampling_params import SamplingParams
from quire.step import ContinuingSequenceData, NewSequenceData, SchedulerOutput
from quire.verify.oracle import LayerTrace
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import new_backend

LOGIT_ROWS = 128  # computed at a time
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


class ModelDriver:
    """A model that serves up to `num_sequences` sequences of up to `length` tokens."""

    def __init__(self, config: EngineConfig, info: ModelInfo, *, length: int, num_sequences: int = 4) -> None:
        model = config.model
        self.backend = _TracingBackend(new_backend(config))
        self.model = load_model(
            info,
            cast(Backend, self.backend),
            max_model_len=length,
            load_format=model.load_format,
            seed=model.seed,
            strategy=model.safetensors_load_strategy,
            allow_nonfinite=model.allow_nonfinite,
            latent_cache=config.cache.latent_cache,
        )
        self._block_size = config.cache.block_size
        groups = self.model.kv_cache_spec().groups(length)
        per_sequence = -(-length // self._block_size)
        self._free = list(range(num_sequences * per_sequence * len(groups)))
        self._num_groups = len(groups)
        self._runner = ModelRunner(
            self.model,
            cast(Backend, self.backend),
            num_blocks=len(self._free),
            block_size=self._block_size,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=length,
            max_model_len=length,
        )
        self._tables: dict[str, list[list[int]]] = {}
        self._lengths: dict[str, int] = {}
        self._finished: list[str] = []

    def forward(self, name: str, tokens: list[int]) -> np.ndarray:
        """Append tokens to a sequence, compute them in one step, and return the logits after each, float32 [n, V].

        Of an embedding model, their hidden states [n, H].
        """
        start = self._lengths.get(name, 0)
        new_blocks = self._grow(name, start + len(tokens))
        step = SchedulerOutput([], [], {name: len(tokens)}, len(tokens), self._finished, [])
        self._finished = []
        if start == 0:
            step.new_sequences = [NewSequenceData(name, EngineRequest(name, tokens, PARAMS), new_blocks)]
        else:
            step.continuing = [ContinuingSequenceData(name, new_blocks, start, [], tokens)]
        self._runner.batch.update(step)
        inputs = self._runner.batch.inputs(step.num_scheduled_tokens)
        if self.model.num_token_types:
            inputs.extra = {"token_types": np.zeros(len(tokens), int)}
        hidden, _, _ = self._runner.graphs.run(inputs, all_hidden=True)
        assert hidden is not None
        if isinstance(self.model, PoolingModel):
            return np.array(self.backend.to_numpy(hidden[: len(tokens)]))
        rows = [
            np.array(self.backend.to_numpy(self.model.compute_logits(hidden[at : at + LOGIT_ROWS])))
            for at in range(0, len(tokens), LOGIT_ROWS)
        ]
        return np.concatenate(rows)

    def scores(self, hidden: np.ndarray) -> np.ndarray:
        """Return the logits of a text's classes, float32 [N], from its hidden states [T, H]."""
        assert isinstance(self.model, PoolingModel)
        pooled = {"cls": hidden[:1], "lasttoken": hidden[-1:], "mean": hidden.mean(axis=0, keepdims=True)}
        rows = self.model.project(self.backend.from_numpy(pooled[self.model.spec.kinds[0]]))
        return np.array(self.backend.to_numpy(rows))[0]

    def finish(self, name: str) -> None:
        """End a sequence and free its blocks."""
        for table in self._tables.pop(name):
            self._free += table
        del self._lengths[name]
        self._finished.append(name)

    def trace(self, tokens: list[int]) -> list[LayerTrace]:
        """Return the traces of the attention layers that cache keys and values, for a new sequence."""
        self.backend.traces = []
        self.forward("traced", tokens)
        self.finish("traced")
        traces, self.backend.traces = self.backend.traces, None
        return traces

    def close(self) -> None:
        """Free the runner's resources."""
        self._runner.close()

    def _grow(self, name: str, length: int) -> list[list[int]]:
        tables = self._tables.setdefault(name, [[] for _ in range(self._num_groups)])
        self._lengths[name] = length
        added: list[list[int]] = []
        for table in tables:
            count = -(-length // self._block_size) - len(table)
            added.append([self._free.pop() for _ in range(count)])
            table += added[-1]
        return added


class _TracingBackend:
    """A backend that traces attention layers while `traces` is a list; no step is a graph then."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.traces: list[LayerTrace] | None = None
        self._written: tuple[np.ndarray, np.ndarray] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    rotary_write_kv = AttentionOps.rotary_write_kv  # the default, which calls `write_kv` below

    def graph(self, build: Callable[[], Arrays]) -> Callable[[], Arrays]:
        """See `Backend`; not used while tracing."""
        return self._unless_tracing(build, self._backend.graph)

    def piecewise_graph(self, build: Callable[[AttentionMetadata], Arrays]) -> Callable[[AttentionMetadata], Arrays]:
        """See `Backend`; not used while tracing."""
        return self._unless_tracing(build, self._backend.piecewise_graph)

    def _unless_tracing(self, build: Callable[..., Arrays], new_graph: Callable[..., Any]) -> Callable[..., Arrays]:
        graph: Callable[..., Arrays] | None = None

        def run(*metadata: AttentionMetadata) -> Arrays:
            nonlocal graph
            if self.traces is not None:
                return build(*metadata)
            graph = graph or new_graph(build)
            return graph(*metadata)

        return run

    def write_kv(self, k: Array, v: Array, cache: KVCache, slot_mapping: Array) -> None:
        """See `Backend`; keeps keys and values for the trace."""
        if self.traces is not None:
            self._written = self._copy(k), self._copy(v)
        self._backend.write_kv(k, v, cache, slot_mapping)

    def paged_attention(
        self,
        q: Array,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        fresh: tuple[Array, Array] | None = None,
    ) -> Array:
        """See `Backend`; adds a trace."""
        queries = self._copy(q) if self.traces is not None else None
        output = self._backend.paged_attention(q, cache, metadata, params, fresh)
        if queries is not None and self.traces is not None and self._written is not None:
            keys, values = (x.reshape(len(x), params.num_kv_heads, -1) for x in self._written)
            queries, out = (x.reshape(len(x), params.num_heads, -1) for x in (queries, self._copy(output)))
            self.traces.append(LayerTrace(queries * params.scale, keys, values, out))
        return output

    def _copy(self, array: Array) -> np.ndarray:
        return np.array(self._backend.to_numpy(array), np.float32)
