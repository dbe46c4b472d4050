"""`Scheduler` plans steps and processes their results.

Which sequences a step computes is decided by a planner (`unified`, `prefill_first`), by means of `admission`; the live
requests are in `live`, the steps whose results are not known in `in_flight`. Here a result becomes final tokens, stops,
forks of beams and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, Protocol

from quire.config import EngineConfig
from quire.engine_request import EngineRequest
from quire.errors import ErrorData, QuireError
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.admission import Admission
from quire.scheduler.beam import BeamSearch, place
from quire.scheduler.in_flight import InFlight, ScheduledStep
from quire.scheduler.policy import make_policy
from quire.scheduler.prefill_first import PrefillFirstPlanner
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.scheduler.stop import check_stop, stop_reason
from quire.scheduler.unified import UnifiedPlanner
from quire.step import (
    STATS_COUNTERS,
    KVCacheGroup,
    ModelOutput,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
    TokenTopLogprobs,
)

_STOPPED = RequestStatus.FINISHED_STOPPED  # looked up once: enum attributes are slow, and tokens are many


class Planner(Protocol):
    """Decides which sequences a step computes, and how many tokens of each."""

    admission: Admission

    def refusal(self, request: Request) -> ErrorData | None:
        """Return why `request` can never run, or None."""

    def plan(self, step: ScheduledStep) -> None:
        """Schedule sequences in a step that has none yet."""

    def processed(self, step: ScheduledStep) -> None:
        """Take note of a step whose result is about to be processed."""


class Scheduler:
    """Plans steps for requests, and turns results of steps into outputs.

    Every plan of `schedule` that is not empty must reach the worker, and the results must be given to
    `update_from_output` in the same order; several steps may be in flight.

    Args:
        accepts_drafts: whether `propose` takes any.
    """

    def __init__(self, planner: Planner, *, accepts_drafts: bool = True) -> None:
        self.planner, self.admission = planner, planner.admission
        self._accepts_drafts = accepts_drafts
        self.kv, self.requests = self.admission.kv, self.admission.requests
        self._in_flight = InFlight()
        self._stats = self.admission.stats
        self._stats.num_blocks = self.kv.pool.num_blocks
        self._stats.num_layerwise_blocks = self.kv.pool.num_layerwise
        self._stats.num_host_blocks = self.kv.host.pool.num_blocks

    # ---- requests ----

    def add_request(self, request: Request) -> None:
        """Queue `request`. One that can never fit is answered with an "error" by the next `update_from_output`.

        Raises `RequestError` if a live request, or sequence, has the same id; one that was deferred has its own.
        """
        if request.status is not RequestStatus.DEFERRED:
            self.requests.check_ids(request)
        problem = self.planner.refusal(request)
        if problem is not None:
            self.requests.refuse(request, problem)
            return
        request.max_total_tokens = min(
            request.num_prompt_tokens + request.engine_request.max_tokens, self.admission.length_limit
        )
        if request.engine_request.beam is not None:
            max_tokens = request.max_total_tokens - request.num_prompt_tokens
            request.beam = BeamSearch(request.engine_request.beam, stop_ids=request.stop_ids, max_tokens=max_tokens)
        self.requests.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget these requests, or single sequences of them, and free their blocks at once.

        Ids that are not live are ignored. Yields no output.
        """
        aborted = dict.fromkeys(request_ids)  # in order, so that blocks are freed in the same order in every run
        for name in aborted:
            request, sequence = self.requests.get_request(name), self.requests.get_sequence(name)
            if request is not None:
                self.requests.finish(request, RequestStatus.FINISHED_ABORTED)
            elif sequence is not None:
                self._abort_sequence(sequence, name)
        self.requests.outputs = [output for output in self.requests.outputs if output.sequence_id not in aborted]

    def _abort_sequence(self, sequence: Sequence, sequence_id: str) -> None:
        request = sequence.request
        if request.is_forked:
            self.requests.finish_sequence(sequence)
            return
        request.aborted_ids.add(sequence_id)
        if request.aborted_ids.issuperset(request.engine_request.sequence_ids):
            self.requests.finish(request, RequestStatus.FINISHED_ABORTED)

    def has_requests(self) -> bool:
        """Whether outputs are to come: there are live requests, or refusals to be sent."""
        return bool(len(self.requests) or self.requests.outputs)

    def has_unfinished(self) -> bool:
        """Whether there is work: outputs to come, sequences to remove from the worker, or transfers.

        Deferred requests are none until they are added.
        """
        requests = self.requests
        return bool(
            len(requests) > len(requests.deferred)
            or requests.outputs
            or requests.finished_ids
            or self.kv.loads
            or self.kv.transfers
        )

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; return the number of blocks dropped. Running sequences are not disturbed."""
        return self.kv.reset_prefix_cache()

    # ---- planning ----

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, after those in flight."""
        step = ScheduledStep(self.admission.max_num_batched_tokens, self._in_flight, self.admission.clock())
        self.kv.start_step()
        self.planner.plan(step)
        finished_ids, self.requests.finished_ids = self.requests.finished_ids, []
        forks, self.requests.forks = self.requests.forks, []
        # No step waits for the disk while another is in flight: the result of that comes first.
        waits_for_loads = not self._in_flight and len(self.kv.loads) > 0
        plan = step.finish(finished_ids, forks, self.kv.take_transfers(), waits_for_loads=waits_for_loads)
        self._stats.num_steps += plan.total_num_scheduled_tokens > 0
        self._stats.num_scheduled_tokens += plan.total_num_scheduled_tokens
        if not plan.is_empty:
            self._in_flight.append(step)
        return plan

    def propose(self, sequence_id: str, token_ids: list[int]) -> int:
        """Let the next step verify drafts: tokens that may follow all those of a sequence, tentative ones included.

        They take the place of earlier drafts. Returns how many are taken: as many as leave room for the token that is
        sampled after them, and none unless the sequence is decoding, nor where a beam search, a grammar or a bound on
        reasoning decides what follows, nor of a model with recurrent states, which cannot go back. A step that lacks
        budget or blocks for drafts gives them up.
        """
        sequence = self.requests.get_sequence(sequence_id)
        if sequence is None or not self._accepts_drafts:
            return 0
        request = sequence.request
        sequence.drop_drafts()
        is_guided = request.engine_request.grammar is not None or request.engine_request.thinking is not None
        if (
            is_guided
            or not (request.samples_tokens and request.is_forked and sequence.on_worker)
            or sequence.num_uncomputed_tokens != 1
        ):
            return 0
        room = max(request.max_total_tokens - sequence.num_tokens - 1, 0)
        sequence.draft_token_ids = tuple(token_ids[:room])
        sequence.num_tentative_tokens += len(sequence.draft_token_ids)
        return len(sequence.draft_token_ids)

    def closing_plan(self) -> SchedulerOutput:
        """Return a last plan that writes to disk what is cached; an empty one without a disk tier.

        No step may be in flight: what it computes has its hashes already.
        """
        self.kv.store_all()
        plan = SchedulerOutput.empty()
        plan.transfers = self.kv.take_transfers()
        return plan

    # ---- results ----

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[SequenceOutput]:
        """Process the result of `plan`, the oldest step in flight; return one output per sequence that has any.

        Results of requests aborted meanwhile are dropped. An empty plan computes nothing; its outputs are those of
        requests that ended otherwise. Raises `QuireError` if a token is missing in the result.
        """
        outputs: list[SequenceOutput] = []
        if output.loaded:
            self._finish_loads(output.loaded)
        if output.failed_stores:
            self.kv.fail_stores(output.failed_stores)
        if not plan.is_empty:
            step = self._in_flight.pop(plan)
            self.planner.processed(step)
            if output.errors:
                self._forget_corrupt(step, output.errors)
            for sequence, max_sampled in step.scheduled:
                if sequence.is_live:
                    self._process(sequence, max_sampled, plan, output, outputs)
                else:
                    self._stats.num_discarded_tokens += plan.num_scheduled_tokens.get(sequence.sequence_id, 0)
        if self.requests.outputs:
            outputs, self.requests.outputs = self.requests.outputs + outputs, []
        return outputs

    def _forget_corrupt(self, step: ScheduledStep, errors: dict[str, ErrorData]) -> None:
        """Take what may be bad out of the prefix cache: KV of sequences whose logits were not finite.

        These may have been preempted, or have ended, since the step was planned.
        """
        failed = [sequence for sequence, _ in step.scheduled if sequence.sequence_id in errors]
        corrupt = [sequence for sequence in failed if not errors[sequence.sequence_id].refused]
        if corrupt:
            self.kv.forget(corrupt)

    def _finish_loads(self, loaded: dict[int, bool]) -> None:
        for block_id, succeeded in loaded.items():
            self.kv.finish_load(block_id, succeeded)
            for request in self.requests.loading:
                block_hash = request.loading.pop(block_id, None)
                if succeeded and block_hash is not None and request.loaded_hashes is not None:
                    request.loaded_hashes.add(block_hash)
        for request in [request for request in self.requests.loading if not request.loading]:
            self.requests.finish_loading(request)

    def _process(
        self,
        sequence: Sequence,
        max_sampled: int,
        plan: SchedulerOutput,
        output: ModelOutput,
        outputs: list[SequenceOutput],
    ) -> None:
        """Apply one sequence's results, and append its output, if it has any, to `outputs`.

        `max_sampled` is that of `ScheduledStep`. The sequence may have been preempted since the step was planned, and
        then waits with what it has.
        """
        request, sequence_id = sequence.request, sequence.sequence_id
        if output.errors and sequence_id in output.errors:
            self._fail(sequence, output.errors[sequence_id], outputs)
            return
        if not request.samples_tokens:
            if max_sampled and request.beam is not None:
                self._process_beam(sequence, output, outputs)
            elif max_sampled:
                self._process_pooled(sequence, output, outputs)
            return
        prompt_logprobs = None
        if output.prompt_logprobs and request.owes_prompt_logprobs and sequence_id in output.prompt_logprobs:
            start = sequence.num_computed_tokens - plan.num_scheduled_tokens.get(sequence_id, 0)
            prompt_logprobs = self._new_prompt_logprobs(request, start, output.prompt_logprobs[sequence_id])
        sampled = output.sampled_token_ids.get(sequence_id) or []
        if bool(sampled) != (max_sampled > 0):
            raise QuireError(f"the model returned {len(sampled)} tokens for {sequence!r}")
        status = None
        num_before, num_sampled = len(sequence.token_ids), len(sampled)
        for token_id in sampled:
            sequence.token_ids.append(token_id)
            status = check_stop(sequence, token_id)
            if status is not None:
                break
        num_taken = len(sequence.token_ids) - num_before
        complete = False
        if output.completed and status is not _STOPPED and num_taken == num_sampled:
            complete = sequence_id in output.completed
        if complete:
            status = _STOPPED  # also where it is as long as it may be: nothing is missing
        if output.sampler_states and sequence_id in output.sampler_states:
            sequence.sampler_state = output.sampler_states[sequence_id]
        if request.aborted_ids and sequence_id in request.aborted_ids and sampled:
            self.requests.finish_sequence(sequence)  # it was aborted, but the others needed it to compute their prompt
            return
        if num_taken or prompt_logprobs:
            logprobs = output.logprobs.get(sequence_id) if output.logprobs else None
            if num_taken < num_sampled:
                sampled, logprobs = sampled[:num_taken], logprobs and logprobs[:num_taken]
            entry = SequenceOutput(sequence_id, sampled, num_preemptions=request.num_preemptions)
            if not sequence.has_output:
                self._describe_admission(entry, sequence)
            if logprobs or prompt_logprobs:
                entry.logprobs, entry.prompt_logprobs = logprobs, prompt_logprobs
            entry.sampler_state = sequence.sampler_state
            if status is not None:
                entry.finish_reason = status.finish_reason
                entry.complete = complete and sampled[-1] not in request.stop_ids
                if status is _STOPPED and not complete:
                    entry.stop_reason = stop_reason(sequence)
            outputs.append(entry)
        if num_taken:
            if num_sampled == max_sampled and status is None:
                sequence.num_tentative_tokens -= max_sampled
            elif sequence.num_tentative_tokens or sequence.num_computed_tokens > num_before:
                self._roll_back(sequence, num_before + min(num_sampled, max_sampled) - 1)
            if sequence.num_computed_tokens > num_before:
                self.kv.commit(sequence, num_before)
        if status is not None:
            self.requests.finish_sequence(sequence)

    def _roll_back(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Give up the tentative tokens of `sequence`, and what is computed beyond `num_computed_tokens`.

        Results of later steps in flight for it are discarded.
        """
        sequence.num_tentative_tokens = 0
        sequence.draft_token_ids = ()
        num_discarded = max(sequence.num_computed_tokens - num_computed_tokens, 0)
        sequence.num_computed_tokens -= num_discarded
        self._stats.num_discarded_tokens += num_discarded
        self._in_flight.discard(sequence)

    def _process_pooled(self, sequence: Sequence, output: ModelOutput, outputs: list[SequenceOutput]) -> None:
        """Output what was pooled of a prompt, all of which is computed; that ends it."""
        entry = self._output(sequence, "stop")
        entry.pooled = output.pooled.get(sequence.sequence_id)
        if entry.pooled is None:
            raise QuireError(f"the model returned nothing for {sequence!r}")
        outputs.append(entry)
        self.requests.finish_sequence(sequence)

    def _fail(self, sequence: Sequence, error: ErrorData, outputs: list[SequenceOutput]) -> None:
        """End `sequence`, and all that depends on it, with an error."""
        request = sequence.request
        if request.beam is not None or not request.is_forked:
            status = RequestStatus.FINISHED_IGNORED if error.refused else RequestStatus.FINISHED_ERROR
            self.requests.finish(request, status, error)
            return
        entry = self._output(sequence, "error")
        entry.error = error
        outputs.append(entry)
        self.requests.finish_sequence(sequence)

    def _new_prompt_logprobs(
        self, request: Request, start: int, entries: list[TokenTopLogprobs]
    ) -> list[TokenTopLogprobs] | None:
        """Return those of `entries`, of the requested prompt positions from `start + 1` on, that were not sent.

        A sequence preempted within its prompt computes its first positions twice.
        """
        start = max(start, request.prompt_logprobs_after)
        fresh = entries[max(request.num_prompt_logprobs - start, 0) :]
        request.num_prompt_logprobs += len(fresh)
        return fresh or None

    def _output(self, sequence: Sequence, finish_reason: str, name: str | None = None) -> SequenceOutput:
        """Return a last output of `sequence`, without tokens."""
        entry = SequenceOutput(
            name or sequence.sequence_id,
            [],
            finish_reason=finish_reason,
            num_preemptions=sequence.request.num_preemptions,
        )
        if not sequence.has_output:
            self._describe_admission(entry, sequence)
        return entry

    def _describe_admission(self, entry: SequenceOutput, sequence: Sequence) -> None:
        """Add to the first output of a sequence how it was admitted."""
        sequence.has_output = True
        entry.num_cached_tokens = sequence.request.num_cached_tokens
        entry.first_scheduled_time = sequence.request.first_scheduled_time

    # ---- beams ----

    def _process_beam(self, sequence: Sequence, output: ModelOutput, outputs: list[SequenceOutput]) -> None:
        """Keep the candidates of one beam; once those of all are there, let the search choose how it goes on."""
        request = sequence.request
        assert request.beam is not None
        sequence.candidates = output.candidates.get(sequence.sequence_id)
        if sequence.candidates is None:
            raise QuireError(f"the model returned no candidates for {sequence!r}")
        candidates = [
            (beam.candidates.token_ids[1:], beam.candidates.logprobs[1:])
            for beam in request.sequences
            if beam.candidates is not None
        ]
        if len(candidates) < len(request.sequences):
            return
        step = request.beam.advance(candidates)
        if step.over:
            beams = request.beam.beams()
            entry = self._output(request.sequences[0], beams[0].finish_reason, request.request_id)
            entry.beams = beams
            outputs.append(entry)
            request.num_output_tokens = max(len(beam.token_ids) for beam in beams) * len(beams)
            self.requests.finish(request, RequestStatus.FINISHED_STOPPED)
        else:
            self._place_beams(request, step.running)

    def _place_beams(self, request: Request, running: list[tuple[int, int]]) -> None:
        """Make the sequences of `request` those of `running` (parent, token): best children in place, others forked."""
        parents = list(request.sequences)
        placement = place(running, len(parents))
        children: dict[int, Sequence] = {}
        for parent, child in placement.forks:
            source = parents[parent]
            children[child] = self.requests.fork(source, self._new_id(request), source.seed, samples=False)
        for parent, child in placement.in_place:
            children[child] = parents[parent]
        for parent in placement.ended:
            self.requests.remove(parents[parent])
        request.sequences = [children[child] for child in range(len(running))]
        for beam, (_, token_id) in zip(request.sequences, running, strict=True):
            beam.candidates = None
            beam.token_ids.append(token_id)
            beam.unsent_token_ids += (token_id,)

    def _new_id(self, request: Request) -> str:
        """Return an id for a further beam of `request` that no other sequence has."""
        while True:
            request.num_forks += 1
            sequence_id = f"{request.request_id}#{request.num_forks}"
            if self.requests.get_sequence(sequence_id) is None:
                return sequence_id

    # ---- observation ----

    def stats(self) -> SchedulerStats:
        """Return a snapshot; O(running)."""
        stats, requests = self._stats, self.requests
        stats.num_running = sum([len(request.sequences) for request in requests.running])
        stats.num_deferred = len(requests.deferred)
        stats.num_waiting = len(requests.waiting) + len(requests.loading) + stats.num_deferred
        stats.num_swapped = requests.waiting.num_swapped
        stats.num_free_blocks = self.kv.pool.num_free
        stats.num_free_layerwise_blocks = self.kv.pool.num_free_layerwise
        stats.num_free_host_blocks = self.kv.host.pool.num_free
        stats.num_stored_blocks = len(self.kv.disk)
        if self.admission.max_loras:
            stats.running_adapters = _adapter_names(requests.running)
            stats.waiting_adapters = _adapter_names([*requests.waiting, *requests.loading, *requests.deferred])
        return copy(stats)

    def restore_counters(self, before: SchedulerStats) -> None:
        """Go on from the counters of a scheduler that this one replaces."""
        for name in STATS_COUNTERS:
            setattr(self._stats, name, getattr(before, name))

    def note_step(self, seconds: float, host_gap: float) -> None:
        """Count the time that a step took, and for how much of it the device waited for the host."""
        self._stats.step_seconds += seconds
        self._stats.host_gap_seconds += host_gap

    def check_integrity(self) -> None:
        """Raise `QuireError` on a broken invariant, between steps; costs O(blocks + requests)."""
        self.requests.check_integrity(self.admission.max_num_seqs)
        num_tables = 0
        for request in self.requests.running:
            for sequence in request.sequences:
                num_slots = len(self.kv.block_ids(sequence.sequence_id)[0]) * self.kv.block_size
                num_tables += num_slots > 0
                if num_slots < sequence.num_computed_tokens:
                    raise QuireError(f"{sequence!r} has {num_slots} slots")
            if request.num_uncomputed_tokens == 0 and not self._in_flight:
                raise QuireError(f"{request!r} has nothing to compute")
        for request in self.requests:
            for sequence in request.sequences:
                num_drafts = len(sequence.draft_token_ids)
                if sequence.num_tentative_tokens < num_drafts or (
                    sequence.num_tentative_tokens > num_drafts and sequence not in self._in_flight
                ):
                    raise QuireError(f"{sequence!r} has {sequence.num_tentative_tokens} tentative tokens")
        if len(self.kv.tables) != num_tables:
            raise QuireError(f"{len(self.kv.tables)} block tables for {num_tables} running sequences")
        self.kv.check_integrity()


def _adapter_names(requests: Iterable[Request]) -> list[str]:
    """Return the names of their LoRA adapters."""
    return sorted(
        {request.engine_request.lora.lora_name for request in requests if request.engine_request.lora is not None}
    )


def create_scheduler(
    config: EngineConfig,
    groups: list[KVCacheGroup],
    *,
    num_blocks: int,
    max_model_len: int,
    clock: Callable[[], float],
    whole_prompts: bool = False,
    accepts_drafts: bool = True,
    on_finished: Callable[[EngineRequest], None] | None = None,
    **tier_options: Any,
) -> Scheduler:
    """Return the scheduler that a config describes over a new block manager; `groups` are `KVCacheSpec.groups`.

    `tier_options` are those of `KVCacheManager` that the config does not say, the others as for `Admission`,
    `UnifiedPlanner` and `Scheduler`.
    """
    cache, options = config.cache, config.scheduler
    kv = KVCacheManager(
        num_blocks,
        cache.block_size,
        windows=[group.sliding_window for group in groups],
        max_step_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=cache.enable_prefix_caching is not False,
        prefix_match_unit=cache.prefix_match_unit,
        deduplicate_blocks=options.scheduler == "prefill-first",
        **tier_options,
    )
    admission = Admission(
        kv,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        policy=make_policy(options.scheduling_policy, ageing=options.priority_ageing, weights=options.tenant_weights),
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        watermark=options.watermark,
        preemption_mode=options.preemption_mode,
        clock=clock,
        max_loras=config.lora.max_loras if config.lora.enable_lora else 0,
    )
    planner: Planner
    if options.scheduler == "prefill-first":
        planner = PrefillFirstPlanner(admission, delay_factor=options.delay_factor)
    else:
        planner = UnifiedPlanner(
            admission, max_overtake_seconds=options.max_overtake_seconds, whole_prompts=whole_prompts
        )
    scheduler = Scheduler(planner, accepts_drafts=accepts_drafts)
    scheduler.requests.on_finished = on_finished
    return scheduler
