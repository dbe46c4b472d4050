"""Runs one step on one device: input batch -> model -> sampler -> `ModelOutput`.

Only what is common to every model belongs here. What a sequence may compute is the scheduler's business; how an op is
computed, the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from quire.kernels.backend import Array, Backend, KVCache, LayerCache
from quire.kernels.flying import LateTokens
from quire.kernels.layer_stream import LayerStream
from quire.lora.store import AdapterStore
from quire.models.pooling import PoolingModel
from quire.sampling.constraint import masked_logprobs
from quire.sampling.grammars import GrammarStore
from quire.sampling.processors import LogitsProcessorFactory
from quire.sampling.sampler import REFUSALS, Bitmask, Sampled, Sampler, SamplingBatch, pack_logprobs
from quire.step import (
    Done,
    ForkData,
    KVCacheGroup,
    LayerKVSpec,
    ModelOutput,
    Pending,
    SchedulerOutput,
    TokenTopLogprobs,
)
from quire.worker.disk_store import DiskStore
from quire.worker.graphs import PROMPT_LOGPROB_ROWS, WARM_UP_TOKENS, RunnableModel, StepGraphs
from quire.worker.guidance import Guidance, refuse
from quire.worker.in_flight import NOT_FINITE, FlyingStep, PostponedStep, Tokens
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.pooler import Pooler
from quire.worker.states import SequenceStates
from quire.worker.transfers import BlockTransfers

NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class _Ends:
    """Sequences whose last known token was computed: R of them, rows `rows` int64 [R] of the batch.

    `logits` [R, V] are of the tokens to come; `finite` bool [R], see `Backend.rows_finite`.
    """

    sequence_ids: list[str]
    rows: np.ndarray
    logits: Array
    finite: np.ndarray


def new_cache(backend: Backend, layer: LayerKVSpec, num_blocks: int, block_size: int) -> KVCache:
    """Allocate what a layer keeps of `num_blocks` blocks."""
    return backend.new_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_size, latent=layer.latent)


class ModelRunner:
    """Executes steps of one model on one backend.

    Args:
        groups: of layers that share block tables; by default those that `max_model_len` gives.
        num_blocks, block_size: of the KV cache; `num_host_blocks` of the pool in host memory.
        num_thin_blocks: of the last of these blocks the device keeps the first `num_resident_layers` layers only, see
            `kernels/layer_stream.py`; not with host blocks, a store, or more than one group.
        store: an open disk store for blocks, or None; it is closed by `close`.
        grammars: compiled ones; None where no sequence has any. jump_forward: see `Guidance`.
        processors: of logits, by name.
        adapters: LoRA adapters for the model's slots; closed by whoever made it.

    Raises:
        ConfigError: there is no room for the host's pool.
    """

    def __init__(
        self,
        model: RunnableModel,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        groups: list[KVCacheGroup] | None = None,
        num_host_blocks: int = 0,
        num_thin_blocks: int = 0,
        num_resident_layers: int = 0,
        store: DiskStore | None = None,
        grammars: GrammarStore | None = None,
        jump_forward: bool = True,
        processors: Mapping[str, LogitsProcessorFactory] | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.model = model
        self.adapters = adapters
        vocab_size = model.vocab_size + (0 if adapters is None else adapters.slots.extra_vocab)
        self.backend = backend
        self.sampler = Sampler(backend)
        groups = groups or model.kv_cache_spec().groups(max_model_len)
        self.guidance = Guidance(grammars, vocab_size=vocab_size, max_num_seqs=max_num_seqs, jump_forward=jump_forward)
        self.batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            vocab_size=vocab_size,
            num_groups=len(groups),
            guide_of=self.guidance.guide_of,
            processors=processors,
        )
        largest = max(groups, key=lambda group: len(group.layers)).layers
        resident = largest[:num_resident_layers] if num_thin_blocks else largest
        self.kv_caches = self._new_caches(resident, num_blocks, block_size)
        self.stream = self._new_stream(largest[len(resident) :], num_blocks, num_thin_blocks, block_size)
        self.transfers = BlockTransfers(backend, self.kv_caches, num_host_blocks, store, self.stream)
        self.pooler = Pooler(model, backend) if isinstance(model, PoolingModel) else None
        self.states = SequenceStates(model.kv_cache_spec(), backend, max_num_seqs)
        self.graphs = StepGraphs(
            model,
            backend,
            self._caches_of_layers(groups),
            max_tokens=max(max_num_batched_tokens, WARM_UP_TOKENS),
            max_num_seqs=max_num_seqs,
            max_blocks=self.batch.block_tables.shape[2],
            states=self.states.arrays,
            lora=None if adapters is None else adapters.slots,
            stream=self.stream,
        )
        self._flying: list[FlyingStep] = []
        self._ended = backend.mark()  # when the last step had been computed

    def _new_caches(self, indices: list[int], num_blocks: int, block_size: int) -> list[KVCache]:
        """Allocate one cache for each of these layers; a smaller group's layers share the first of them."""
        layers = self.model.kv_cache_spec().layers
        return [new_cache(self.backend, layers[index], num_blocks, block_size) for index in indices]

    def _new_stream(
        self, indices: list[int], num_blocks: int, num_thin_blocks: int, block_size: int
    ) -> LayerStream | None:
        """Allocate what streamed layers share; they are all alike."""
        if not indices:
            return None
        layer = self.model.kv_cache_spec().layers[indices[0]]
        return self.backend.layer_stream(
            len(indices), num_blocks, num_thin_blocks, block_size, layer.num_kv_heads, layer.head_size,
            latent=layer.latent,
        )  # fmt: skip

    def _caches_of_layers(self, groups: list[KVCacheGroup]) -> list[LayerCache]:
        """Say of each layer of the model, in order, where its keys and values go."""
        caches = {
            layer: LayerCache(cache, number)
            for number, group in enumerate(groups)
            for layer, cache in zip(group.layers, self.kv_caches, strict=False)
        }
        found = [caches[layer] for layer in sorted(caches)]
        return found + [LayerCache(layer.cache, 0, layer) for layer in (self.stream.layers if self.stream else ())]

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Apply the step's changes, compute its tokens, and sample where a sequence's last token was computed."""
        output = self._take_in(step)
        return self._compute(step, output) if step.num_scheduled_tokens else output

    def submit(self, step: SchedulerOutput) -> Pending:
        """Like `execute`, without waiting for the device: tokens stay there, and the next step begins with them.

        What the host has a part in is computed when its result is wanted, after what was begun before.
        """
        output = self._take_in(step)
        if not step.num_scheduled_tokens:
            return Done(output)
        for flying in self._flying[:-1]:
            flying.result()  # so that of each sequence one token is late at most
        inputs = self.batch.inputs(step.num_scheduled_tokens)
        if self._needs_host(inputs, step.forks):
            return PostponedStep(lambda: self._compute(step, output))
        flying = self._fly(inputs, output)
        self._flying = [*(other for other in self._flying if not other.landed), flying]
        return flying

    def _take_in(self, step: SchedulerOutput) -> ModelOutput:
        """Apply the step's changes; return what is to be filled in."""
        output = ModelOutput(sampled_token_ids={}, loaded=self.transfers.apply(step))
        self.batch.update(step)
        if self.pooler is not None:
            self.pooler.apply(step)
        self.states.fork(step.forks, self.batch.row_of, samples=False)
        return output

    def _needs_host(self, inputs: StepInputs, forks: list[ForkData]) -> bool:
        """Whether the host must see logits or tokens of this step, or the tokens before it, to compute it.

        Of options that go by tokens so far, some know what to do with one that is on the device, see `LateTokens`; ids
        that an adapter adds to the vocabulary are looked up on the host.
        """
        batch = self.batch
        if self.pooler is not None or any(fork.samples for fork in forks):
            return True
        if self.adapters is not None and self.adapters.slots.extra_vocab:
            return True
        sampled = inputs.sampled.tolist()
        for row, draws in zip(inputs.rows.tolist(), sampled, strict=True):
            extras = batch.extras[row]
            if extras is not None and ((draws and extras.needs_host) or self._is_scored(row)):
                return True
            if draws and (batch.guides[row] is not None or batch.num_candidates[row]):
                return True
        return False

    def _is_scored(self, row: int) -> bool:
        """Whether log-probabilities of its prompt are wanted that only this step, or a later one, can tell."""
        batch, extras = self.batch, self.batch.extras[row]
        wanted = extras is not None and extras.num_prompt_logprobs is not None
        return wanted and bool(batch.num_computed_tokens[row] < batch.num_prompt_tokens[row] - 1)

    def _fly(self, inputs: StepInputs, output: ModelOutput) -> FlyingStep:
        """Launch a step in which the host has no part."""
        batch = self.batch
        chosen = np.flatnonzero(inputs.sampled)
        last = inputs.cu_query_lens[1:][chosen].astype(np.int64) - 1
        slots = None if self.adapters is None else self.adapters.slots_of(batch.adapters[inputs.rows])
        inputs.sources = batch.source_of_ids(inputs)
        _, logits, finite = self.graphs.run(inputs, last, adapter_slots=slots)
        rows = inputs.rows[chosen]
        drawn = self._draw(rows, logits, finite)
        tokens = Tokens(
            [inputs.sequence_ids[index] for index in chosen.tolist()],
            rows,
            batch.births[rows],
            batch.append_unknown(rows),
        )
        return FlyingStep(output, batch, tokens, drawn, self._gap())

    def _draw(self, rows: np.ndarray, logits: Array | None, finite: Array) -> Callable[[], Sampled]:
        """Have a token drawn for each of `rows`, and kept on the device; return what waits for it."""
        backend, kept = self.backend, self.graphs.last_tokens
        if logits is None:
            ended = backend.fetch(kept[:1])
            return lambda: Sampled(ended(), {})

        def keep(tokens: Array) -> Array:
            return backend.keep_tokens(kept, backend.from_numpy(rows), tokens, finite)

        options = self._options(rows)
        if any(options.extras):
            options.late = LateTokens(kept, self.batch.late_places(rows))
            return self.sampler.start(logits, options, keep).finish
        fetched = backend.fetch(keep(self.sampler.draw(logits, options)))
        return lambda: Sampled(fetched(), {})

    def _gap(self) -> Callable[[], float]:
        """Note that a step was launched; return what says how long the device had to wait for it."""
        before, began, backend = self._ended, self.graphs.began, self.backend
        self._ended = backend.mark()
        return lambda: max(0.0, backend.seconds_between(before, began))

    def _options(self, rows: np.ndarray) -> SamplingBatch:
        """Return the options of rows, but for their grammars, and their tokens where options go by them."""
        batch, extras = self.batch, [self.batch.extras[row] for row in rows.tolist()]
        return SamplingBatch(
            temperature=batch.temperature[rows],
            top_k=batch.top_k[rows],
            top_p=batch.top_p[rows],
            min_p=batch.min_p[rows],
            seeds=batch.seeds[rows],
            positions=batch.num_tokens[rows],
            extras=extras,
            output_ids=[NO_IDS if own is None else batch.output_ids(row) for own, row in zip(extras, rows)],
        )

    def _compute(self, step: SchedulerOutput, output: ModelOutput) -> ModelOutput:
        """Compute a step whose changes were applied, after all that are in flight; return `output` with its results."""
        for flying in self._flying:
            flying.result()
        self._flying = []
        inputs = self.batch.inputs(step.num_scheduled_tokens)
        if self.pooler is not None:
            self._pool(inputs, output)
        else:
            self._generate(step, inputs, output)
        output.host_gap = self._gap()()
        return output

    def _generate(self, step: SchedulerOutput, inputs: StepInputs, output: ModelOutput) -> None:
        """Compute logits, and sample where a sequence's last token was computed."""
        chosen = np.flatnonzero(inputs.sampled)
        last = inputs.cu_query_lens[1:][chosen].astype(np.int64) - 1
        scored = any(self._is_scored(row) for row in inputs.rows.tolist())
        if self.batch.num_guided:
            forked = [self.batch.row_of[fork.sequence_id] for fork in step.forks if fork.samples]
            self.guidance.start([*inputs.rows[chosen].tolist(), *forked], self.batch)
        slots = None if self.adapters is None else self.adapters.slots_of(self.batch.adapters[inputs.rows])
        hidden, logits, finite = self.graphs.run(inputs, last, all_hidden=scored, adapter_slots=slots)
        self.states.fork(step.forks, self.batch.row_of, samples=True)
        if scored:
            output.prompt_logprobs = self._prompt_logprobs(hidden, inputs, slots)
        if logits is not None:
            sequence_ids = [inputs.sequence_ids[index] for index in chosen.tolist()]
            ends = _Ends(sequence_ids, inputs.rows[chosen], logits, self.backend.to_numpy(finite))
            self._go_on(ends, step.forks, output)

    def _pool(self, inputs: StepInputs, output: ModelOutput) -> None:
        """Compute hidden states in the place of logits, and make of them what was asked for."""
        assert self.pooler is not None
        rows, everything = self.pooler.rows(inputs)
        types = self.pooler.token_types(inputs)
        hidden, _, _ = self.graphs.run(inputs, rows, all_hidden=everything, token_types=types)
        self.pooler.take(inputs, hidden, output)

    def close(self) -> None:
        """Finish what is on its way to the disk."""
        self.transfers.close()
        self.guidance.close()

    def _go_on(self, ends: _Ends, forks: list[ForkData], output: ModelOutput) -> None:
        """Put a new token of each sequence into `output`: the beams' candidates, and what the others drew."""
        drawing = [fork for fork in forks if fork.samples]
        if drawing:
            ends = self._with_forks(ends, drawing)
        if not ends.finite.all():
            for index in np.flatnonzero(~ends.finite).tolist():
                output.errors[ends.sequence_ids[index]] = NOT_FINITE
        if self.batch.num_guided:
            for index, error in self.guidance.finish(ends.rows, self.batch).items():
                ends.finite[index] = False
                refuse(output, ends.sequence_ids[index], error)
        if self.batch.num_beams:
            beams = self.batch.num_candidates[ends.rows] > 0
            self._offer(self._only(ends, np.flatnonzero(beams & ends.finite)), output)
            ends = self._only(ends, np.flatnonzero(~beams))
        if ends.sequence_ids:
            self._sample(ends, output)

    def _with_forks(self, ends: _Ends, forks: list[ForkData]) -> _Ends:
        """Add sequences that draw from their parents' logits."""
        place_of = {sequence_id: place for place, sequence_id in enumerate(ends.sequence_ids)}
        parents = [place_of[fork.parent_id] for fork in forks]
        whole = self._only(ends, np.array([*range(len(place_of)), *parents], dtype=np.int64))
        for place, fork in enumerate(forks, start=len(place_of)):
            whole.sequence_ids[place] = fork.sequence_id
            whole.rows[place] = self.batch.row_of[fork.sequence_id]
        return whole

    def _only(self, ends: _Ends, places: np.ndarray) -> _Ends:
        """Return those at `places` int64 [n], in this order; one may be taken more than once."""
        return _Ends(
            [ends.sequence_ids[place] for place in places.tolist()],
            ends.rows[places],
            self.backend.take_rows(ends.logits, self.backend.from_numpy(places)),
            ends.finite[places],
        )

    def _offer(self, beams: _Ends, output: ModelOutput) -> None:
        """Put the most likely next tokens of beams into `output`, by the model's own distribution."""
        if not beams.sequence_ids:
            return
        numbers = np.minimum(self.batch.num_candidates[beams.rows], self.model.vocab_size).tolist()
        mask = self._mask(beams.rows)
        if mask is None:
            best = self.backend.top_logprobs(beams.logits, self.backend.greedy(beams.logits), max(numbers))
        else:
            best = masked_logprobs(self.backend, beams.logits, mask, max(numbers))
        top = best.fetch(self.backend)()
        for place, (sequence_id, number) in enumerate(zip(beams.sequence_ids, numbers, strict=True)):
            output.candidates[sequence_id] = pack_logprobs(top, place, number)

    def _mask(self, rows: np.ndarray) -> Bitmask | None:
        return self.guidance.mask(rows) if self.batch.num_guided else None

    def _sample(self, ends: _Ends, output: ModelOutput) -> None:
        """Draw a token for each sequence, and append it where logits are finite."""
        batch, rows = self.batch, ends.rows
        extras = [batch.extras[row] for row in rows.tolist()]
        temperature = batch.temperature[rows]
        mask = self._mask(rows)
        if mask is None and not any(extras) and not temperature.any():
            sampled = Sampled(self.backend.to_numpy(self.backend.greedy(ends.logits)), {})
        else:
            options = self._options(rows)
            options.mask = mask
            sampled = self.sampler.sample(ends.logits, options)
            for index, error in sampled.errors.items():
                if ends.finite[index]:
                    ends.finite[index] = False
                    refuse(output, ends.sequence_ids[index], error, at_fault=error in REFUSALS)
        batch.append(rows[ends.finite], sampled.token_ids[ends.finite])
        tokens, finite = sampled.token_ids.tolist(), ends.finite.tolist()
        for place, sequence_id in enumerate(ends.sequence_ids):
            if finite[place]:
                output.sampled_token_ids[sequence_id] = [tokens[place]]
                if place in sampled.logprobs:
                    output.logprobs[sequence_id] = [sampled.logprobs[place]]
                own = extras[place]
                if own is not None and own.state is not None:
                    output.sampler_states[sequence_id] = own.state
        if batch.num_guided:
            self.guidance.go_on(ends.sequence_ids, batch, output)

    def _prompt_logprobs(
        self, hidden: Array, inputs: StepInputs, slots: np.ndarray | None
    ) -> dict[str, list[TokenTopLogprobs]]:
        result: dict[str, list[TokenTopLogprobs]] = {}
        for index, row in enumerate(inputs.rows.tolist()):
            extras = self.batch.extras[row]
            if extras is None or extras.num_prompt_logprobs is None:
                continue
            computed = int(self.batch.num_computed_tokens[row])
            start = max(computed, extras.prompt_logprob_start - 1)
            stop = min(int(inputs.seq_lens[index]), int(self.batch.num_prompt_tokens[row]) - 1)
            if start >= stop:
                continue
            first = int(inputs.cu_query_lens[index]) + start - computed
            predicted = self.batch.token_ids[row, start + 1 : stop + 1].astype(np.int64)
            result[inputs.sequence_ids[index]] = self._score(
                hidden[first : first + stop - start],
                predicted,
                extras.num_prompt_logprobs,
                -1 if slots is None else int(slots[index]),
            )
        return result

    def _score(self, hidden: Array, predicted: np.ndarray, k: int, slot: int) -> list[TokenTopLogprobs]:
        """Log-probabilities of `predicted` [n] after each hidden row [n, H], and the k best ones; -1: of all.

        `slot` is that of the adapter that the rows have, -1 for none.
        """
        k = self.model.vocab_size if k < 0 else min(k, self.model.vocab_size)
        scores: list[TokenTopLogprobs] = []
        for start in range(0, len(predicted), PROMPT_LOGPROB_ROWS):
            piece = predicted[start : start + PROMPT_LOGPROB_ROWS]
            if self.adapters is not None:
                self.adapters.slots.begin_rows(np.full(len(piece), slot))
            logits = self.model.compute_logits(hidden[start : start + len(piece)])
            if self.adapters is not None:
                logits = self.adapters.slots.limit(logits)
            top = self.backend.top_logprobs(logits, self.backend.from_numpy(piece), k).fetch(self.backend)()
            scores.extend(pack_logprobs(top, row, k) for row in range(len(piece)))
        return scores
