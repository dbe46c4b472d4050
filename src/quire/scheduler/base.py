"""`BaseScheduler`: the two halves of a step that all schedulers share: sending off a plan, and taking in its results.

`schedule` and `update_from_output` alternate, or, where a step may be planned before the one before has ended, are one
step apart (`flight.py`). What goes into a plan is decided in the subclasses:
`scheduler.Scheduler` and `prefill_first.PrefillFirstScheduler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import copy

from quire.errors import QuireError
from quire.scheduler.beam import place
from quire.scheduler.flight import Flight, Flights
from quire.scheduler.plan import Plan
from quire.scheduler.policy import BY_ORDER
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.scheduler.stop import check_stop, stop_reason
from quire.step import (
    UNKNOWN_TOKEN,
    ForkData,
    ModelOutput,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
    TokenTopLogprobs,
)

_RUNNING = RequestStatus.RUNNING  # looked up once: enum attributes are slow, and these are on the path of every token
_STOPPED = RequestStatus.FINISHED_STOPPED


class BaseScheduler(Flights, ABC):
    """Plans steps and takes in their results; see `RequestLives` for the arguments."""

    # ---- sending off ----

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, beside the one in flight if there is one. One that is not empty must reach the worker."""
        flight = self._flight
        if flight is not None:
            self._take_off()
        self.kv.start_step()
        plan = Plan(self.max_num_batched_tokens)
        self._plan(plan)
        total = plan.most_tokens - plan.budget
        self._stats.num_steps += total > 0
        self._stats.num_scheduled_tokens += total
        finished_ids, self._finished_ids = self._finished_ids, []
        forks, self._forks = self._forks, []
        # Nobody waits for the disk while a step is in flight: its own result comes first.
        waits = flight is None and self.kv.num_loading > 0
        output = plan.finish(finished_ids, forks, self.kv.take_transfers(), loading=waits)
        if flight is not None:
            flight.ahead = output
        self._num_under_way += 1
        return output

    @abstractmethod
    def _plan(self, plan: Plan) -> None:
        """Decide who computes how many tokens."""

    def closing_plan(self) -> SchedulerOutput:
        """Return a last plan that writes to disk what is cached; an empty one without a disk tier."""
        self.kv.store_all()
        plan = Plan(self.max_num_batched_tokens)
        return plan.finish([], [], self.kv.take_transfers(), loading=False)

    # ---- taking in the results ----

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[SequenceOutput]:
        """Take in what the model made of `plan`; return the news, one entry per sequence that has any.

        Results of requests aborted meanwhile are dropped. Raises `QuireError` if the model left out a token it owed.
        """
        self._num_under_way -= 1
        if output.loaded:
            self._finish_loads(output.loaded)
        news: list[SequenceOutput] = []
        flight = self._flight
        if flight is not None and flight.plan is plan:
            self._flight = None
        if flight is not None and flight.plan is plan and flight.ahead is not None:
            self._land(flight, output, news)
        else:
            self._take_results(plan, output, news)
        if self._news:
            news, self._news = self._news + news, []
        return news

    def _take_results(self, plan: SchedulerOutput, output: ModelOutput, news: list[SequenceOutput]) -> None:
        for sequence_id, num_scheduled in plan.num_scheduled_tokens.items():
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence.request.status is _RUNNING:
                self._advance(sequence, num_scheduled, output, news)
            else:
                self._stats.num_discarded_tokens += num_scheduled
        for fork in plan.forks:
            if fork.samples:
                sequence = self._sequences.get(fork.sequence_id)
                if sequence is not None and sequence.request.status is _RUNNING:
                    self._advance(sequence, 0, output, news)

    def _land(self, flight: Flight, output: ModelOutput, news: list[SequenceOutput]) -> None:
        """Take in the results of a step beside which the next one was planned."""
        for sequence_id in flight.plan.num_scheduled_tokens:
            sequence = flight.flown.get(sequence_id)
            if sequence is None or self._sequences.get(sequence_id) is not sequence:
                self._stats.num_discarded_tokens += flight.plan.num_scheduled_tokens[sequence_id]
                continue
            self._settle(sequence, flight, output, news)

    def _settle(self, sequence: Sequence, flight: Flight, output: ModelOutput, news: list[SequenceOutput]) -> None:
        """Put the token where `UNKNOWN_TOKEN` stands, and see whether it ends the sequence.

        That may have been preempted when the next step was planned, and then waits with what it has.
        """
        sequence_id, token_ids = sequence.sequence_id, sequence.token_ids
        if token_ids[-1] == UNKNOWN_TOKEN:
            token_ids.pop()
        failed = sequence_id in output.errors
        if failed and sequence_id not in output.refused and sequence.request.status is not _RUNNING:
            self.kv.reset_prefix_cache()  # its blocks were given back with their names, and may be bad
        num_sampled = len(output.sampled_token_ids.get(sequence_id, ()))
        if not failed and num_sampled != (sequence_id in flight.sampling):
            raise QuireError(f"the model returned {num_sampled} tokens for {sequence!r}")
        if not failed and not num_sampled:
            return
        self._advance(sequence, 0, output, news)
        ahead, lives = flight.ahead, self._sequences.get(sequence_id) is sequence
        if lives and ahead is not None and sequence_id in ahead.num_scheduled_tokens:
            self.kv.name_known(sequence)

    def _finish_loads(self, loaded: dict[int, bool]) -> None:
        for block_id, sound in loaded.items():
            self._stats.disk_cache_hits += self.kv.block_size * sound
            self.kv.finish_load(block_id, sound)
            for request in self._loading:
                request.loading.discard(block_id)
        for request in [request for request in self._loading if not request.loading]:
            self._loading.remove(request)
            request.status = RequestStatus.WAITING
            self._waiting.push(request)

    def _advance(self, sequence: Sequence, num_scheduled: int, output: ModelOutput, news: list[SequenceOutput]) -> None:
        """Apply one sequence's results, and append what there is to tell to `news`."""
        request, sequence_id = sequence.request, sequence.sequence_id
        if output.errors and sequence_id in output.errors:
            self._fail(sequence, output.errors[sequence_id], news, refused=sequence_id in output.refused)
            return
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_scheduled
        if request.beam is not None:
            self._advance_beam(sequence, output, news)
            return
        if request.pooling is not None:
            self._advance_pooling(sequence, output, news)
            return
        prompt_logprobs = None
        if request.owes_prompt_logprobs and sequence_id in output.prompt_logprobs:
            prompt_logprobs = self._new_prompt_logprobs(request, start, output.prompt_logprobs[sequence_id])
        sampled = output.sampled_token_ids.get(sequence_id, [])
        if bool(sampled) != (sequence.num_computed_tokens == len(sequence.token_ids)) and request.status is _RUNNING:
            raise QuireError(f"the model returned {len(sampled)} tokens for {sequence!r}")
        status = None
        num_taken = 0
        for token_id in sampled:
            sequence.token_ids.append(token_id)
            num_taken += 1
            status = check_stop(sequence, token_id, self.length_limit)
            if status is not None:
                break
        complete = status is not _STOPPED and num_taken == len(sampled) and sequence_id in output.completed
        if complete:
            status = _STOPPED  # also where it is as long as it may be: nothing is missing
        if output.sampler_states and sequence_id in output.sampler_states:
            sequence.sampler_state = output.sampler_states[sequence_id]
        if request.dropped and sequence_id in request.dropped and sampled:
            self._end_sequence(sequence)  # it was aborted, but the others needed it to compute their prompt
            return
        if num_taken or prompt_logprobs:
            logprobs = output.logprobs.get(sequence_id) if output.logprobs else None
            if num_taken < len(sampled):
                sampled = sampled[:num_taken]
                logprobs = logprobs[:num_taken] if logprobs is not None else None
            entry = self._tell(sequence, sampled)
            entry.logprobs, entry.prompt_logprobs = logprobs, prompt_logprobs
            entry.sampler_state = sequence.sampler_state
            if status is not None:
                entry.finish_reason = status.finish_reason
                entry.complete = complete and sampled[-1] not in request.stop_ids
                if status is _STOPPED and not complete:
                    entry.stop_reason = stop_reason(sequence)
            news.append(entry)
        if status is not None:
            self._end_sequence(sequence)

    def _advance_pooling(self, sequence: Sequence, output: ModelOutput, news: list[SequenceOutput]) -> None:
        """Tell what was made of a prompt, once all of it is computed; that is the end of it."""
        if sequence.num_left:
            return
        entry = self._tell(sequence, [])
        entry.pooled = output.pooled.get(sequence.sequence_id)
        if entry.pooled is None:
            raise QuireError(f"the model returned nothing for {sequence!r}")
        entry.finish_reason = "stop"
        news.append(entry)
        self._end_sequence(sequence)

    def _fail(self, sequence: Sequence, error: str, news: list[SequenceOutput], *, refused: bool) -> None:
        """`sequence` cannot go on: it ends, and with it all that depends on it.

        If its request is not `refused`, its logits were not finite, and its KV may be bad: nobody may find it.
        """
        request = sequence.request
        if request.beam is not None or not request.forked:
            for beam in request.sequences:
                self.kv.free(beam, forget=not refused)
            status = RequestStatus.FINISHED_IGNORED if refused else RequestStatus.FINISHED_ERROR
            self._end(request, status, error)
            return
        entry = self._tell(sequence, [])
        entry.finish_reason, entry.error, entry.refused = "error", error, refused
        news.append(entry)
        self._end_sequence(sequence, failed=not refused)

    def _new_prompt_logprobs(
        self, request: Request, start: int, entries: list[TokenTopLogprobs]
    ) -> list[TokenTopLogprobs] | None:
        """Return those of `entries`, of the prompt positions from `start + 1` on that are wanted, that are new.

        A sequence preempted within its prompt computes its first positions twice.
        """
        start = max(start, request.prompt_logprobs_after)
        fresh = entries[max(request.num_prompt_logprobs - start, 0) :]
        request.num_prompt_logprobs += len(fresh)
        return fresh or None

    def _tell(self, sequence: Sequence, new_token_ids: list[int], name: str | None = None) -> SequenceOutput:
        """Return news of `sequence`, the first with what is known since it was scheduled."""
        request = sequence.request
        entry = SequenceOutput(name or sequence.sequence_id, new_token_ids, num_preemptions=request.num_preemptions)
        if not sequence.has_output:
            sequence.has_output = True
            entry.num_cached_tokens = request.num_cached_tokens
            entry.first_scheduled_time = request.first_scheduled_time
        return entry

    def _advance_beam(self, sequence: Sequence, output: ModelOutput, news: list[SequenceOutput]) -> None:
        """Keep the candidates of one beam; once those of all are there, let the search choose how it goes on."""
        request = sequence.request
        assert request.beam is not None
        if sequence.num_left:
            return
        found = output.candidates.get(sequence.sequence_id)
        if found is None:
            raise QuireError(f"the model returned no candidates for {sequence!r}")
        sequence.candidates = found
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
            entry = self._tell(request.sequences[0], [], request.request_id)
            entry.beams, entry.finish_reason = beams, beams[0].finish_reason
            news.append(entry)
            request.num_output_tokens = max(len(beam.token_ids) for beam in beams) * len(beams)
            self._end(request, RequestStatus.FINISHED_STOPPED)
        else:
            self._place_beams(request, step.running)

    def _place_beams(self, request: Request, running: list[tuple[int, int]]) -> None:
        """Make the sequences of `request` those of `running` (parent, token): best children in place, others forked."""
        parents = list(request.sequences)
        placement = place(running, len(parents))
        children: dict[int, Sequence] = {}
        for parent, child in placement.forks:
            source = parents[parent]
            copy = source.fork(self._new_name(request), source.seed)
            self.kv.fork(source, copy)
            self._sequences[copy.sequence_id] = copy
            if source.known:  # one that was swapped in with nothing to compute is not; its copy will be sent in full
                copy.known = True
                self._forks.append(ForkData(source.sequence_id, copy.sequence_id, copy.seed))
            children[child] = copy
        for parent, child in placement.in_place:
            children[child] = parents[parent]
        for parent in placement.ended:
            self._forget(parents[parent], failed=False)
        request.sequences = [children[child] for child in range(len(running))]
        for beam, (_, token_id) in zip(request.sequences, running, strict=True):
            beam.candidates = None
            beam.token_ids.append(token_id)
            beam.unsent.append(token_id)

    def _new_name(self, request: Request) -> str:
        """Return an id for a further beam of `request` that no live sequence has."""
        while True:
            request.num_forks += 1
            name = f"{request.request_id}#{request.num_forks}"
            if name not in self._sequences:
                return name

    # ---- being watched ----

    def live_requests(self) -> list[Request]:
        """Return the running, then the waiting, then the loading requests, each kind in order."""
        return [*self._running, *self._waiting, *self._loading]

    def find(self, sequence_id: str) -> Sequence | None:
        """Return a live sequence, or None; while their prompt is computed, all samples of a request are the first."""
        return self._sequences.get(sequence_id)

    def stats(self) -> SchedulerStats:
        """Return a snapshot; O(running)."""
        stats = self._stats
        stats.num_running = sum(len(request.sequences) for request in self._running)
        stats.num_waiting = len(self._waiting) + len(self._loading)
        stats.num_swapped = self._waiting.num_swapped
        stats.num_free_blocks = self.kv.pool.num_free
        stats.num_free_thin_blocks = self.kv.pool.num_free_thin
        stats.num_free_host_blocks = self.kv.host.pool.num_free
        stats.num_disk_blocks = len(self.kv.disk)
        if self.max_loras:
            stats.running_adapters = _adapters(self._running)
            stats.waiting_adapters = _adapters([*self._waiting, *self._loading])
        return copy(stats)

    def note_step(self, seconds: float, host_gap: float) -> None:
        """Count the time that a step took, and for how much of it the device waited for the host."""
        self._stats.step_seconds += seconds
        self._stats.host_gap_seconds += host_gap

    def check_integrity(self) -> None:
        """Raise `QuireError` on a broken invariant, between steps; costs O(blocks + requests)."""
        running, waiting = self._running, list(self._waiting)
        if sorted(running, key=BY_ORDER) != running or sorted(waiting, key=BY_ORDER) != waiting:
            raise QuireError("running or waiting requests are out of order")
        everyone = [*running, *waiting, *self._loading]
        if {id(r) for r in everyone} != {id(r) for r in self._requests.values()} or len(everyone) != len(
            self._requests
        ):
            raise QuireError("live requests are not the running, waiting and loading ones")
        num_seats = sum(request.num_seats for request in running)
        if num_seats != self._num_seats or num_seats > self.max_num_seqs:
            raise QuireError(f"{self._num_seats} seats counted, {num_seats} taken, {self.max_num_seqs} there are")
        num_tables = 0
        for request in running:
            if request.status is not RequestStatus.RUNNING or not request.sequences:
                raise QuireError(f"{request!r} runs")
            for sequence in request.sequences:
                num_slots = len(self.kv.block_ids(sequence.sequence_id)[0]) * self.kv.block_size
                num_tables += num_slots > 0
                if num_slots < sequence.num_computed_tokens:
                    raise QuireError(f"{sequence!r} has {num_slots} slots")
            if request.num_left == 0 and not self._num_under_way:
                raise QuireError(f"{request!r} has nothing to compute")
        for request in waiting:
            if request.status is not RequestStatus.SWAPPED and any(s.num_computed_tokens for s in request.sequences):
                raise QuireError(f"{request!r} waits with tokens computed")
        if any(s.known for request in (*waiting, *self._loading) for s in request.sequences):
            raise QuireError("the worker has sequences that do not run")
        if self.kv.num_tables() != num_tables:
            raise QuireError(f"{self.kv.num_tables()} block tables for {num_tables} running sequences")
        self.kv.check_integrity()


def _adapters(requests: Iterable[Request]) -> list[str]:
    """Return the names of their LoRA adapters."""
    return sorted({request.lora.lora_name for request in requests if request.lora is not None})
