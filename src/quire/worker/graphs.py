"""The model's part of a step, recorded once for each shape of batch and run again without Python in between.

A step's shape is its number of tokens, of sequences, and of rows to sample; a backend may want them rounded up, and
then the rest is padding (`AttentionMetadata` says what that looks like). What differs between steps of one shape is
copied into arrays that stay where they are. What a backend makes of a recording is its own business (see
`Backend.graph`); one that has nothing to gain just computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from quire.kernels.backend import (
    Array,
    Arrays,
    AttentionMetadata,
    Backend,
    LayerCache,
    LayerwiseOffload,
    Penalties,
    StepLengths,
)
from quire.kernels.steps import GraphStats, StepShape
from quire.layers.lora import LoRASlots
from quire.step import KVCacheSpec
from quire.worker.input_batch import StepInputs

# Logits of prompt positions are computed in pieces of so many rows, to bound their memory.
PROMPT_LOGPROB_ROWS = 128
WARM_UP_TOKENS = 2  # the first step's, before any scheduler has a say
RECORDED_AFTER = 2  # steps of a size, where computing the first op by op is worth it
MAX_GRAPHS = 96  # shapes kept; decode batches of every size up to this one find theirs

# Hidden states [T, H], None unless all were asked for; logits [R, V] and `Backend.rows_finite` of them, both None
# without rows to sample.
StepResult = tuple[Array | None, Array | None, Array | None]
# A size, whether all hidden states are asked for, whether any row has an adapter.
Shape = tuple[StepShape, bool, bool]


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
    With an `offload` of the last layers, steps with layerwise blocks are computed op by op, since its copies cannot be
    recorded.

    Attributes:
        last_tokens: int64 [max_num_seqs + max_tokens]: of each row of the batch, the token that was sampled last, where
            the host may not know it yet; behind them, ids of a step on their way. See `StepInputs.sources`.
        began: when the last step began to compute (`Backend.record_event`).
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
        offload: LayerwiseOffload | None = None,
    ) -> None:
        self._offload = offload
        self.began = backend.record_event()
        self._model, self._backend, self._caches = model, backend, [*kv_caches, *states]
        self._num_groups = 1 + max((cache.group for cache in kv_caches), default=0)
        self._max_tokens, self._max_num_seqs = max_tokens, max_num_seqs
        self._lora, self._stager = lora, backend.stager()
        self._recordable = getattr(model, "recordable", True)
        self._input_ids = backend.zeros((max_tokens,), "int64")
        self.last_tokens = backend.zeros((max_num_seqs + max_tokens,), "int64")
        self._sources = backend.zeros((max_tokens,), "int64")
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
        self._graphs: OrderedDict[Shape, Callable[..., Arrays]] = OrderedDict()
        self._warm_up = GraphWarmUp(backend, max_num_seqs)

    def run(
        self,
        inputs: StepInputs,
        *,
        all_hidden: bool = False,
        token_types: np.ndarray | None = None,
        adapter_slots: np.ndarray | None = None,
    ) -> StepResult:
        """Compute a step: logits of its `logits_indices`, and with `all_hidden` the hidden states of all tokens.

        `token_types` int64 [T] where the model has them; `adapter_slots` int64 [S], -1 for none, with `lora`. The
        result is overwritten by the next step.
        """
        tokens, sequences, rows = len(inputs.input_ids), len(inputs.seq_lens), len(inputs.logits_indices)
        size = self._size(tokens, sequences, rows)
        if self._offload is not None and self._offload.start_load(
            inputs.block_tables[0], inputs.num_scheduled, inputs.seq_lens
        ):
            size = StepShape(tokens, sequences, rows, "no")
        adapted = self._stage(inputs, size, token_types, adapter_slots)
        lengths = StepLengths(inputs.num_scheduled, inputs.seq_lens) if self._backend.pads else None
        self.began = self._backend.record_event()
        hidden, logits, finite = self._compute((size, all_hidden, adapted), sequences, lengths)
        self._warm_up.add(size)
        if size.tokens != tokens and all_hidden and hidden is not None:
            hidden = hidden[:tokens]
        if size.rows != rows:
            hidden = hidden if all_hidden or hidden is None else hidden[:rows]
            logits, finite = (None if x is None else x[:rows] for x in (logits, finite))
        return hidden, logits, finite

    def record_next(self) -> bool:
        """Compute and record a step of nothing but padding, of a size that is likely to come; say whether it did.

        At most one, so that whoever arrives meanwhile does not wait for several. No sequence's memory changes.
        """
        batch = self._warm_up.next_size() if self._recordable else None
        if batch is None:
            return False
        size = self._size(batch, batch, batch)
        inputs = dummy_inputs(self._num_groups, 0, 0, self._max_num_seqs)
        self._stage(inputs, size, None, None if self._lora is None else inputs.rows)
        for _ in range(RECORDED_AFTER):
            self._compute((size, False, False), 0, None)
        self._warm_up.done(size)
        return True

    def compile_ahead(self) -> int:
        """Have the model's kernels compiled side by side, for steps of every kind; return how many that were.

        To be called before the first step.
        """
        return self._backend.compile_ahead(self._name_kernels) if self._recordable else 0

    def _name_kernels(self) -> None:
        """Build a step of each kind, as they will be built; its values do not matter."""
        most, limit = self._max_num_seqs, self._max_tokens
        decodes = [(batch, batch) for batch in (1, 2, 4, 16, 32, 64, most) if batch <= min(most, limit)]
        prompts = [(tokens, 1) for tokens in (WARM_UP_TOKENS, 100, 1000, limit) if 1 < tokens <= limit]
        for tokens, sequences in dict.fromkeys([*decodes, *prompts]):
            inputs = dummy_inputs(self._num_groups, tokens, sequences, self._max_num_seqs)
            size = self._size(tokens, sequences, sequences)
            slots = None if self._lora is None else np.full(sequences, -1, np.int64)
            self._stage(inputs, size, np.zeros(tokens, np.int64), slots)
            whole = size.recorded == "whole"
            lengths = None if whole else StepLengths(inputs.num_scheduled, inputs.seq_lens)
            shape = size, False, False
            _, logits, _ = self._build(shape, self._metadata(shape, size.sequences if whole else sequences, lengths))
            if logits is not None:
                self._name_choices(logits)

    def _name_choices(self, logits: Array) -> None:
        """Do to logits what options ask for; the values do not matter."""
        backend, size = self._backend, len(logits)
        place, one = np.zeros(1, np.int64), np.ones(1, np.float32)
        backend.add_bias(logits, place, place, one)
        backend.apply_bitmask(logits, place, np.zeros((1, -(-logits.shape[1] // 32)), np.int32))
        number = np.ones(1, np.int32)
        backend.apply_penalties(logits, Penalties(place, np.array([0, 1]), number, number, one, one, one))
        backend.top_logprobs(logits, backend.zeros((size,), "int64"), 1)
        chances = np.full(size, 0.5)
        backend.sample(logits, chances, np.full(size, 2), chances, chances, chances)

    def stats(self) -> GraphStats:
        """Say what recordings there are, and what they cost."""
        return self._backend.graph_stats()

    def _size(self, tokens: int, sequences: int, rows: int) -> StepShape:
        if not self._recordable:
            return StepShape(tokens, sequences, rows, "no")
        return self._backend.step_shape(tokens, sequences, rows).within(self._max_tokens, self._max_num_seqs)

    def _stage(
        self,
        inputs: StepInputs,
        size: StepShape,
        token_types: np.ndarray | None,
        adapter_slots: np.ndarray | None,
    ) -> bool:
        """Bring a step's inputs, padded to `size`, to the device; return whether any row has an adapter."""
        put, input_ids, adapted = self._stager.put, inputs.input_ids, False
        if self._lora is not None:
            assert adapter_slots is not None
            slots = np.full(size.tokens, -1, np.int64)
            slots[: len(input_ids)] = np.repeat(adapter_slots, inputs.num_scheduled)
            row_slots = np.full(size.rows, -1, np.int64)
            row_slots[: len(inputs.logits_indices)] = slots[inputs.logits_indices]
            input_ids = self._lora.write(input_ids, slots, row_slots, put)
            adapted = bool((adapter_slots >= 0).any())
        if inputs.sources is None:
            put(self._input_ids, input_ids, size.tokens)
        else:
            put(self.last_tokens[self._max_num_seqs :], input_ids)
            put(self._sources, inputs.sources, size.tokens, self._max_num_seqs)
        put(self._positions, inputs.positions, size.tokens)
        put(self._slot_mapping, inputs.slot_mapping, size.tokens, -1)
        put(self._cu_query_lens, inputs.cu_query_lens, size.sequences + 1, int(inputs.cu_query_lens[-1]))
        put(self._seq_lens, inputs.seq_lens, size.sequences)
        put(self._block_tables, inputs.block_tables)
        put(self._sampled_rows, inputs.logits_indices, size.rows)
        if self._token_types is not None and token_types is not None:
            put(self._token_types, token_types, size.tokens)
        if self._state_rows is not None:
            put(self._state_rows, inputs.rows, size.sequences, self._max_num_seqs)
        self._stager.send()
        if inputs.sources is not None:
            self._backend.take_tokens(self._input_ids[: size.tokens], self.last_tokens, self._sources[: size.tokens])
        return adapted

    def _compute(self, shape: Shape, sequences: int, lengths: StepLengths | None) -> StepResult:
        """Compute what was staged; `sequences` and `lengths` are those that the step really has."""
        size, recorded = shape[0], shape[0].recorded
        if recorded == "whole":
            hidden, logits, finite = self._graph(shape)()
        elif recorded == "pieces":
            hidden, logits, finite = self._graph(shape)(self._metadata(shape, sequences, lengths))
        else:
            hidden, logits, finite = self._build(shape, self._metadata(shape, size.sequences, lengths))
        return hidden, logits, finite

    def _graph(self, shape: Shape) -> Callable[..., Arrays]:
        size, all_hidden, adapted = shape
        if size.recorded == "pieces":
            size = size._replace(sequences=0)  # however many there are
            shape = size, all_hidden, adapted
        graph = self._graphs.get(shape)
        if graph is None:
            if size.recorded == "pieces":
                graph = self._backend.graph_pieces(lambda metadata: self._build(shape, metadata))
            else:
                graph = self._backend.graph(lambda: self._build(shape, self._metadata(shape, size.sequences, None)))
            self._graphs[shape] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
        return graph

    def _metadata(self, shape: Shape, sequences: int, lengths: StepLengths | None) -> AttentionMetadata:
        size, all_hidden, _ = shape
        tokens, rows = size.tokens, size.rows
        groups = [
            (self._block_tables[group, :sequences], self._slot_mapping[group, :tokens])
            for group in range(self._num_groups)
        ]
        block_tables, slot_mapping = groups[0]
        sampled = self._sampled_rows[:rows]
        return AttentionMetadata(
            cu_query_lens=self._cu_query_lens[: sequences + 1],
            seq_lens=self._seq_lens[:sequences],
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            # Where all tokens are sampled they are so in order.
            logits_indices=None if all_hidden or rows == tokens else sampled,
            further=tuple(groups[1:]),
            token_types=None if self._token_types is None else self._token_types[:tokens],
            state_rows=None if self._state_rows is None else self._state_rows[:sequences],
            lengths=lengths,
            single=tokens == sequences,
        )

    def _build(self, shape: Shape, metadata: AttentionMetadata) -> StepResult:
        (tokens, _, rows, _), all_hidden, adapted = shape
        if self._lora is not None:
            self._lora.begin(tokens, rows, adapted)
        hidden = self._model.forward(self._input_ids[:tokens], self._positions[:tokens], self._caches, metadata)
        if self._headless:
            return hidden, None, None
        if rows == 0:
            return hidden if all_hidden else None, None, None
        sampled = self._sampled_rows[:rows]
        logits = self._model.compute_logits(self._backend.take_rows(hidden, sampled) if all_hidden else hidden)
        if self._lora is not None:
            logits = self._lora.limit(logits)
        return hidden if all_hidden else None, logits, self._backend.rows_finite(logits)


class GraphWarmUp:
    """Chooses batch sizes of decoding to record before they occur: all up to the largest so far, and the next one."""

    def __init__(self, backend: Backend, max_num_seqs: int) -> None:
        self._backend, self._most = backend, max_num_seqs
        self._times: dict[int, int] = {}  # by size, how often it occurred
        self._widest = 0

    def add(self, size: StepShape) -> None:
        """Count a step of requests that was computed."""
        if self._backend.pads and size.recorded == "whole":
            self._widest = max(self._widest, size.tokens)
            self._times[size.tokens] = self._times.get(size.tokens, 0) + 1

    def done(self, size: StepShape) -> None:
        """Count a size as recorded."""
        self._times[size.tokens] = RECORDED_AFTER

    def next_size(self) -> int | None:
        """Return a size that was not recorded yet, smallest first; None if there is none."""
        batch = 1
        while self._widest and batch <= self._most:
            size = self._backend.step_shape(batch, batch, batch)
            tokens = min(size.tokens, self._most)
            if size.recorded != "whole":
                return None
            if self._times.get(tokens, 0) < RECORDED_AFTER:
                return tokens
            if tokens > self._widest:
                return None
            batch = tokens + 1
        return None


def dummy_inputs(num_groups: int, tokens: int, sequences: int, row: int) -> StepInputs:
    """Return the inputs of a step that writes nothing, its tokens divided among sequences of the batch's row `row`."""
    counts = np.full(sequences, tokens // max(sequences, 1))
    return StepInputs(
        sequence_ids=[],
        rows=np.full(sequences, row, np.int64),
        num_scheduled=counts,
        input_ids=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        cu_query_lens=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=counts,
        block_tables=np.zeros((num_groups, sequences, 1), np.int32),
        slot_mapping=np.full((num_groups, tokens), -1, np.int64),
        num_logits=np.ones(sequences, np.int64),
        logits_indices=np.cumsum(counts) - 1,
    )
