"""`ModelRunner`: executes steps on one device. Inputs (`input_batch.py`), forward (`graphs.py`), logits to tokens.

Only what is common to every model belongs here. What a sequence may compute is the scheduler's business; how an op is
computed, the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from quire.errors import ErrorData, GenerationError
from quire.kernels.backend import Array, Backend, DeviceTokens, KVCache, LayerCache, LayerwiseOffload
from quire.lora.store import AdapterStore
from quire.models.interface import Model
from quire.models.pooling import PoolingModel
from quire.sampling.grammars import GrammarStore
from quire.sampling.metadata import Bitmask
from quire.sampling.processors import LogitsProcessorFactory
from quire.sampling.sampler import PendingSample, Sampler, SamplerOutput, pack_logprobs
from quire.step import (
    ForkData,
    KVCacheGroup,
    LayerKVSpec,
    ModelOutput,
    PendingOutput,
    SchedulerOutput,
    TokenTopLogprobs,
)
from quire.worker.disk_store import DiskStore
from quire.worker.graphs import PROMPT_LOGPROB_ROWS, WARM_UP_TOKENS, SequenceStates, StepGraphs
from quire.worker.guidance import Guidance, masked_logprobs
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.pooler import Pooler
from quire.worker.transfers import BlockTransfers

NOT_FINITE = ErrorData.of(GenerationError("the model produced logits that are not finite"))


@dataclass(slots=True)
class LogitsRows:
    """R rows of logits [R, V], and for each: its sequence, row of the batch int64 [R], and draft tokens before it.

    `num_drafts` int64 [R] is 0 for the row after a sequence's last token, i for the row after its i-th draft token.
    `finite` bool [R] of the backend, see `Backend.rows_finite`.
    """

    sequence_ids: list[str]
    rows: np.ndarray
    num_drafts: np.ndarray
    logits: Array
    finite: Array

    def take(self, backend: Backend, indices: np.ndarray) -> LogitsRows:
        """Return those at `indices` int64 [n], in this order; one may be taken more than once."""
        places = backend.from_numpy(indices)
        return LogitsRows(
            [self.sequence_ids[index] for index in indices.tolist()],
            self.rows[indices],
            self.num_drafts[indices],
            backend.take_rows(self.logits, places),
            self.finite[places],
        )


class RunningStep:
    """One step from its submission to its result; see `step.PendingOutput`.

    Attributes:
        plan, output: what was submitted, and what is known of its result.
        overlaps: whether it is launched when it is submitted; otherwise the host has a part in it, and it is computed
            when its result is taken, after the steps before it.
        sequence_ids, rows, positions, num_drafts: of the rows of logits that tokens are sampled from, see `LogitsRows`;
            the tokens' positions in their sequences.
        drafts: int32 [R], the draft token before each row with `num_drafts`; None where no row has any.
        valid: bool [R], False for rows of the batch that the sequence has left since.
        sample: the tokens on the device; None before the launch, or where the step samples nothing.
        host_gap: waits for the step to end and returns `ModelOutput.host_gap`.
    """

    def __init__(self, finish: Callable[[RunningStep], None], plan: SchedulerOutput, output: ModelOutput) -> None:
        self._finish: Callable[[RunningStep], None] | None = finish
        self._error: BaseException | None = None
        self.plan, self.output = plan, output
        self.overlaps = False
        self.launched = False
        self.sequence_ids: list[str] = []
        self.rows = self.positions = self.num_drafts = np.zeros(0, dtype=np.int64)
        self.drafts: np.ndarray | None = None
        self.valid = np.zeros(0, dtype=bool)
        self.sample: PendingSample | None = None
        self.host_gap: Callable[[], float] = float

    def invalidate(self, sequence_ids: Collection[str]) -> None:
        """Note that sequences have left the batch, so that their rows may be others' now."""
        for index, sequence_id in enumerate(self.sequence_ids):
            if sequence_id in sequence_ids:
                self.valid[index] = False

    def result(self) -> ModelOutput:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                finish(self)
            except BaseException as error:
                self._error = error  # for callers that take the result again
                raise
        if self._error is not None:
            raise self._error
        return self.output


def new_cache(backend: Backend, layer: LayerKVSpec, num_blocks: int, block_size: int) -> KVCache:
    """Allocate what a layer keeps of `num_blocks` blocks."""
    return backend.new_kv_cache(num_blocks, block_size, layer.num_kv_heads, layer.head_size, latent=layer.latent)


class ModelRunner:
    """Executes steps of one model on one backend.

    Args:
        groups: of layers that share block tables; by default those that `max_model_len` gives.
        num_blocks, block_size: of the KV cache; `num_host_blocks` of the pool in host memory.
        num_layerwise_blocks: of the last of these blocks only the first `num_resident_layers` layers are resident, see
            `LayerwiseOffload`; not with host blocks, a store, or more than one group.
        store: an open disk store for blocks, or None; it is closed by `close`.
        grammars: compiled ones; None where no sequence has any. jump_forward: see `Guidance`.
        processors: of logits, by name.
        adapters: LoRA adapters for the model's slots; closed by whoever made it.

    Raises:
        ConfigError: there is no room for the host's pool.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        groups: list[KVCacheGroup] | None = None,
        num_host_blocks: int = 0,
        num_layerwise_blocks: int = 0,
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
        resident = largest[:num_resident_layers] if num_layerwise_blocks else largest
        self.kv_caches = self._new_caches(resident, num_blocks, block_size)
        self.offload = self._new_offload(largest[len(resident) :], num_blocks, num_layerwise_blocks, block_size)
        self.transfers = BlockTransfers(backend, self.kv_caches, num_host_blocks, store, self.offload)
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
            offload=self.offload,
        )
        self._in_flight: list[RunningStep] = []  # oldest first; all but the last one have been launched
        self._ended = backend.record_event()  # when the last step had been computed

    def _new_caches(self, indices: list[int], num_blocks: int, block_size: int) -> list[KVCache]:
        """Allocate one cache for each of these layers; a smaller group's layers share the first of them."""
        layers = self.model.kv_cache_spec().layers
        return [new_cache(self.backend, layers[index], num_blocks, block_size) for index in indices]

    def _new_offload(
        self, indices: list[int], num_blocks: int, num_layerwise_blocks: int, block_size: int
    ) -> LayerwiseOffload | None:
        """Allocate the caches of layers that are not resident; they are all alike."""
        if not indices:
            return None
        layer = self.model.kv_cache_spec().layers[indices[0]]
        return self.backend.layerwise_offload(
            len(indices),
            num_blocks,
            num_layerwise_blocks,
            block_size,
            layer.num_kv_heads,
            layer.head_size,
            latent=layer.latent,
        )

    def _caches_of_layers(self, groups: list[KVCacheGroup]) -> list[LayerCache]:
        """Say of each layer of the model, in order, where its keys and values go."""
        caches = {
            layer: LayerCache(cache, number)
            for number, group in enumerate(groups)
            for layer, cache in zip(group.layers, self.kv_caches, strict=False)
        }
        found = [caches[layer] for layer in sorted(caches)]
        offloaded = [] if self.offload is None else self.offload.caches
        return found + [LayerCache(cache, 0, self.offload, number) for number, cache in enumerate(offloaded)]

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Apply the step's changes and begin to compute it.

        Sampled tokens stay on the device, and the next step starts from them there, unless the host has a part in one
        of the two.
        """
        leaving = {*plan.finished_sequence_ids, *plan.preempted_sequence_ids}
        for earlier in self._in_flight if leaving else ():
            earlier.invalidate(leaving)
        transfers = self.transfers
        output = ModelOutput({}, loaded=transfers.apply(plan), failed_stores=transfers.take_failed_stores())
        self.batch.update(plan)
        if self.pooler is not None:
            self.pooler.apply(plan)
        self.states.fork(plan.forks, self.batch.row_of, samples=False)
        if not plan.num_scheduled_tokens:
            return output
        while len(self._in_flight) > 1 or (self._in_flight and not self._in_flight[0].launched):
            self._in_flight[0].result()  # so that the host knows all tokens of a sequence but one
        step = RunningStep(self._finish, plan, output)
        step.overlaps = not self._needs_host(plan)
        if step.overlaps or not self._in_flight:
            self._launch(step)
        self._in_flight.append(step)
        return step

    def _needs_host(self, plan: SchedulerOutput) -> bool:
        """Whether the host must see logits or tokens of this step, or the tokens before it, to compute it.

        Of options that depend on earlier tokens, some can take the last one from the device, see `DeviceTokens`; ids
        that an adapter adds to the vocabulary are looked up on the host. Draft tokens are verified there, and as fewer
        tokens than planned may become final, no later step may count on them.
        """
        batch = self.batch
        if self.pooler is not None or batch.has_drafts or any(fork.samples for fork in plan.forks):
            return True
        if self.adapters is not None and self.adapters.slots.extra_vocab:
            return True
        states = batch.sampling.states
        if not (states or batch.guides or batch.num_candidates):
            return False
        for sequence_id, count in plan.num_scheduled_tokens.items():
            row = batch.row_of[sequence_id]
            needs_host = (
                row in batch.guides or row in batch.num_candidates or (row in states and states[row].needs_host)
            )
            if needs_host and batch.num_computed_tokens[row] + count >= batch.num_tokens[row]:
                return True
            if self._scores_prompt(row):
                return True
        return False

    def _scores_prompt(self, row: int) -> bool:
        """Whether log-probabilities of the row's prompt are requested that this step, or a later one, computes."""
        batch, state = self.batch, self.batch.sampling.states.get(row)
        requested = state is not None and state.num_prompt_logprobs is not None
        return requested and bool(batch.num_computed_tokens[row] < batch.num_prompt_tokens[row] - 1)

    def _launch(self, step: RunningStep) -> None:
        """Compute a step up to its samples, which the device may still be working on afterwards."""
        step.launched = True
        inputs = self.batch.inputs(step.plan.num_scheduled_tokens)
        if self.pooler is not None:
            self._pool(inputs, step.output)
        else:
            self._generate(step, inputs)
        before, started, backend = self._ended, self.graphs.started, self.backend
        self._ended = backend.record_event()
        step.host_gap = lambda: max(0.0, backend.elapsed_seconds(before, started))

    def _pool(self, inputs: StepInputs, output: ModelOutput) -> None:
        """Compute hidden states instead of logits, and pool them."""
        assert self.pooler is not None
        inputs.logits_indices, everything = self.pooler.rows(inputs)
        inputs.extra = self.pooler.extra_inputs(inputs)
        hidden, _, _ = self.graphs.run(inputs, all_hidden=everything)
        self.pooler.pool(inputs, hidden, output)

    def _generate(self, step: RunningStep, inputs: StepInputs) -> None:
        """Compute logits, and launch the samples of sequences whose last token is computed."""
        batch, output = self.batch, step.output
        forks = [fork for fork in step.plan.forks if fork.samples]
        on_device = self._tokens_on_device(inputs)
        scores_prompts = not step.overlaps and any(map(self._scores_prompt, inputs.rows.tolist()))
        sampled = np.flatnonzero(inputs.num_logits)
        if batch.guides:
            forked = [batch.row_of[fork.sequence_id] for fork in forks]
            self.guidance.start([*inputs.rows[sampled].tolist(), *forked], batch)
        if self.adapters is not None:
            inputs.adapter_slots = self.adapters.slots_of(batch.adapters[inputs.rows])
        hidden, logits, finite = self.graphs.run(inputs, all_hidden=scores_prompts)
        self.states.fork(step.plan.forks, batch.row_of, samples=True)
        if scores_prompts:
            output.prompt_logprobs = self._prompt_logprobs(hidden, inputs)
        if logits is None:
            step.sample = PendingSample(self.backend.fetch(self.graphs.last_tokens[:1]))  # anything that comes after it
            return
        of_rows = np.repeat(sampled, inputs.num_logits[sampled])
        rows = LogitsRows(
            [inputs.sequence_ids[index] for index in of_rows.tolist()],
            inputs.rows[of_rows],
            inputs.logits_indices - inputs.logits_indices[np.searchsorted(of_rows, of_rows)],
            logits,
            finite,
        )
        if forks:
            rows = self._with_forks(rows, forks)
        if batch.guides:
            for index, error in self.guidance.finish(rows.rows, batch).items():
                output.errors[rows.sequence_ids[index]] = error
        if batch.num_candidates:
            rows = self._without_beams(rows, output)
        if rows.sequence_ids:
            self._sample(step, rows, on_device)

    def _tokens_on_device(self, inputs: StepInputs) -> np.ndarray | None:
        """Return which rows of the batch have a last token that only the device knows, bool; None for none.

        Inputs that are such tokens are marked in `inputs.sources`.
        """
        found: np.ndarray | None = None
        for earlier in self._in_flight:
            rows = earlier.rows[earlier.valid]
            if rows.size:
                found = np.zeros(len(self.batch.num_tokens), dtype=bool)
                found[rows] = True
        if found is None:
            return None
        unknown = (inputs.num_logits > 0) & found[inputs.rows]
        if unknown.any():
            inputs.sources = np.arange(len(inputs.input_ids)) + len(found)
            inputs.sources[inputs.cu_query_lens[1:][unknown] - 1] = inputs.rows[unknown]
        return found

    def _with_forks(self, rows: LogitsRows, forks: list[ForkData]) -> LogitsRows:
        """Add sequences that sample from their parents' logits."""
        index_of: dict[str, int] = {}
        for index, sequence_id in enumerate(rows.sequence_ids):
            index_of.setdefault(sequence_id, index)
        parents = [index_of[fork.parent_id] for fork in forks]
        number = len(rows.sequence_ids)
        found = rows.take(self.backend, np.array([*range(number), *parents], dtype=np.int64))
        for index, fork in enumerate(forks, start=number):
            found.sequence_ids[index] = fork.sequence_id
            found.rows[index] = self.batch.row_of[fork.sequence_id]
        return found

    def _without_beams(self, rows: LogitsRows, output: ModelOutput) -> LogitsRows:
        """Put the most likely next tokens of beams into `output`; return the rows of other sequences."""
        is_beam = np.isin(rows.rows, list(self.batch.num_candidates))
        beams = np.flatnonzero(is_beam)
        finite = self.backend.to_numpy(rows.finite)[beams]
        for index in beams[~finite].tolist():
            output.errors.setdefault(rows.sequence_ids[index], NOT_FINITE)
        beams = np.array([i for i in beams[finite].tolist() if rows.sequence_ids[i] not in output.errors], np.int64)
        if beams.size:
            self._candidates(rows.take(self.backend, beams), output)
        return rows.take(self.backend, np.flatnonzero(~is_beam))

    def _candidates(self, beams: LogitsRows, output: ModelOutput) -> None:
        numbers = [min(self.batch.num_candidates[row], self.model.vocab_size) for row in beams.rows.tolist()]
        bitmask = self._bitmask(beams.rows)
        if bitmask is None:
            best = self.backend.top_logprobs(beams.logits, self.backend.greedy(beams.logits), max(numbers))
        else:
            best = masked_logprobs(self.backend, beams.logits, bitmask, max(numbers))
        top = best.fetch(self.backend)()
        for index, (sequence_id, number) in enumerate(zip(beams.sequence_ids, numbers, strict=True)):
            output.candidates[sequence_id] = pack_logprobs(top, index, number)

    def _bitmask(self, rows: np.ndarray) -> Bitmask | None:
        return self.guidance.bitmask(rows) if self.batch.guides else None

    def _sample(self, step: RunningStep, rows: LogitsRows, on_device: np.ndarray | None) -> None:
        """Launch the sampling of a token from each row, and append placeholders for the sequences' next tokens."""
        batch, backend = self.batch, self.backend
        positions = batch.num_tokens[rows.rows] + rows.num_drafts
        metadata = batch.sampling.metadata(rows.rows, positions, batch.output_ids)
        metadata.bitmask = self._bitmask(rows.rows)
        if on_device is not None and on_device[rows.rows].any():
            metadata.device_tokens = DeviceTokens(
                self.graphs.last_tokens, np.where(on_device[rows.rows], rows.rows, -1)
            )
        indices = backend.from_numpy(rows.rows)
        step.sample = self.sampler.start(
            rows.logits,
            metadata,
            lambda tokens: backend.store_tokens(self.graphs.last_tokens, indices, tokens, rows.finite),
        )
        step.sequence_ids, step.rows, step.num_drafts = rows.sequence_ids, rows.rows, rows.num_drafts
        step.positions = positions
        if rows.num_drafts.any():
            step.drafts = batch.token_ids[rows.rows, positions - 1]
        step.valid = np.ones(len(rows.rows), dtype=bool)
        batch.append_placeholders(rows.rows[rows.num_drafts == 0])

    def _finish(self, step: RunningStep) -> None:
        """Wait for a step, and for those before it; put what it sampled into its output and the batch."""
        try:
            while self._in_flight[0] is not step:
                self._in_flight[0].result()
        finally:
            self._in_flight.remove(step)
        if not step.launched:
            self._launch(step)
        if step.sample is not None:
            sampled = step.sample.finish()
            if step.sequence_ids:
                self._commit(step, sampled)
        step.output.host_gap = step.host_gap()

    def _commit(self, step: RunningStep, sampled: SamplerOutput) -> None:
        """Put sampled tokens into a step's output and the batch: each sequence's first, and those that drafts confirm.

        The row after a draft token was computed with that token in its context: its sample counts if the draft is what
        was sampled in its place. Draws are keyed by seed and position, so that drafts change no bit of the output.
        """
        batch, output, tokens = self.batch, step.output, sampled.token_ids.tolist()
        first = step.valid & (step.num_drafts == 0)
        batch.fill_placeholders(step.rows[first], step.positions[first], np.maximum(sampled.token_ids[first], 0))
        num_drafts = None if step.drafts is None else step.num_drafts.tolist()
        confirmed = True
        for index, (sequence_id, token) in enumerate(zip(step.sequence_ids, tokens, strict=True)):
            if num_drafts is not None and num_drafts[index]:
                assert step.drafts is not None
                confirmed = confirmed and tokens[index - 1] == step.drafts[index] and token >= 0
                if not confirmed:
                    continue
                batch.append_tokens(int(step.rows[index]), [token])
                output.sampled_token_ids[sequence_id].append(token)
            elif token < 0 or index in sampled.errors or sequence_id in output.errors:
                confirmed = False
                output.errors.setdefault(sequence_id, sampled.errors.get(index, NOT_FINITE))
                continue
            else:
                confirmed = True
                output.sampled_token_ids[sequence_id] = [token]
            if index in sampled.logprobs:
                output.logprobs.setdefault(sequence_id, []).append(sampled.logprobs[index])
        if batch.sampling.states:
            for sequence_id, row in zip(step.sequence_ids, np.where(step.valid, step.rows, -1).tolist(), strict=True):
                state = batch.sampling.states.get(row)
                if state is not None and state.sampler_state is not None and sequence_id in output.sampled_token_ids:
                    output.sampler_states[sequence_id] = state.sampler_state
        if batch.guides and not step.overlaps:
            self.guidance.advance(step.sequence_ids, batch, output)

    def close(self) -> None:
        """Finish transfers to the disk and end threads."""
        self.transfers.close()
        self.guidance.close()

    def _prompt_logprobs(self, hidden: Array, inputs: StepInputs) -> dict[str, list[TokenTopLogprobs]]:
        result: dict[str, list[TokenTopLogprobs]] = {}
        for index, row in enumerate(inputs.rows.tolist()):
            state = self.batch.sampling.states.get(row)
            if state is None or state.num_prompt_logprobs is None:
                continue
            computed = int(self.batch.num_computed_tokens[row])
            start = max(computed, (state.params.prompt_logprob_start or 0) - 1)
            stop = min(int(inputs.seq_lens[index]), int(self.batch.num_prompt_tokens[row]) - 1)
            if start >= stop:
                continue
            first = int(inputs.cu_query_lens[index]) + start - computed
            predicted = self.batch.token_ids[row, start + 1 : stop + 1].astype(np.int64)
            result[inputs.sequence_ids[index]] = self._score(
                hidden[first : first + stop - start],
                predicted,
                state.num_prompt_logprobs,
                -1 if inputs.adapter_slots is None else int(inputs.adapter_slots[index]),
            )
        return result

    def _score(self, hidden: Array, predicted: np.ndarray, k: int, slot: int) -> list[TokenTopLogprobs]:
        """Return log-probabilities of `predicted` [n] after each hidden row [n, H], and the k best ones; -1: all.

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
