"""`LiveRequests` moves unfinished requests from queue to queue; `RequestQueue` holds those that wait.

When a request moves is decided elsewhere: by `admission` and the planners, and in `scheduler` where outputs end it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from quire.engine_request import EngineRequest
from quire.errors import ErrorData, QuireError, RequestError, echo
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.policy import Policy
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.step import ForkData, SequenceOutput

BY_ORDER = attrgetter("order_key")


class RequestQueue:
    """Sorts requests by their `order_key`, which no two share.

    Attributes:
        num_swapped: how many of them have their KV in the host's pool.
        num_changes: how often a request was added or removed.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_swapped = self.num_changes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in order."""
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Add a request whose `order_key` is set."""
        insort(self._requests, request, key=BY_ORDER)
        self.num_swapped += request.status is RequestStatus.SWAPPED
        self.num_changes += 1

    def first(self, count: int) -> list[Request]:
        """Return the first `count` requests."""
        return self._requests[:count]

    def peek(self) -> Request | None:
        """Return the first request, or None."""
        return self._requests[0] if self._requests else None

    def last(self) -> Request | None:
        """Return the last request, or None."""
        return self._requests[-1] if self._requests else None

    def remove(self, request: Request) -> None:
        """Remove a request, whose status is still what it was when it was pushed."""
        index = bisect_left(self._requests, request.order_key, key=BY_ORDER)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_swapped -= request.status is RequestStatus.SWAPPED
        self.num_changes += 1


class LiveRequests:
    """Holds every live request, by id and in the one queue that its status names.

    Attributes:
        waiting: new, preempted and swapped requests. running: sorted like those. loading, deferred: in any order.
        num_reserved_slots: how many sequences the running requests may have side by side.
        num_added: how many requests were ever added.
        outputs: of requests that did not end by the model's output; they are sent with the next ones.
        finished_ids, forks: ids of sequences that ended, and new forks, for the next plan.
        on_finished: called with each request that was added or deferred, and has ended.
    """

    def __init__(self, kv: KVCacheManager, policy: Policy, clock: Callable[[], float]) -> None:
        self._kv, self._policy, self._clock = kv, policy, clock
        self.on_finished: Callable[[EngineRequest], None] | None = None
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, Sequence] = {}
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self.loading: list[Request] = []
        self.deferred: list[Request] = []
        self.num_reserved_slots = 0
        self.num_added = 0
        self.outputs: list[SequenceOutput] = []
        self.finished_ids: list[str] = []
        self.forks: list[ForkData] = []

    # ---- lookup ----

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield the running, then the waiting, the loading and the deferred requests, each kind in order."""
        yield from self.running
        yield from self.waiting
        yield from self.loading
        yield from self.deferred

    def get_sequence(self, sequence_id: str) -> Sequence | None:
        """Return a live sequence, or None; while the prompt is computed, the first one stands for all samples."""
        return self._sequences.get(sequence_id)

    def get_request(self, request_id: str) -> Request | None:
        """Return a live request, or None."""
        return self._requests.get(request_id)

    def request_ids(self, sequence_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests of these sequences, each once; sequences that are not live are left out."""
        sequences = [self._sequences[name] for name in sequence_ids if name in self._sequences]
        return list(dict.fromkeys(sequence.request.request_id for sequence in sequences))

    def check_ids(self, request: Request) -> None:
        """Raise `RequestError` if a live request, or sequence, has the id of this one or of one of its sequences."""
        if request.request_id in self._requests or any(
            name in self._sequences for name in request.engine_request.sequence_ids
        ):
            raise RequestError(f"request id {echo(request.request_id)} is in use already", param="request_id")

    # ---- from one state to another ----

    def add(self, request: Request) -> None:
        """Queue a new request, or a deferred one."""
        if request.status is RequestStatus.DEFERRED:
            self.deferred.remove(request)
            request.transition(RequestStatus.WAITING)
        else:
            self._register(request)
        if request.background:  # behind all others; and what it takes is on nobody's account
            request.order_key = (math.inf, request.engine_request.arrival_time, self.num_added)
        else:
            request.order_key = self._policy.key(request, self.num_added)
        self.num_added += 1
        self.waiting.push(request)

    def defer(self, request: Request) -> None:
        """Keep a new request until `add` is called for it."""
        self._register(request)
        request.transition(RequestStatus.DEFERRED)
        self.deferred.append(request)

    def _register(self, request: Request) -> None:
        self._requests[request.request_id] = request
        for sequence_id in request.engine_request.sequence_ids:  # those to come answer to their ids already
            self._sequences[sequence_id] = request.sequences[0]
        if request.is_forked:  # it had begun in another engine
            self._sequences.update((sequence.sequence_id, sequence) for sequence in request.sequences)

    def refuse(self, request: Request, error: ErrorData) -> None:
        """End a request that was not added, or was deferred, with an error."""
        if request.status is RequestStatus.DEFERRED:
            self.finish(request, RequestStatus.FINISHED_IGNORED, error)
            return
        request.transition(RequestStatus.FINISHED_IGNORED)
        self._output_errors(request.engine_request.sequence_ids, error)

    def admit(self, request: Request) -> None:
        """Move a waiting request to the running ones."""
        self.waiting.remove(request)
        request.transition(RequestStatus.RUNNING)
        request.passed_over_since = None
        self.num_reserved_slots += request.num_sequences
        insort(self.running, request, key=BY_ORDER)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
        if not request.background:
            self._policy.admitted(request)

    def preempt(self, request: Request, status: RequestStatus) -> list[str]:
        """Move a running request back to the waiting ones; return the ids of the sequences that leave the worker.

        What becomes of its KV is the caller's concern; `status` says it.
        """
        self._leave_queue(request)
        request.transition(status)
        self.waiting.push(request)
        return [sequence.sequence_id for sequence in request.sequences if self._leave_worker(sequence)]

    def start_loading(self, request: Request) -> None:
        """Move a waiting request to those for which blocks are being loaded."""
        self.waiting.remove(request)
        request.transition(RequestStatus.LOADING)
        self.loading.append(request)

    def finish_loading(self, request: Request) -> None:
        """Move a request whose blocks were loaded back to the waiting ones."""
        self.loading.remove(request)
        request.transition(RequestStatus.WAITING)
        self.waiting.push(request)

    def fork(self, parent: Sequence, sequence_id: str, seed: int, *, samples: bool) -> Sequence:
        """Return a new live sequence that shares all blocks of `parent`; for `samples` see `ForkData`.

        The caller puts it among the sequences of its request.
        """
        child = parent.fork(sequence_id, seed)
        self._kv.fork(parent, child)
        self._sequences[sequence_id] = child
        if parent.on_worker:  # one that was swapped in with nothing to compute is not; its copy will be sent in full
            child.on_worker = True
            self.forks.append(ForkData(parent.sequence_id, sequence_id, seed, samples=samples))
        return child

    def skip_fork(self, request: Request, sequence_id: str) -> None:
        """Forget a sequence that was aborted before it was forked."""
        del self._sequences[sequence_id]
        if request.status is RequestStatus.RUNNING:
            self.num_reserved_slots -= 1

    def finish(self, request: Request, status: RequestStatus, error: ErrorData | None = None) -> None:
        """End `request` and free all it has; with `error` that is the output of each of its sequences."""
        self._leave_queue(request)
        if error is not None:
            names = [sequence.sequence_id for sequence in request.sequences]
            if request.beam is not None:
                names = [request.request_id]
            elif not request.is_forked:
                names = [name for name in request.engine_request.sequence_ids if name not in request.aborted_ids]
            self._output_errors(names, error)
        if request.beam is not None and not request.num_output_tokens:  # it has ended before its search
            request.num_output_tokens = sum(sequence.num_output_tokens for sequence in request.sequences)
        for sequence in request.sequences:
            self.remove(sequence)
        for name in request.engine_request.sequence_ids:
            self._sequences.pop(name, None)
        request.sequences.clear()
        request.is_forked = True
        request.transition(status)
        del self._requests[request.request_id]
        if request.order_key and not request.background:
            self._policy.ended(request)
        if self.on_finished is not None:
            self.on_finished(request.engine_request)

    def finish_sequence(self, sequence: Sequence) -> None:
        """End one sequence, and its request with the last one."""
        request = sequence.request
        if request.status is RequestStatus.RUNNING and request.beam is None:
            self.num_reserved_slots -= 1
        request.sequences.remove(sequence)
        self.remove(sequence)
        if not request.sequences:
            self.finish(request, RequestStatus.FINISHED_STOPPED)

    def remove(self, sequence: Sequence) -> None:
        """Free the blocks of `sequence` and forget it."""
        if sequence.request.beam is None:
            sequence.request.num_output_tokens += sequence.num_output_tokens
        self._sequences.pop(sequence.sequence_id, None)
        sequence.is_live = False
        self._kv.free(sequence)
        if self._leave_worker(sequence):
            self.finished_ids.append(sequence.sequence_id)

    def _leave_queue(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.num_reserved_slots -= request.num_sequences
        elif request.status is RequestStatus.LOADING:
            self.loading.remove(request)
        elif request.status is RequestStatus.DEFERRED:
            self.deferred.remove(request)
        else:
            self.waiting.remove(request)

    def _leave_worker(self, sequence: Sequence) -> bool:
        """Return whether a plan must say that `sequence` leaves the worker; a fork not sent yet is not sent at all."""
        was_on_worker, sequence.on_worker = sequence.on_worker, False
        kept = [fork for fork in self.forks if fork.sequence_id != sequence.sequence_id]
        was_on_worker &= len(kept) == len(self.forks)
        self.forks = kept
        return was_on_worker

    def _output_errors(self, sequence_ids: Iterable[str], error: ErrorData) -> None:
        for name in sequence_ids:
            self.outputs.append(SequenceOutput(name, [], finish_reason="error", error=error))

    def check_integrity(self, max_num_seqs: int) -> None:
        """Raise `QuireError` if a request is not where its status says, or sequences were miscounted."""
        running, waiting = self.running, list(self.waiting)
        if sorted(running, key=BY_ORDER) != running or sorted(waiting, key=BY_ORDER) != waiting:
            raise QuireError("running or waiting requests are out of order")
        everyone = list(self)
        if {id(r) for r in everyone} != {id(r) for r in self._requests.values()} or len(everyone) != len(self):
            raise QuireError("live requests are not the running, waiting, loading and deferred ones")
        total = sum(request.num_sequences for request in running)
        if total != self.num_reserved_slots or total > max_num_seqs:
            raise QuireError(f"{self.num_reserved_slots} running sequences counted, {total} found")
        for request in running:
            if request.status is not RequestStatus.RUNNING or not request.sequences:
                raise QuireError(f"{request!r} is among the running ones")
        for request in waiting:
            if request.status is not RequestStatus.SWAPPED and any(s.num_computed_tokens for s in request.sequences):
                raise QuireError(f"{request!r} waits with tokens computed")
        if any(s.on_worker for request in (*waiting, *self.loading, *self.deferred) for s in request.sequences):
            raise QuireError("the worker has sequences that do not run")
