"""`StepGraphs`: the forward pass of a step, captured once for each shape of batch and replayed without Python.

A step's shape is its number of tokens, sequences and rows of logits; a backend may round them up, and the rest is
padding (see `AttentionMetadata`). What differs between steps of one shape is copied into arrays that stay where they
are. How a graph is captured and replayed is the backend's business (`Backend.graph`); one that gains nothing by it just
computes. Beside it stand the buffers of the forward pass: states of sequences, and the slots of LoRA adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.kernels.backend import (
    Array,
    Arrays,
    AttentionMetadata,
    Backend,
    InputsEmbeds,
    LayerCache,
    LayerwiseOffload,
    Penalties,
    SamplingOptions,
    StepLengths,
)
from quire.kernels.steps import StepShape
from quire.layers.lora import LoRASlots
from quire.models.interface import Model
from quire.models.pooling import PoolingModel
from quire.step import ForkData, KVCacheSpec
from quire.worker.input_batch import StepInputs

PROMPT_LOGPROB_ROWS = 128  # logits of prompt positions are computed in chunks, to bound their memory
WARM_UP_TOKENS = 2  # of the first step, which no scheduler has planned
CAPTURED_AFTER = 2  # steps of a size, where computing the first one op by op is worth it
MAX_GRAPHS = 96  # one a shape; decode batches of every size up to this one find theirs

# Hidden states [T, H], None unless requested; logits [R, V] and `Backend.rows_finite` of them, None without any rows.
ForwardOutput = tuple[Array | None, Array | None, Array | None]


class Shape(NamedTuple):
    """What steps of one graph have in common.

    Attributes:
        all_hidden: all hidden states are requested. adapted: some row has an adapter. replaced: some embedding is.
    """

    size: StepShape
    all_hidden: bool = False
    adapted: bool = False
    replaced: bool = False


class StepGraphs:
    """Runs `model` on steps of up to `max_tokens` tokens and `max_num_seqs` sequences of `max_blocks` blocks.

    `kv_caches` are the layers', in order; their groups are numbered from 0. Of a model without logits (`PoolingModel`)
    the hidden states are those of `logits_indices`, unless all are requested. `states` are those of `SequenceStates`.
    `lora` are the slots in which the model's layers have registered.
    With an `offload` of the last layers, steps with layerwise blocks are computed op by op, since its copies cannot be
    captured.

    Attributes:
        last_tokens: int64 [max_num_seqs + max_tokens]: the last sampled token of each row of the batch, which the host
            may not know yet, then the ids of the step that is being staged. See `StepInputs.sources`.
        started: when the device began the last step (`Backend.record_event`).
    """

    def __init__(
        self,
        model: Model,
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
        self.started = backend.record_event()
        self._model, self._backend, self._caches = model, backend, [*kv_caches, *states]
        self._num_groups = 1 + max((cache.group for cache in kv_caches), default=0)
        self._max_tokens, self._max_num_seqs = max_tokens, max_num_seqs
        self._lora, self._stager = lora, backend.stager()
        self._supports_graphs = model.supports_graphs
        self._input_ids = backend.zeros((max_tokens,), "int64")
        self.last_tokens = backend.zeros((max_num_seqs + max_tokens,), "int64")
        self._sources = backend.zeros((max_tokens,), "int64")
        self._position_axes = getattr(model, "position_axes", 1)
        self._positions = backend.zeros((self._position_axes, max_tokens), "int64")
        self._inputs_embeds: InputsEmbeds | None = None  # allocated by the first step that has any
        self._slot_mapping = backend.zeros((self._num_groups, max_tokens), "int64")
        self._cu_query_lens = backend.zeros((max_num_seqs + 1,), "int32")
        self._seq_lens = backend.zeros((max_num_seqs,), "int32")
        self._block_tables = backend.zeros((self._num_groups, max_num_seqs, max_blocks), "int32")
        self._logits_indices = backend.zeros((max_num_seqs,), "int64")
        self._state_rows = backend.zeros((max_num_seqs,), "int64") if states else None
        has_types = model.num_token_types > 0
        self._extra = {"token_types": backend.zeros((max_tokens,), "int64")} if has_types else {}
        self._graphs: OrderedDict[Shape, Callable[..., Arrays]] = OrderedDict()
        self._warm_up = GraphWarmUp(backend, max_num_seqs)

    def run(self, inputs: StepInputs, *, all_hidden: bool = False) -> ForwardOutput:
        """Compute the logits of `inputs.logits_indices`, and with `all_hidden` the hidden states of all tokens.

        The result is overwritten by the next step.
        """
        tokens, sequences, rows = len(inputs.input_ids), len(inputs.seq_lens), len(inputs.logits_indices)
        size = self._size(tokens, sequences, rows)
        if self._offload is not None and self._offload.start_load(
            inputs.block_tables[0], inputs.num_scheduled, inputs.seq_lens
        ):
            size = StepShape(tokens, sequences, rows, "none")
        shape = self._stage(inputs, size)._replace(all_hidden=all_hidden)
        lengths = StepLengths(inputs.num_scheduled, inputs.seq_lens) if self._backend.pads else None
        self.started = self._backend.record_event()
        hidden, logits, finite = self._compute(shape, sequences, lengths)
        self._warm_up.add(size)
        if size.tokens != tokens and all_hidden and hidden is not None:
            hidden = hidden[:tokens]
        if size.rows != rows:
            hidden = hidden if all_hidden or hidden is None else hidden[:rows]
            logits, finite = (None if x is None else x[:rows] for x in (logits, finite))
        return hidden, logits, finite

    def capture_next(self) -> bool:
        """Compute and capture one step of padding, of a size that is likely to occur; return whether there was any.

        No more than one, so that a request that arrives meanwhile does not wait for several. It writes no KV.
        """
        batch = self._warm_up.next_size() if self._supports_graphs else None
        if batch is None:
            return False
        size = self._size(batch, batch, batch)
        inputs = dummy_inputs(self._num_groups, 0, 0, self._max_num_seqs)
        shape = self._stage(inputs, size)
        for _ in range(CAPTURED_AFTER):
            self._compute(shape, 0, None)
        self._warm_up.done(size)
        return True

    def compile_ahead(self) -> int:
        """Compile the model's kernels in parallel, for steps of every kind; return how many. Before the first step."""
        return self._backend.compile_ahead(self.launch_all) if self._supports_graphs else 0

    def launch_all(self) -> None:
        """Launch the kernels of a step of each kind, op by op, on dummy values."""
        most, limit = self._max_num_seqs, self._max_tokens
        decodes = [(batch, batch) for batch in (1, 2, 4, 16, 32, 64, most) if batch <= min(most, limit)]
        prompts = [(tokens, 1) for tokens in (WARM_UP_TOKENS, 100, 1000, limit) if 1 < tokens <= limit]
        for tokens, sequences in dict.fromkeys([*decodes, *prompts]):
            inputs = dummy_inputs(self._num_groups, tokens, sequences, self._max_num_seqs)
            size = self._size(tokens, sequences, sequences)
            inputs.extra = {name: np.zeros(tokens, np.int64) for name in self._extra}
            shape = self._stage(inputs, size)
            full = size.graph_mode == "full"
            lengths = None if full else StepLengths(inputs.num_scheduled, inputs.seq_lens)
            _, logits, _ = self._build(shape, self._metadata(shape, size.sequences if full else sequences, lengths))
            if logits is not None:
                self._launch_sampling(logits)

    def _launch_sampling(self, logits: Array) -> None:
        backend, size = self._backend, len(logits)
        place, one = np.zeros(1, np.int64), np.ones(1, np.float32)
        backend.add_bias(logits, place, place, one)
        backend.apply_bitmask(logits, place, np.zeros((1, -(-logits.shape[1] // 32)), np.int32))
        number = np.ones(1, np.int32)
        backend.apply_penalties(logits, Penalties(place, np.array([0, 1]), number, number, one, one, one))
        backend.top_logprobs(logits, backend.zeros((size,), "int64"), 1)
        chances = np.full(size, 0.5)
        backend.sample(logits, SamplingOptions(chances, np.full(size, 2), chances, chances), chances)

    def _size(self, tokens: int, sequences: int, rows: int) -> StepShape:
        if not self._supports_graphs:
            return StepShape(tokens, sequences, rows, "none")
        return self._backend.step_shape(tokens, sequences, rows).within(self._max_tokens, self._max_num_seqs)

    def _stage(self, inputs: StepInputs, size: StepShape) -> Shape:
        """Copy a step's inputs, padded to `size`, to the device; return what kind of step it is."""
        put, input_ids, adapted = self._stager.put, inputs.input_ids, False
        if self._lora is not None:
            slots = np.full(size.tokens, -1, np.int64)
            if inputs.adapter_slots is not None:
                slots[: len(input_ids)] = np.repeat(inputs.adapter_slots, inputs.num_scheduled)
            row_slots = np.full(size.rows, -1, np.int64)
            row_slots[: len(inputs.logits_indices)] = slots[inputs.logits_indices]
            input_ids = self._lora.write(input_ids, slots, row_slots, put)
            adapted = bool((slots >= 0).any())
        if inputs.sources is None:
            put(self._input_ids, input_ids, size.tokens)
        else:
            put(self.last_tokens[self._max_num_seqs :], input_ids)
            put(self._sources, inputs.sources, size.tokens, self._max_num_seqs)
        positions = inputs.positions
        if positions.ndim == 1:  # all axes have the same, as for text
            positions = positions[None] if self._position_axes == 1 else np.tile(positions, (self._position_axes, 1))
        put(self._positions, positions, size.tokens)
        put(self._slot_mapping, inputs.slot_mapping, size.tokens, -1)
        put(self._cu_query_lens, inputs.cu_query_lens, size.sequences + 1, int(inputs.cu_query_lens[-1]))
        put(self._seq_lens, inputs.seq_lens, size.sequences)
        put(self._block_tables, inputs.block_tables)
        put(self._logits_indices, inputs.logits_indices, size.rows)
        for name, values in inputs.extra.items():
            put(self._extra[name], values, size.tokens)
        if self._state_rows is not None:
            put(self._state_rows, inputs.rows, size.sequences, self._max_num_seqs)
        self._stager.send()
        if inputs.sources is not None:
            self._backend.gather_tokens(self._input_ids[: size.tokens], self.last_tokens, self._sources[: size.tokens])
        if inputs.inputs_embeds is not None:
            self._stage_embeds(inputs, size)
        return Shape(size, adapted=adapted, replaced=inputs.inputs_embeds is not None)

    def _stage_embeds(self, inputs: StepInputs, size: StepShape) -> None:
        backend, values = self._backend, inputs.inputs_embeds
        assert values is not None
        if self._inputs_embeds is None:
            zeros = (backend.zeros((self._max_tokens, width)) for width in (1, values.shape[1]))
            self._inputs_embeds = InputsEmbeds(*zeros)
        mask, rows = np.ones((size.tokens, 1), np.float32), np.zeros((size.tokens, values.shape[1]), np.float32)
        mask[inputs.embed_indices], rows[inputs.embed_indices] = 0.0, values
        for target, staged in zip(self._inputs_embeds, (mask, rows), strict=True):
            backend.assign(target[: size.tokens], staged)

    def _compute(self, shape: Shape, sequences: int, lengths: StepLengths | None) -> ForwardOutput:
        """Compute what was staged; `sequences` and `lengths` are the step's own, without padding."""
        size, mode = shape.size, shape.size.graph_mode
        if mode == "full":
            hidden, logits, finite = self._graph(shape)()
        elif mode == "piecewise":
            hidden, logits, finite = self._graph(shape)(self._metadata(shape, sequences, lengths))
        else:
            hidden, logits, finite = self._build(shape, self._metadata(shape, size.sequences, lengths))
        return hidden, logits, finite

    def _graph(self, shape: Shape) -> Callable[..., Arrays]:
        size = shape.size
        if size.graph_mode == "piecewise":
            shape = shape._replace(size=size._replace(sequences=0))  # however many there are
        graph = self._graphs.get(shape)
        if graph is None:
            if size.graph_mode == "piecewise":
                graph = self._backend.piecewise_graph(lambda metadata: self._build(shape, metadata))
            else:
                graph = self._backend.graph(lambda: self._build(shape, self._metadata(shape, size.sequences, None)))
            self._graphs[shape] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
        return graph

    def _metadata(self, shape: Shape, sequences: int, lengths: StepLengths | None) -> AttentionMetadata:
        tokens, rows, embeds = shape.size.tokens, shape.size.rows, self._inputs_embeds
        groups = [
            (self._block_tables[group, :sequences], self._slot_mapping[group, :tokens])
            for group in range(self._num_groups)
        ]
        block_tables, slot_mapping = groups[0]
        sampled = self._logits_indices[:rows]
        return AttentionMetadata(
            cu_query_lens=self._cu_query_lens[: sequences + 1],
            seq_lens=self._seq_lens[:sequences],
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            # Where all tokens are sampled they are so in order.
            logits_indices=None if shape.all_hidden or rows == tokens else sampled,
            further=tuple(groups[1:]),
            token_types=self._extra["token_types"][:tokens] if self._extra else None,
            inputs_embeds=InputsEmbeds(*(x[:tokens] for x in embeds)) if embeds and shape.replaced else None,
            state_rows=None if self._state_rows is None else self._state_rows[:sequences],
            lengths=lengths,
            single=tokens == sequences,
        )

    def _build(self, shape: Shape, metadata: AttentionMetadata) -> ForwardOutput:
        (tokens, _, rows, _), all_hidden, adapted, _ = shape
        if self._lora is not None:
            self._lora.begin(tokens, rows, adapted)
        positions = self._positions[0, :tokens] if self._position_axes == 1 else self._positions[:, :tokens]
        hidden = self._model.forward(self._input_ids[:tokens], positions, self._caches, metadata)
        if isinstance(self._model, PoolingModel):
            return hidden, None, None
        if rows == 0:
            return hidden if all_hidden else None, None, None
        sampled = self._logits_indices[:rows]
        logits = self._model.compute_logits(self._backend.take_rows(hidden, sampled) if all_hidden else hidden)
        if self._lora is not None:
            logits = self._lora.limit(logits)
        return hidden if all_hidden else None, logits, self._backend.rows_finite(logits)


class GraphWarmUp:
    """Chooses batch sizes of decoding to capture before they occur: all up to the largest so far, and the next one."""

    def __init__(self, backend: Backend, max_num_seqs: int) -> None:
        self._backend, self._most = backend, max_num_seqs
        self._times: dict[int, int] = {}  # by size, how often it occurred
        self._widest = 0

    def add(self, size: StepShape) -> None:
        """Count a step of requests that was computed."""
        if self._backend.pads and size.graph_mode == "full":
            self._widest = max(self._widest, size.tokens)
            self._times[size.tokens] = self._times.get(size.tokens, 0) + 1

    def done(self, size: StepShape) -> None:
        """Count a size as captured."""
        self._times[size.tokens] = CAPTURED_AFTER

    def next_size(self) -> int | None:
        """Return a size that was not captured yet, smallest first; None if there is none."""
        batch = 1
        while self._widest and batch <= self._most:
            size = self._backend.step_shape(batch, batch, batch)
            tokens = min(size.tokens, self._most)
            if size.graph_mode != "full":
                return None
            if self._times.get(tokens, 0) < CAPTURED_AFTER:
                return tokens
            if tokens > self._widest:
                return None
            batch = tokens + 1
        return None


def dummy_inputs(num_groups: int, tokens: int, sequences: int, row: int) -> StepInputs:
    """Return the inputs of a step that writes nothing, its tokens divided among sequences of the batch's row `row`."""
    counts = np.full(sequences, tokens // max(sequences, 1))
    counts[:1] += tokens - counts.sum()
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


class SequenceStates:
    """The states of layers that keep one for each sequence instead of KV, in the sequence's row of the batch.

    A sequence keeps its row as long as the worker has it, so that the control plane needs neither blocks nor tables for
    states. A row's earlier contents do not matter: a sequence without computed tokens starts from zeros (see
    `AttentionMetadata.state_rows`), and one that is new to the worker has no computed tokens, since states cannot be
    reused.

    Attributes:
        arrays: for each layer with states, in order, its arrays [max_num_seqs, ...], with one row more for padding
            sequences if the backend pads steps. Memory is touched where rows are used, if the system allows.
    """

    def __init__(self, spec: KVCacheSpec, backend: Backend, max_num_seqs: int) -> None:
        self._backend = backend
        rows = max_num_seqs + backend.pads
        self.arrays: list[Arrays] = [
            tuple(backend.zeros((rows, *shape)) for shape in layer.shapes) for layer in spec.states
        ]

    def fork(self, forks: Sequence[ForkData], row_of: Mapping[str, int], *, samples: bool) -> None:
        """Copy parents' states to forks: before the step for forks of running sequences, after it for those that
        sample in it.
        """
        pairs = [(row_of[fork.parent_id], row_of[fork.sequence_id]) for fork in forks if fork.samples == samples]
        if pairs and self.arrays:
            rows = np.array(pairs, np.int64)
            for layer in self.arrays:
                for state in layer:
                    self._backend.copy_states(state, rows)


def new_slots(config: EngineConfig, info: ModelInfo, backend: Backend) -> LoRASlots:
    """Return the LoRA slots of a model that is about to be built."""
    options, limits = config.lora, config.scheduler
    return LoRASlots(
        backend,
        num_slots=options.max_loras,
        max_rank=options.max_lora_rank,
        vocab_size=info.vocab_size,
        extra_vocab=options.lora_extra_vocab_size,
        max_tokens=max(limits.max_num_batched_tokens, WARM_UP_TOKENS),
        max_rows=max(limits.max_num_seqs, PROMPT_LOGPROB_ROWS),
    )
