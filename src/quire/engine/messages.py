"""The messages between clients and an engine, as msgspec structs; msgpack on the wire, never pickle.

A client begins with `Hello`, which the engine answers with `Ready`. From then on it sends `EngineRequest`,
`AbortRequests` and `Call`; the engine sends the `EngineOutputs` of the client's own requests, and a `CallResult` for
each call. With `Isolate` it asks to have the engine for itself (`isolation.py`). `Failed` is the last message of an
engine that could not start or died, or that refuses the client. An engine in a thread passes the same objects without
encoding them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from quire.engine_request import EngineRequest
from quire.errors import ErrorData, RequestError, echo
from quire.step import SchedulerStats, SequenceOutput

PROTOCOL_VERSION = 3  # changes with any message that an older peer would misread


class Hello(msgspec.Struct, tag=True):
    """The first message of a client. `client`: its name, for the engine's log."""

    client: str
    protocol: int


class AbortRequests(msgspec.Struct, tag=True):
    """Forget these requests, or single sequences of them, and free their blocks.

    Unknown ids, and those of other clients' requests, are ignored. No output is sent for them.
    """

    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """An operation between steps: "load_lora" or one of `EngineCore.call`. Answered by `CallResult`."""

    call_id: int
    method: str
    arguments: dict[str, int | bool | str] = {}


class Isolate(msgspec.Struct, tag=True):
    """Ask to be the only client with requests in the engine, or be so no more. Granted by `Alone`, in order."""

    alone: bool


class SteppedAside(msgspec.Struct, tag=True):
    """Answer to `StepAside`: the client has aborted its requests, and sends none."""


WAKE_TAGS = ("weights", "kv_cache")
MAX_SHOWN = 16384


class ShowBlocks(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "blocks".

    Blocks `start` to `start + limit` - 1 of a tier are shown one by one, and `limit` requests of each queue; `tokens`:
    with token ids; `text`: as a drawing. `cells`, if not 0: instead of blocks one by one, a map of each tier with at
    most so many cells, which is small and quick to make.
    """

    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHOWN)] = 1024
    start: Annotated[int, msgspec.Meta(ge=0)] = 0
    tier: Literal["device", "host"] = "device"
    tokens: bool = False
    text: bool = False
    cells: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHOWN)] = 0


class ShowPrefixes(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "prefixes": most nodes of the tree to show; the others as in `ShowBlocks`."""

    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_SHOWN)] = 1024
    tokens: bool = False
    text: bool = False


class UnloadLoRA(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "unload_lora"."""

    lora_int_id: int


class Sleep(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "sleep": 1 frees the KV cache, 2 the weights too."""

    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


def check_sleep_level(level: int) -> None:
    """Raise `RequestError` unless this is a level of sleep."""
    if level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, got {level}", param="level")


def check_wake_tags(tags: Sequence[str] | None) -> None:
    """Raise `RequestError` unless these are tags of what `wake_up` allocates."""
    for tag in tags or ():
        if tag not in WAKE_TAGS:
            raise RequestError(f"tags must be of {', '.join(WAKE_TAGS)}, got {echo(tag)}", param="tags")


class EngineOutputs(msgspec.Struct, tag=True):
    """The outputs of one step for one client. `stats` are of the whole engine, and so is `sleep_level`: 0 is awake.

    One without outputs tells all clients that the engine has become idle, fallen asleep or woken up.
    """

    outputs: list[SequenceOutput]
    stats: SchedulerStats
    timestamp: float
    sleep_level: int = 0


class CallResult(msgspec.Struct, tag=True):
    """Answer to a `Call`: `value` is JSON-like; `error` is set instead if it failed."""

    call_id: int
    value: dict[str, Any] | None = None
    error: ErrorData | None = None


class StepAside(msgspec.Struct, tag=True):
    """Abort all requests, answer `SteppedAside`, and send none until the same message without `aside`."""

    aside: bool


class Alone(msgspec.Struct, tag=True):
    """No other client has requests in the engine, until the client gives that up."""


class Ready(msgspec.Struct, tag=True):
    """The model is loaded and the KV cache allocated.

    `lora_vocab_size`: most token ids that requests with a LoRA adapter may have; None where there are no adapters.
    `incarnation`: of the engine; after a restart it is another one, and caches and adapters are gone. `sleep_level`: as
    in `EngineOutputs`, for a client that connects later.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    lora_vocab_size: int | None = None
    incarnation: str = ""
    sleep_level: int = 0


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, its loop died, or it refuses this client.

    `exit_code` 2 means bad options or a bad model.
    """

    message: str
    param: str | None = None
    exit_code: int = 1


ToEngine = EngineRequest | AbortRequests | Call | Isolate | SteppedAside
Received = EngineOutputs | CallResult | StepAside | Alone
FromEngine = Received | Ready | Failed
