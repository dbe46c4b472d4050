"""What a request gives back: `RequestOutput` and its parts, with the names vLLM uses. Plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import msgspec

from quire.errors import QuireError

if TYPE_CHECKING:
    import numpy as np

    from quire.engine_request import LoRARequest


class Logprob(msgspec.Struct, gc=False):  # there may be millions, and the collector need not look at any
    """One token's log-probability (natural log, from the raw logits), its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: token id -> Logprob; always holds the chosen token, then the top alternatives, or those asked for by id
# (whose `rank` is None).
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[TokenLogprobs]):
    """Positions one after the other in five lists (`SamplingParams.flat_logprobs`); reads like a list of dicts.

    Position i has the entries from `start_indices[i]` to before `end_indices[i]`. A prompt's positions that are not
    scored are empty.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def add(
        self, token_ids: list[int], logprobs: list[float], ranks: Sequence[int | None], texts: Sequence[str | None]
    ) -> None:
        """Append a position."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += texts
        self.end_indices.append(len(self.token_ids))

    def copy(self) -> FlatLogprobs:
        """Return a copy that does not change with this."""
        return FlatLogprobs(
            self.start_indices.copy(),
            self.end_indices.copy(),
            self.token_ids.copy(),
            self.logprobs.copy(),
            self.ranks.copy(),
            self.decoded_tokens.copy(),
        )

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        places = range(self.start_indices[index], self.end_indices[index])
        return {
            self.token_ids[place]: Logprob(self.logprobs[place], self.ranks[place], self.decoded_tokens[place])
            for place in places
        }

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return (self[index] for index in range(len(self)))


def _seconds(start: str, end: str, doc: str) -> Any:
    """Return a property: the seconds from one point in time to another; None if either has not happened."""

    def seconds(metrics: RequestMetrics) -> float | None:
        started, ended = getattr(metrics, start), getattr(metrics, end)
        return None if started is None or ended is None else ended - started

    return property(seconds, doc=doc)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request [s]; None for what has not happened. Points in time are those of `time.monotonic`."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    e2e_seconds = _seconds("arrival_time", "finished_time", "Arrival to end.")
    queue_seconds = _seconds("arrival_time", "first_scheduled_time", "Arrival to first scheduling.")
    ttft_seconds = _seconds("arrival_time", "first_token_time", "Arrival to first token.")
    prefill_seconds = _seconds("first_scheduled_time", "first_token_time", "First scheduling to first token.")
    decode_seconds = _seconds("first_token_time", "last_token_time", "First to last token.")
    inference_seconds = _seconds("first_scheduled_time", "last_token_time", "First scheduling to last token.")

    def mean_token_seconds(self, num_tokens: int, num_sequences: int) -> float | None:
        """Return the mean time from a token to the next one of the same sequence, of this many tokens in all."""
        per_sequence = num_tokens / num_sequences
        if self.decode_seconds is None or per_sequence <= 1:
            return None
        return float(self.decode_seconds / (per_sequence - 1))


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: which of the n.
        text: generated text, stop string cut off (unless asked for); with DELTA outputs only the new part.
        token_ids: generated ids; with DELTA outputs only the new ones.
        cumulative_logprob: sum over all generated tokens so far, when logprobs were asked for, or when completions were
            ranked by it (`best_of`, beam search).
        logprobs: one dict per token in `token_ids`, or `FlatLogprobs`, or None.
        finish_reason: "stop", "length", "repetition", "abort", "error", or None while running.
        stop_reason: the stop string or stop token id that ended it; None for EOS and for other endings.
        error: with "error", what happened: a `RequestError` if this engine can never serve the request, otherwise a
            `GenerationError`.
        lora_request: the adapter it was generated with.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: QuireError | None = None
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All completions of one request, so far or final.

    Attributes:
        prompt: text of the prompt, None when it was given as token ids.
        prompt_logprobs: per prompt position; the first is None (nothing predicts it), and so are those before
            `prompt_logprob_start`. None when not asked for.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_generated_tokens: so far, of all sequences, also of those that `best_of` does not return.
        lora_request: its adapter.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | FlatLogprobs | None = None
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam, as vLLM's `LLM.beam_search` returns it.

    Attributes:
        tokens: prompt and continuation; the token that ended it only with `include_stop_str_in_output`.
        logprobs: always empty: the engine keeps sums, not the log-probability of each token.
        cum_logprob: sum of the log-probabilities of the continuation, its ending token included.
        text: of `tokens`, so with the prompt; empty without a tokenizer.
        finish_reason: "stop" or "length". stop_reason: the token id that ended it.
        score: what beams are ranked by: `cum_logprob` over length ** length_penalty.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """What a model made of a text: a vector [N], one for each token [n, N], or scores [N]; float32."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """How well each class fits a text: probabilities, unless activation was turned off."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit each other."""

    score: float


T = TypeVar("T")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """The answer to a request for a vector or scores.

    Attributes:
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
