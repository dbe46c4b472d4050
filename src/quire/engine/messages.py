"""Everything that is said between the front and the engine, as msgspec structs; msgpack on the wire, never pickle.

Front -> engine: `AddRequest`, `AbortRequests`, `Call`, `Shutdown`. Engine -> front: `Ready`, `EngineOutputs`,
`CallResult`, `Failed`. The inline engine passes the same objects without encoding them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quire.lora.request import LoRARequest
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.step import SchedulerStats, SequenceOutput, ThinkingData


class ResumedSequence(msgspec.Struct, array_like=True):
    """How far a sequence had come in an engine that is gone.

    `token_ids` were generated and delivered; they are not delivered again. `sampler_state` as in `NewSequenceData`.
    """

    token_ids: list[int]
    sampler_state: float | None = None


class AddRequest(msgspec.Struct, tag=True):
    """A request: one prompt, and the completions of it that are generated side by side.

    Attributes:
        request_id: unique among live requests. arrival_time: monotonic seconds.
        sequence_ids, seeds: one for each completion; seeds are drawn by the front where the caller gave none. The ids
            are unique among live sequences, and outputs come in their name. A beam search has one of each.
        stop_ids: all token ids that end the sequence: EOS ids unless ignored, and `stop_token_ids`.
        max_tokens: most tokens to generate, already limited to the context.
        bad_words_ids: token sequences that may not be generated (`bad_words`, tokenized).
        priority: lower runs earlier (with the priority policy). cache_salt: prefix blocks are shared only among
            requests with the same salt. tenant: on whose account it runs, see `--tenant-weights`.
        beam: search for the most likely sequences instead of sampling.
        grammar: what the text must look like, as in `NewSequenceData`; compiled by the engine before it is queued.
        thinking: how to end reasoning that grows too long.
        dry_breakers: as in `NewSequenceData`.
        resumed: of a request that an engine before this one had begun: how far each sequence had come, in the order of
            `sequence_ids`, of which those that had ended are left out. The texts go on as if nothing had happened.
            None: it begins.
        lora: its LoRA adapter; read from its folder if it is not there, before the request is queued.
        pooling: what is wanted of the prompt's hidden states; nothing is generated then. Its task is set.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    sequence_ids: list[str]
    seeds: list[int]
    stop_ids: list[int]
    max_tokens: int
    bad_words_ids: list[list[int]] = []
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    beam: BeamSearchParams | None = None
    grammar: str | None = None
    thinking: ThinkingData | None = None
    dry_breakers: list[tuple[list[int], list[int]]] = []
    resumed: list[ResumedSequence] | None = None
    lora: LoRARequest | None = None
    pooling: PoolingParams | None = None


class AbortRequests(msgspec.Struct, tag=True):
    """Forget these requests, or single sequences of them, and free their blocks; unknown ids are ignored.

    No output is sent for them.
    """

    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """An operation between steps, a method of `EngineCore.call` with its arguments. Answered by `CallResult`."""

    call_id: int
    method: str
    arguments: dict[str, int | bool | str] = {}


MOST_SHOWN = 16384


class ShowBlocks(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "blocks".

    Blocks `start` to `start + limit` - 1 of a tier are shown one by one, and `limit` requests of each queue; `tokens`:
    with token ids; `text`: as a drawing. `cells`, if not 0: instead of blocks one by one, a map of each tier with at
    most so many cells, which is small and quick to make.
    """

    limit: Annotated[int, msgspec.Meta(ge=0, le=MOST_SHOWN)] = 1024
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    tier: Literal["device", "host"] = "device"
    tokens: bool = False
    text: bool = False
    cells: Annotated[int, msgspec.Meta(ge=0, le=MOST_SHOWN)] = 0


class ShowPrefixes(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "prefixes": most nodes of the tree to show; the others as in `ShowBlocks`."""

    limit: Annotated[int, msgspec.Meta(ge=0, le=MOST_SHOWN)] = 1024
    tokens: bool = False
    text: bool = False


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "sleep": 1 frees the KV cache, 2 the weights too."""

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class Shutdown(msgspec.Struct, tag=True):
    """End the engine loop after the current step."""


class EngineOutputs(msgspec.Struct, tag=True):
    """All news of one step."""

    outputs: list[SequenceOutput]
    stats: SchedulerStats
    timestamp: float


class CallResult(msgspec.Struct, tag=True):
    """Answer to a `Call`: `value` is JSON-like; `error` is set instead when it failed."""

    call_id: int
    value: dict[str, Any] | None = None
    error: str | None = None


class Ready(msgspec.Struct, tag=True):
    """The model is loaded and the KV cache allocated; sent once.

    `lora_vocab_size`: most token ids that requests with a LoRA adapter may have; None where there are no adapters.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    lora_vocab_size: int | None = None


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or its loop died. `exit_code` 2 means bad options or a bad model."""

    message: str
    param: str | None = None
    exit_code: int = 1


ToEngine = AddRequest | AbortRequests | Call | Shutdown
FromEngine = EngineOutputs | CallResult | Ready | Failed
