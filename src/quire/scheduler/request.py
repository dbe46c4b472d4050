"""`Request`: one sequence from arrival to end, as the control plane sees it: tokens, counts, and a status."""

from __future__ import annotations

from enum import IntEnum

from quire.errors import RequestError
from quire.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Where a request stands. Waiting or preempted ones hold no blocks and are unknown to the worker."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def finished(self) -> bool:
        """Whether the request has ended, one way or another."""
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """The word for it in an output: "stop", "length", "abort", "error"; None while unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """A sequence to generate. There is no prefill or decode phase: it just has tokens that are not computed yet.

    The arguments are the fields of `engine.messages.AddRequest`; the prompt is copied. Raises `RequestError` for an
    empty prompt.

    Attributes:
        token_ids: prompt, then output. num_computed_tokens: how many of them have KV in the block table.
        block_hashes: owned by `kvcache.manager`.
        order_key: its place in the scheduling order, smaller is earlier; set by the scheduler.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission; None before.
        first_scheduled_time: seconds of the scheduler's clock. has_output: whether any output was sent.
        num_prompt_logprobs: prompt positions whose log-probabilities were sent.
    """

    __slots__ = (
        "arrival_time",
        "bad_words_ids",
        "block_hashes",
        "cache_salt",
        "first_scheduled_time",
        "has_output",
        "max_tokens",
        "min_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "order_key",
        "priority",
        "request_id",
        "sampling_params",
        "seed",
        "status",
        "stop_ids",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_time: float,
        seed: int,
        stop_ids: list[int],
        max_tokens: int,
        bad_words_ids: list[list[int]] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if not prompt_token_ids:
            raise RequestError("the prompt must have at least one token", param="prompt")
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.seed = seed
        self.stop_ids = frozenset(stop_ids)
        self.max_tokens = max_tokens
        self.min_tokens = sampling_params.min_tokens
        self.bad_words_ids = bad_words_ids or []
        self.priority = priority
        self.cache_salt = cache_salt
        self.wants_prompt_logprobs = sampling_params.prompt_logprobs is not None

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.order_key: tuple[float, ...] = ()
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.has_output = False
        self.num_prompt_logprobs = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """False while prompt log-probabilities are owed: they need the logits of every prompt position."""
        return not self.wants_prompt_logprobs or self.num_prompt_logprobs >= self.num_prompt_tokens - 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} tokens "
            f"computed)"
        )
