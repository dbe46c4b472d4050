"""The model's part of a step, recorded once for each shape of batch and run again without Python in between.

A step's shape is its number of tokens, of sequences, and of rows to sample. What differs between steps of one shape is
copied into arrays that stay where they are. What a backend makes of a recording is its own business (see
`Backend.graph`); one that has nothing to gain just computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from quire.kernels.backend import Array, Arrays, AttentionMetadata, Backend, LayerCache
from quire.layers.lora import LoRASlots
from quire.step import KVCacheSpec
from quire.worker.input_batch import StepInputs

# Logits of prompt positions are computed in pieces of so many rows, to bound their memory.
PROMPT_LOGPROB_ROWS = 128
WARM_UP_TOKENS = 2  # the first step's, before any scheduler has a say
MAX_GRAPHS = 96  # shapes kept; decode batches of every size up to this one find theirs

# Hidden states [T, H], None unless all were asked for; logits [R, V] and `Backend.rows_finite` of them, both None
# without rows to sample.
StepResult = tuple[Array | None, Array | None, Array | None]
# Tokens, sequences, rows to sample, whether all hidden states are asked for, whether any row has an adapter.
Shape = tuple[int, int, int, bool, bool]


class RunnableModel(Protocol):
    """What the runner needs of a model; see `models.interface` for the whole contract."""

    vocab_size: int

    def forward(self, input_ids: Array, positions: Array, kv_caches: list[Any], metadata: AttentionMetadata) -> Array:
        """Return hidden states [T, H]."""

    def compute_logits(self, hidden: Array) -> Array:
        """Return logits float32 [R, V] of hidden rows [R, H]."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """Say what each layer caches."""


class StepGraphs:
    """Runs `model` on steps of up to `max_tokens` tokens and `max_num_seqs` sequences of `max_blocks` blocks.

    `kv_caches` are the layers', in order; their groups are numbered from 0. Of a model without logits (`PoolingModel`)
    the hidden states are those of the rows to sample, unless all are asked for. `states` are those of the layers that
    have some, see `worker.states`. `lora` are the slots that the model's layers have entered.
    """

    def __init__(
        self,
        model: RunnableModel,
        backend: Backend,
        kv_caches: list[LayerCache],
        *,
        max_tokens: int,
        max_num_seqs: int,
        max_blocks: int,
        states: Sequence[Arrays] = (),
        lora: LoRASlots | None = None,
    ) -> None:
        self._model, self._backend, self._caches = model, backend, [*kv_caches, *states]
        self._num_groups = 1 + max((cache.group for cache in kv_caches), default=0)
        self._lora = lora
        self._input_ids = backend.zeros((max_tokens,), "int64")
        self._positions = backend.zeros((max_tokens,), "int64")
        self._slot_mapping = backend.zeros((self._num_groups, max_tokens), "int64")
        self._cu_query_lens = backend.zeros((max_num_seqs + 1,), "int32")
        self._seq_lens = backend.zeros((max_num_seqs,), "int32")
        self._block_tables = backend.zeros((self._num_groups, max_num_seqs, max_blocks), "int32")
        self._sampled_rows = backend.zeros((max_num_seqs,), "int64")
        self._state_rows = backend.zeros((max_num_seqs,), "int64") if states else None
        self._headless = hasattr(model, "project")
        num_types = getattr(model, "num_token_types", 0)
        self._token_types = backend.zeros((max_tokens,), "int64") if num_types else None
        self._graphs: OrderedDict[Shape, Callable[[], Arrays]] = OrderedDict()

    def run(
        self,
        inputs: StepInputs,
        sampled_rows: np.ndarray,
        *,
        all_hidden: bool = False,
        token_types: np.ndarray | None = None,
        adapter_slots: np.ndarray | None = None,
    ) -> StepResult:
        """Compute a step: logits of its rows `sampled_rows` int64 [R], and hidden states of all rows if asked for.

        `token_types` int64 [T] where the model has them; `adapter_slots` int64 [S], -1 for none, with `lora`. The
        result is overwritten by the next step.
        """
        tokens, sequences, rows = len(inputs.input_ids), len(inputs.seq_lens), len(sampled_rows)
        write = self._backend.assign
        input_ids, adapted = inputs.input_ids, False
        if self._lora is not None:
            assert adapter_slots is not None
            token_slots = np.repeat(adapter_slots, inputs.num_scheduled)
            input_ids = self._lora.write(input_ids, token_slots, token_slots[sampled_rows])
            adapted = bool((adapter_slots >= 0).any())
        write(self._input_ids[:tokens], input_ids)
        write(self._positions[:tokens], inputs.positions)
        write(self._slot_mapping[:, :tokens], inputs.slot_mapping)
        write(self._cu_query_lens[: sequences + 1], inputs.cu_query_lens)
        write(self._seq_lens[:sequences], inputs.seq_lens)
        write(self._block_tables[:, :sequences, : inputs.block_tables.shape[2]], inputs.block_tables)
        write(self._sampled_rows[:rows], sampled_rows)
        if self._token_types is not None and token_types is not None:
            write(self._token_types[:tokens], token_types)
        if self._state_rows is not None:
            write(self._state_rows[:sequences], inputs.rows)
        hidden, logits, finite = self._graph((tokens, sequences, rows, all_hidden, adapted))()
        return hidden, logits, finite

    def _graph(self, shape: Shape) -> Callable[[], Arrays]:
        graph = self._graphs.get(shape)
        if graph is None:
            if not getattr(self._model, "recordable", True):
                return lambda: self._compute(*shape)
            graph = self._backend.graph(lambda: self._compute(*shape))
            self._graphs[shape] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
        return graph

    def _compute(self, tokens: int, sequences: int, rows: int, all_hidden: bool, adapted: bool) -> StepResult:
        if self._lora is not None:
            self._lora.begin(tokens, rows, adapted)
        sampled = self._sampled_rows[:rows]
        groups = [
            (self._block_tables[group, :sequences], self._slot_mapping[group, :tokens])
            for group in range(self._num_groups)
        ]
        block_tables, slot_mapping = groups[0]
        metadata = AttentionMetadata(
            cu_query_lens=self._cu_query_lens[: sequences + 1],
            seq_lens=self._seq_lens[:sequences],
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            wanted=None if all_hidden or rows == tokens else sampled,  # where all are sampled they are so in order
            further=tuple(groups[1:]),
            token_types=None if self._token_types is None else self._token_types[:tokens],
            state_rows=None if self._state_rows is None else self._state_rows[:sequences],
        )
        hidden = self._model.forward(self._input_ids[:tokens], self._positions[:tokens], self._caches, metadata)
        if self._headless:
            return hidden, None, None
        if rows == 0:
            return hidden if all_hidden else None, None, None
        logits = self._model.compute_logits(self._backend.take_rows(hidden, sampled) if all_hidden else hidden)
        if self._lora is not None:
            logits = self._lora.limit(logits)
        return hidden if all_hidden else None, logits, self._backend.rows_finite(logits)
