"""`Request` and `Sequence` are the scheduler's records of a request, its status, and the tokens of its sequences.

A request has one prompt. It begins as one sequence; when the prompt is computed it becomes as many as were requested
(`n`, `best_of`, or the beams of a search), which share the prompt's blocks. It is scheduled, preempted and resumed as
a whole. Its status changes nowhere else (`Request.transition`); docs/scheduling.md has a picture of the states.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from quire.engine_request import EngineRequest, ResumedSequence
from quire.errors import QuireError, RequestError
from quire.kvcache.block_hash import CacheSalt
from quire.scheduler.beam import BeamSearch
from quire.scheduler.repetition import RepetitionDetector
from quire.step import TokenTopLogprobs


class RequestStatus(IntEnum):
    """State of a request, and how a request or sequence finished.

    A deferred request waits for its grammar or LoRA adapter. Waiting and preempted requests hold no blocks; those of a
    swapped one are in the host's pool; for a loading one, blocks are read from disk. The worker has the sequences of
    running requests only.
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    LOADING = 4
    DEFERRED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9
    FINISHED_IGNORED = 10
    FINISHED_REPETITION = 11

    @property
    def finished(self) -> bool:
        """Whether it is one of the final states."""
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """What an output calls it: "stop", "length", "repetition", "abort" or "error"; None while unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_IGNORED: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
}

_FINISHED = frozenset(_FINISH_REASONS)

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: _FINISHED | {RequestStatus.RUNNING, RequestStatus.LOADING, RequestStatus.DEFERRED},
    RequestStatus.DEFERRED: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.LOADING: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _FINISHED | {RequestStatus.PREEMPTED, RequestStatus.SWAPPED},
    RequestStatus.PREEMPTED: _FINISHED | {RequestStatus.RUNNING, RequestStatus.LOADING},
    RequestStatus.SWAPPED: _FINISHED | {RequestStatus.RUNNING},
    **dict.fromkeys(_FINISHED, frozenset()),
}
"""The states that may follow each state."""


class Sequence:
    """A text as it is generated: its final tokens, tentative ones after them, and how many of these are computed.

    There is no prefill or decode phase: a step computes any number of the tokens that are not computed yet. A tentative
    token is one that a step computes before it is final: a draft, or the token that a step in flight samples, whose
    value is not known here. When the step's result is processed, tokens become final and the rest is rolled back.

    Attributes:
        token_ids: final tokens: the prompt, then the output.
        num_tentative_tokens: tokens after those: `draft_token_ids`, and those that steps in flight should make final.
        draft_token_ids: proposed tokens that the next step is to verify; they follow all other tokens.
        num_computed_tokens: how many of all tokens have KV in the block tables, steps in flight included.
        block_hashes: owned by `kvcache.manager`.
        is_live: whether it has not ended. on_worker: whether the worker has it.
        unsent_token_ids: tokens that the worker, which has the sequence, lacks (beams).
        has_output: whether any output was sent.
        candidates: a beam's most likely next tokens, until those of all beams of the search are there.
        repetitions: state of `check_stop`, where repetitions end the output.
        sampler_state: state of a sampler with a memory after the last token (`ModelOutput.sampler_states`).
    """

    def __init__(self, request: Request, sequence_id: str, seed: int, token_ids: list[int]) -> None:
        self.request = request
        self.sequence_id = sequence_id
        self.seed = seed
        self.token_ids = token_ids
        self.num_tentative_tokens = 0
        self.draft_token_ids: tuple[int, ...] = ()
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.is_live = True
        self.on_worker = False
        self.unsent_token_ids: tuple[int, ...] = ()
        self.has_output = False
        self.candidates: TokenTopLogprobs | None = None
        detection = request.engine_request.sampling_params.repetition_detection
        self.repetitions = None if detection is None else RepetitionDetector(detection, self.num_prompt_tokens)
        self.sampler_state: float | None = None

    def fork(self, sequence_id: str, seed: int) -> Sequence:
        """Return a copy of this sequence, of another id and seed."""
        child = Sequence(self.request, sequence_id, seed, self.token_ids.copy())
        child.num_tentative_tokens = self.num_tentative_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.block_hashes = self.block_hashes.copy()
        child.sampler_state = self.sampler_state
        return child

    @property
    def cache_salt(self) -> CacheSalt:
        """The salt of its request, with the identity of its adapter."""
        request = self.request
        if request.engine_request.lora is None:
            return request.engine_request.cache_salt
        return f"{request.engine_request.lora.lora_name}/{request.adapter_digest}", request.engine_request.cache_salt

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens, tentative ones included."""
        return len(self.token_ids) + self.num_tentative_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of final output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that are not computed."""
        return len(self.token_ids) + self.num_tentative_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether at most one token, and drafts, are not computed."""
        return self.num_uncomputed_tokens <= 1 + len(self.draft_token_ids)

    def drop_drafts(self, num_kept: int = 0) -> None:
        """Give up all drafts but the first `num_kept`."""
        kept = self.draft_token_ids[:num_kept]
        self.num_tentative_tokens -= len(self.draft_token_ids) - len(kept)
        self.draft_token_ids = kept

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the prefix cache may be read; prompt log-probabilities need the logits of every prompt position."""
        request = self.request
        if request.engine_request.sampling_params.skip_reading_prefix_cache:
            return False
        if request.engine_request.pooling is not None:
            return not request.engine_request.pooling.skip_reading_prefix_cache
        return not request.owes_prompt_logprobs

    def __repr__(self) -> str:
        return f"Sequence({self.sequence_id!r}, {self.num_computed_tokens} of {self.num_tokens} tokens computed)"


class Request:
    """A live request: its `engine_request`, as the frontend sent it, and the scheduler's state of it.

    A resumed one has all its sequences from the start, with tokens that are not computed, as if it had been preempted.

    Raises `RequestError` for an empty prompt, and for a sequence resumed without tokens.

    Attributes:
        sequences: those that have not ended; the one that computes the prompt comes first.
        forked: whether the sequences after the first exist yet.
        aborted_ids: of sequences that were aborted before that.
        order_key: its place in the scheduling order, smaller is earlier; set when it is queued.
        max_total_tokens: most tokens of a sequence, prompt included; set by the scheduler.
        background: whether it runs behind those that are not.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission; None before.
        num_expected_tokens: what the prefix cache held of it at the first look-up; None before.
        num_host_tokens, num_disk_tokens: of the cached tokens, those that were loaded from the host, and from disk.
        first_scheduled_time, passed_over_since: seconds of the scheduler's clock.
        num_prompt_logprobs: prompt positions, after the first, whose log-probabilities were sent, or not requested.
        adapter_digest: identifies the content of its LoRA adapter, once that is loaded.
        samples_tokens: whether steps sample tokens of its sequences: not for beams, nor for pooling.
        loading: device blocks that are being loaded from disk for it, by id, with their hashes.
        loaded_hashes: of the blocks that were loaded; None before loads were started.
    """

    def __init__(self, engine_request: EngineRequest) -> None:
        if not engine_request.prompt_token_ids:
            raise RequestError("the prompt must have at least one token", param="prompt")
        self.engine_request = engine_request
        self.request_id = engine_request.request_id
        self.background = engine_request.background
        self.num_prompt_tokens = len(engine_request.prompt_token_ids)
        self.stop_ids = frozenset(engine_request.stop_ids)
        self.beam: BeamSearch | None = None
        self.wants_prompt_logprobs = engine_request.sampling_params.prompt_logprobs is not None
        self.samples_tokens = engine_request.beam is None and engine_request.pooling is None
        self._status = RequestStatus.WAITING
        self.adapter_digest = ""
        self.is_forked = len(engine_request.sequence_ids) == 1
        self.num_forks = 0
        self.aborted_ids: set[str] = set()
        self.loading: dict[int, bytes] = {}
        self.loaded_hashes: set[bytes] | None = None
        self.order_key: tuple[float, ...] = ()
        self.max_total_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_expected_tokens: int | None = None
        self.num_host_tokens = self.num_disk_tokens = 0
        self.num_preemptions = 0
        self.num_output_tokens = 0
        self.first_scheduled_time: float | None = None
        self.passed_over_since: float | None = None
        self.num_prompt_logprobs = self.prompt_logprobs_after
        self.sequences = [
            Sequence(
                self, engine_request.sequence_ids[0], engine_request.seeds[0], list(engine_request.prompt_token_ids)
            )
        ]
        if engine_request.resumed is not None:
            self._resume(engine_request.prompt_token_ids, engine_request.resumed)

    def _resume(self, prompt: list[int], resumed: list[ResumedSequence]) -> None:
        """Begin with the progress of each sequence: tokens after the prompt, and the state of its sampler."""
        if (
            len(resumed) != len(self.engine_request.sequence_ids)
            or self.engine_request.beam is not None
            or not all(item.token_ids for item in resumed)
        ):
            raise RequestError("each resumed sequence needs the tokens that it had; beams have none", param="resumed")
        self.is_forked = True
        self.num_prompt_logprobs = self.num_prompt_tokens  # they were sent before the first token
        self.sequences = []
        for sequence_id, seed, progress in zip(
            self.engine_request.sequence_ids, self.engine_request.seeds, resumed, strict=True
        ):
            sequence = Sequence(self, sequence_id, seed, prompt + progress.token_ids)
            sequence.sampler_state = progress.sampler_state
            self.sequences.append(sequence)

    def add_stop_ids(self, token_ids: list[int]) -> None:
        """Let these tokens end the sequences, too; only before the request is added to a scheduler."""
        self.stop_ids |= frozenset(token_ids)
        self.engine_request = msgspec.structs.replace(self.engine_request, stop_ids=sorted(self.stop_ids))

    @property
    def status(self) -> RequestStatus:
        """The state of the request; `transition` changes it."""
        return self._status

    def transition(self, status: RequestStatus) -> None:
        """Change the status. Raises `QuireError` unless `TRANSITIONS` has it."""
        if status not in TRANSITIONS[self._status]:
            raise QuireError(f"{self!r} cannot become {status.name}")
        self._status = status

    @property
    def prompt_logprobs_after(self) -> int:
        """Number of prompt positions, after the first, without log-probabilities (`prompt_logprob_start`)."""
        return max((self.engine_request.sampling_params.prompt_logprob_start or 0) - 1, 0)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt were requested that were not sent."""
        return self.wants_prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def num_sequences(self) -> int:
        """The most sequences it will have side by side from now on."""
        if self.engine_request.beam is not None:
            return self.engine_request.beam.beam_width
        return len(self.sequences) if self.is_forked else len(self.engine_request.sequence_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens of all its sequences that are not computed."""
        return sum(sequence.num_uncomputed_tokens for sequence in self.sequences)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name}, {self.sequences})"
